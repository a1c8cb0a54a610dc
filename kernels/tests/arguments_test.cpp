// Impossible arguments are refused before anything is written.
#include "support.h"

namespace memswap::test {
namespace {

const memswap_codec& codec() { return *memswap_codec_cpu(); }

class Arguments : public testing::Test {
 protected:
  Arguments() : tensor_({Kind::kNormal, 0}, Dtype::kFp32, 1, 2000), output_(Dtype::kFp32, 2000) {}

  template <typename Change>
  int encode_with(Change change) {
    memswap_encode_job job = encode_job(tensor_, {.overflow_capacity = 8}, &frame_);
    change(job);
    const int code = codec().encode(&job, nullptr);
    if (code != MEMSWAP_CODEC_OK) {
      const GuardedBuffer untouched(frame_.bytes.size());
      EXPECT_TRUE(frame_.bytes == untouched) << "the job was begun";
    }
    return code;
  }

  template <typename Change>
  int decode_with(Change change) {
    Frame frame = encode(codec(), tensor_, {});
    uint32_t status = 0;
    memswap_decode_job job = decode_job(frame, &output_, &status);
    change(job);
    return codec().decode(&job, nullptr);
  }

  static void* shifted(const void* pointer, int bytes) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(pointer)) + bytes;
  }

  Tensor tensor_;
  Tensor output_;
  Frame frame_;
};

TEST_F(Arguments, GoodOnesAreTaken) {
  EXPECT_EQ(encode_with([](memswap_encode_job&) {}), MEMSWAP_CODEC_OK);
  EXPECT_EQ(decode_with([](memswap_decode_job&) {}), MEMSWAP_CODEC_OK);
}

TEST_F(Arguments, NoJobIsRefused) {
  EXPECT_EQ(codec().encode(nullptr, nullptr), MEMSWAP_CODEC_BAD_ARGUMENT);
  EXPECT_EQ(codec().decode(nullptr, nullptr), MEMSWAP_CODEC_BAD_ARGUMENT);
}

TEST_F(Arguments, ImpossibleEncodesAreRefused) {
  using Job = memswap_encode_job;
  const auto refused = [&](auto change) {
    EXPECT_EQ(encode_with(change), MEMSWAP_CODEC_BAD_ARGUMENT);
  };
  refused([](Job& job) { job.input = nullptr; });
  refused([](Job& job) { job.input = shifted(job.input, 2); });
  refused([](Job& job) { job.elements = frame::kMaxElements + 1; });
  refused([](Job& job) { job.dtype = 0; });
  refused([](Job& job) { job.dtype = frame::kLastDtype + 1; });
  refused([](Job& job) { job.layout = frame::kLastLayout + 1; });
  refused([](Job& job) { job.layout = static_cast<uint8_t>(Layout::kBits); });
  refused([](Job& job) { job.profile = 2; });
  refused([](Job& job) { job.frame = nullptr; });
  refused([](Job& job) { job.frame = shifted(job.frame, 64); });
  refused([](Job& job) { job.var_capacity = UINT64_MAX / 2; });
  refused([](Job& job) { job.overflow = nullptr; });
  refused([](Job& job) { job.overflow = shifted(job.overflow, 4); });
  refused([](Job& job) { job.overflow_cursor = nullptr; });
  refused([](Job& job) { job.overflow_capacity = uint64_t{1} << 31; });
}

TEST_F(Arguments, ImpossibleDecodesAreRefused) {
  using Job = memswap_decode_job;
  const auto refused = [&](auto change) {
    EXPECT_EQ(decode_with(change), MEMSWAP_CODEC_BAD_ARGUMENT);
  };
  refused([](Job& job) { job.frame = nullptr; });
  refused([](Job& job) { job.frame = shifted(job.frame, 64); });
  refused([](Job& job) { job.output = nullptr; });
  refused([](Job& job) { job.output = shifted(job.output, 2); });
  refused([](Job& job) { job.elements = frame::kMaxElements + 1; });
  refused([](Job& job) { job.dtype = 0; });
  refused([](Job& job) { job.status = nullptr; });
  refused([](Job& job) { job.overflow_capacity = uint64_t{1} << 31; });
}

TEST_F(Arguments, EveryCodeHasAMessage) {
  for (const int code : {0, -1, -2, 1, 12345, -12345}) {
    ASSERT_NE(codec().message(code), nullptr);
    EXPECT_STRNE(codec().message(code), "");
  }
  EXPECT_STRNE(codec().message(MEMSWAP_CODEC_BAD_ARGUMENT), codec().message(12345));
}

TEST_F(Arguments, AnUnknownInstructionSetIsNone) {
  EXPECT_EQ(memswap_codec_cpu_with("mmx"), nullptr);
  EXPECT_NE(memswap_codec_cpu_with("scalar"), nullptr);
  EXPECT_EQ(memswap_codec_cpu()->version, uint32_t{MEMSWAP_CODEC_VERSION});
}

}  // namespace
}  // namespace memswap::test
