// Damaged frames: an error, or the tensor as it was; the emulator sees every access outside the
// buffers, reads included.
#include "emulated_codec.h"

namespace memswap::test {
namespace {

class Hostile : public Emulated {
 protected:
  static constexpr uint64_t kElementCount = 8192 + 1024 + 100;

  template <typename Check>
  void for_each_frame(uint64_t elements, Check check) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32, Dtype::kE4m3, Dtype::kE5m2,
                              Dtype::kFp64, Dtype::kBool, Dtype::kInt16, Dtype::kInt64}) {
      for (const Layout layout : layouts_of(dtype)) {
        SCOPED_TRACE(describe(dtype, layout));
        const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, dtype, 33, elements);
        Frame frame = encode(oracle(), tensor, {.layout = layout});
        ASSERT_NO_FATAL_FAILURE(check(tensor, frame));
      }
    }
  }

  // Frames have checksums, so that what is not an error is the tensor.
  static void expect_error_or_tensor(const Frame& frame, const Tensor& tensor) {
    Tensor output = tensor_at(0, {Kind::kRandomBits, 0}, tensor.dtype, 5, tensor.elements);
    const uint32_t status = decode(emulated(), frame, &output);
    ASSERT_TRUE(emulator::errors.empty()) << emulator::errors[0];
    if (status == frame::kOk) {
      ASSERT_TRUE(output.buffer == tensor.buffer) << "wrong elements without an error";
    }
  }
};

TEST_F(Hostile, FlippedBitsOfHeaderAndRecordsAreNoticedOrHarmless) {
  for_each_frame(kElementCount, [&](const Tensor& tensor, Frame& frame) {
    const Sections sections = frame.sections();
    for (uint64_t i = 0; i < 25; ++i) {
      const uint64_t random = splitmix64(11, i);
      const uint64_t byte = i % 3 == 0
                                ? random % frame::kHeaderBytes
                                : sections.records + random % (sections.var - sections.records);
      const auto flip = static_cast<uint8_t>(1 << (random >> 40) % 8);
      frame.bytes.data()[byte] ^= flip;
      ASSERT_NO_FATAL_FAILURE(expect_error_or_tensor(frame, tensor)) << "byte " << byte;
      frame.bytes.data()[byte] ^= flip;
    }
  });
}

TEST_F(Hostile, FlippedBitsOfSlabsAndPayloadsAreNoticedOrHarmless) {
  for_each_frame(3000, [&](const Tensor& tensor, Frame& frame) {
    const uint64_t end = frame.sections().var + frame.header().var_used * frame::kUnitBytes;
    for (uint64_t i = 0; i < 25; ++i) {
      const uint64_t bit = splitmix64(5, i) % (8 * (end - frame::kHeaderBytes));
      uint8_t& byte = frame.bytes.data()[frame::kHeaderBytes + bit / 8];
      byte ^= static_cast<uint8_t>(1 << bit % 8);
      ASSERT_NO_FATAL_FAILURE(expect_error_or_tensor(frame, tensor));
      byte ^= static_cast<uint8_t>(1 << bit % 8);
    }
  });
}

TEST_F(Hostile, RandomBytesStayInsideTheBuffers) {
  for_each_frame(kElementCount, [&](const Tensor& tensor, Frame& frame) {
    const Sections sections = frame.sections();
    for (uint64_t i = 0; i < 16; ++i) {
      Frame random{GuardedBuffer(frame.bytes.size()), GuardedBuffer(256)};
      memcpy(random.bytes.data(), frame.bytes.data(), frame.bytes.size());
      // A record, or a stretch of anything behind the header.
      const uint64_t at =
          i % 2 == 0 ? sections.records + splitmix64(i, 0) % (sections.tiles * sizeof(Record))
                     : sections.slabs + splitmix64(i, 0) % (frame.bytes.size() - sections.slabs);
      const uint64_t end = std::min(at + (i % 2 == 0 ? 4 : 700), frame.bytes.size());
      for (uint64_t byte = at; byte < end; ++byte) {
        random.bytes.data()[byte] = static_cast<uint8_t>(splitmix64(i, byte));
      }
      ASSERT_NO_FATAL_FAILURE(expect_error_or_tensor(random, tensor));
    }
  });
}

TEST_F(Hostile, TruncatedFramesAreErrors) {
  for_each_frame(1500, [&](const Tensor& tensor, Frame& frame) {
    for (uint64_t bytes = 0; bytes < frame.bytes.size(); bytes += 127) {
      Frame shorter{GuardedBuffer(bytes), GuardedBuffer()};
      memcpy(shorter.bytes.data(), frame.bytes.data(), bytes);
      Tensor output(tensor.dtype, tensor.elements);
      ASSERT_NE(decode(emulated(), shorter, &output), frame::kOk) << bytes << " bytes";
      ASSERT_TRUE(emulator::errors.empty()) << emulator::errors[0];
    }
  });
}

TEST_F(Hostile, EmptyFramesAreCheckedAsWell) {
  Tensor tensor(Dtype::kBf16, 0);
  Frame frame = encode(emulated(), tensor, {});
  EXPECT_EQ(decode(emulated(), frame, &tensor), frame::kOk);
  frame.bytes.data()[0] ^= 1;
  EXPECT_EQ(decode(emulated(), frame, &tensor), frame::kBadHeader);
}

TEST_F(Hostile, EachKindOfDamageHasItsStatus) {
  const Tensor tensor = tensor_at(0, {Kind::kOutliers, 6}, Dtype::kBf16, 1, 2000);
  const auto status_after = [&](auto damage) {
    Frame frame = encode(emulated(), tensor, {});
    Record record = frame.record(0);
    damage(frame, record);
    memcpy(frame.bytes.data() + frame.sections().records, &record, sizeof(record));
    Tensor output(tensor.dtype, tensor.elements);
    return decode(emulated(), frame, &output);
  };
  const auto change = [&](auto of_record) {
    return status_after([&](Frame&, Record& record) { of_record(record); });
  };
  EXPECT_EQ(change([](Record& record) { record.block[0] |= 0xf000; }), frame::kBadRecord);
  EXPECT_EQ(change([](Record& record) { record.block[7] = 1 << 12; }), frame::kBadRecord);
  EXPECT_EQ(change([](Record& record) { record.base |= frame::kBaseInOverflow; }),
            frame::kBadRecord);
  EXPECT_EQ(change([](Record& record) { record.base = 1 << 20; }), frame::kBadRecord);
  EXPECT_EQ(change([](Record& record) { --record.block[0]; }), frame::kBadPayload);
  EXPECT_EQ(change([](Record& record) { ++record.block[0]; }), frame::kBadPayload);
  EXPECT_EQ(change([](Record& record) { ++record.checksum; }), frame::kBadChecksum);
  EXPECT_EQ(status_after([](Frame& frame, Record&) { frame.bytes.data()[200] ^= 1; }),
            frame::kBadChecksum);
  Frame frame = encode(emulated(), tensor, {});
  Tensor longer(tensor.dtype, 2001), other(Dtype::kFp16, 2000);
  EXPECT_EQ(decode(emulated(), frame, &longer), frame::kBadHeader);
  EXPECT_EQ(decode(emulated(), frame, &other), frame::kBadHeader);
}

}  // namespace
}  // namespace memswap::test
