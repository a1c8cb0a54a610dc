// Launches: tensors of all kinds, bounded processors, what is asked once, room for payloads,
// arguments, and errors of CUDA.
#include "emulated_codec.h"

namespace memswap::test {
namespace {

class Launches : public Emulated {};

TEST_F(Launches, AreOfManyTensorsOfAllKinds) {
  for (uint64_t i = 0; i < 150; ++i) {
    const Dtype dtype = i % 3 != 0 ? Dtype::kBf16 : static_cast<Dtype>(1 + i % frame::kLastDtype);
    const std::vector<Layout> layouts = layouts_of(dtype);
    const Layout layout = i % 3 != 0 ? Layout::kDense : layouts[i / 3 % layouts.size()];
    SCOPED_TRACE(describe(dtype, layout));
    const Tensor tensor = tensor_at(16 * (i % 4), {Kind::kMixed, 0}, dtype, i,
                                    i % 10 == 0 ? 0 : splitmix64(i, 0) % 3000);
    const Frame frame = encode(emulated(), tensor, {.layout = layout});
    ASSERT_NO_FATAL_FAILURE(expect_same_frame(encode(oracle(), tensor, {.layout = layout}), frame));
    ASSERT_NO_FATAL_FAILURE(expect_round_trip(emulated(), frame, tensor));
  }
}

TEST_F(Launches, AreOneEachWay) {
  for (const auto& [dtype, layout] : {std::pair{Dtype::kBf16, Layout::kDense},
                                      {Dtype::kBf16, Layout::kSparse},
                                      {Dtype::kFp32, Layout::kUpcast},
                                      {Dtype::kBool, Layout::kBits}}) {
    SCOPED_TRACE(describe(dtype, layout));
    const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, dtype, 3, 20 * 8192 + 5);
    emulator::launches.clear();
    const Frame frame = encode(emulated(), tensor, {.layout = layout});
    EXPECT_EQ(emulator::launches.size(), 1u);
    ASSERT_NO_FATAL_FAILURE(expect_same_frame(encode(oracle(), tensor, {.layout = layout}), frame));
    emulator::launches.clear();
    uint32_t status = 0;
    Tensor output(tensor.dtype, tensor.elements);
    memswap_decode_job job = decode_job(frame, &output, &status);
    job.layout_hint = static_cast<uint8_t>(1 + static_cast<uint32_t>(layout));
    ASSERT_EQ(emulated().decode(&job, nullptr), 0);
    EXPECT_EQ(emulator::launches.size(), 1u);
    EXPECT_EQ(status, frame::kOk);
    EXPECT_TRUE(output.buffer == tensor.buffer);
  }
}

TEST_F(Launches, AHintThatIsWrongIsAnErrorOrHarmless) {
  const auto hint_of = [](Layout layout) {
    return static_cast<uint8_t>(1 + static_cast<uint32_t>(layout));
  };
  for (const Layout layout : {Layout::kDense, Layout::kSparse, Layout::kInts, Layout::kRaw}) {
    const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kBf16, 3, 2 * 8192 + 5);
    const Frame frame = encode(emulated(), tensor, {.layout = layout});
    for (const Layout hint : {Layout::kDense, Layout::kSparse, Layout::kInts}) {
      SCOPED_TRACE(describe(tensor.dtype, layout) + " as " + describe(tensor.dtype, hint));
      uint32_t status = 0;
      Tensor output(tensor.dtype, tensor.elements);
      memswap_decode_job job = decode_job(frame, &output, &status);
      job.layout_hint = hint_of(hint);
      ASSERT_EQ(emulated().decode(&job, nullptr), 0);
      if ((layout == Layout::kSparse) == (hint == Layout::kSparse)) {
        EXPECT_EQ(status, frame::kOk);
        EXPECT_TRUE(output.buffer == tensor.buffer);
      } else {
        EXPECT_EQ(status, frame::kBadHeader);
      }
    }
  }
}

TEST_F(Launches, AreTwoForAFrameWithoutAHint) {
  for (uint32_t i = 0; i < 40; ++i) {
    const Layout layout = i % 2 == 0 ? Layout::kDense : Layout::kSparse;
    SCOPED_TRACE(describe(Dtype::kBf16, layout));
    const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kBf16, i, 700 * i);
    const Frame frame = encode(emulated(), tensor, {.layout = layout});
    emulator::launches.clear();
    ASSERT_NO_FATAL_FAILURE(expect_round_trip(emulated(), frame, tensor));
    EXPECT_EQ(emulator::launches.size(), 2u);
  }
}

TEST_F(Launches, WithoutAWorkspaceHeadersComeFirst) {
  has_workspace = false;
  for (const uint64_t elements : {uint64_t{0}, uint64_t{1}, uint64_t{20 * 8192 + 5}}) {
    const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kBf16, 3, elements);
    emulator::launches.clear();
    const Frame frame = encode(emulated(), tensor, {});
    EXPECT_EQ(emulator::launches.size(), 2u);
    ASSERT_NO_FATAL_FAILURE(expect_same_frame(encode(oracle(), tensor, {}), frame));
  }
}

// Whichever thread block ends last writes the header, with what all of them counted.
TEST_F(Launches, TheLastTileWritesTheHeaderInAnyOrder) {
  const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kBf16, 3, 23 * 8192 + 5);
  const Frame expected = encode(oracle(), tensor, {});
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    emulator::machine.seed = seed;
    emulator::machine.processors = 1 + seed % 9;
    EncodeOptions options;
    options.launch.max_processors = seed % 3 == 0 ? 2 : 0;
    const Frame frame = encode(emulated(), tensor, options);
    ASSERT_TRUE(emulator::errors.empty()) << emulator::errors[0];
    ASSERT_NO_FATAL_FAILURE(expect_same_frame(expected, frame)) << "seed " << seed;
  }
}

TEST_F(Launches, WriteTheFinishedHeaderForTheHostAsWell) {
  for (const uint64_t elements : {uint64_t{0}, uint64_t{1}, uint64_t{23 * 8192 + 5}}) {
    const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kBf16, 3, elements);
    Frame frame;
    memswap_encode_job job = encode_job(tensor, {}, &frame);
    Header report{};
    job.report = &report;
    ASSERT_EQ(emulated().encode(&job, nullptr), 0);
    EXPECT_EQ(memcmp(&report, frame.bytes.data(), frame::kHeaderBytes), 0);
    EXPECT_EQ(report.elements, elements);
    has_workspace = false;
    EXPECT_EQ(emulated().encode(&job, nullptr), MEMSWAP_CODEC_BAD_ARGUMENT)
        << "nobody finishes a header that is counted in the frame";
    has_workspace = true;
  }
}

TEST_F(Launches, UseNoMoreProcessorsThanAsked) {
  const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kBf16, 1, 40 * 8192);
  emulator::machine.processors = 10;
  for (const uint32_t bound : {0, 1, 3, 9, 10, 1000}) {
    emulator::launches.clear();
    EncodeOptions options;
    options.launch.max_processors = bound;
    const Frame frame = encode(emulated(), tensor, options);
    ASSERT_NO_FATAL_FAILURE(expect_same_frame(encode(oracle(), tensor, {}), frame));
    Tensor output(tensor.dtype, tensor.elements);
    ASSERT_EQ(decode(emulated(), frame, &output, options.launch), frame::kOk);
    EXPECT_TRUE(output.buffer == tensor.buffer);
    for (const emulator::Launch& launch : emulator::launches) {
      const bool is_bounded = bound != 0 && bound < 10;
      EXPECT_LE(launch.blocks, is_bounded ? bound : 10 * 2);
    }
  }
}

TEST_F(Launches, OfLargeSharedMemoryFitSmallDevices) {
  emulator::machine.shared_bytes = 99 * 1024;
  const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kFp64, 1, 3 * 8192);
  for (const uint32_t bound : {0, 1}) {
    EncodeOptions options{.layout = Layout::kSparse};
    options.launch.max_processors = bound;
    ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, options));
  }
}

TEST_F(Launches, AskTheRuntimeOnceForEachDevice) {
  const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kFp64, 1, 3 * 8192);
  for (const uint32_t processors : {41, 42}) {
    emulator::machine.processors = processors;
    for (int turn = 0; turn < 3; ++turn) {
      emulator::questions = 0;
      const Frame frame = encode(emulated(), tensor, {});
      Tensor output(tensor.dtype, tensor.elements);
      ASSERT_EQ(decode(emulated(), frame, &output), frame::kOk);
      EXPECT_EQ(emulator::questions == 0, turn > 0) << processors << " processors, turn " << turn;
    }
  }
}

TEST_F(Launches, OfADeviceBeyondThoseThatAreRememberedAreRight) {
  const Tensor tensor = tensor_at(0, {Kind::kMixed, 0}, Dtype::kBf16, 1, 30 * 8192);
  for (uint32_t processors = 1000; processors < 1100; ++processors) {
    emulator::machine.processors = processors;
    emulator::current_device();
  }
  emulator::machine.processors = 5;
  emulator::machine.blocks_per_processor = 3;
  emulator::launches.clear();
  ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, {}));
  EXPECT_EQ(emulator::launches.front().blocks, 15u);
}

TEST_F(Launches, TilesThatDoNotFitGoToTheArenaAndComeBack) {
  const Tensor tensor = tensor_at(0, {Kind::kOutliers, 9}, Dtype::kBf16, 21, 5 * 8192 + 100);
  const uint64_t needed = encode(oracle(), tensor, {}).header().var_used;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    emulator::machine.seed = seed;
    for (const uint64_t capacity : {uint64_t{0}, uint64_t{1}, needed / 3, needed - 1, needed}) {
      SCOPED_TRACE(capacity);
      const Frame frame =
          encode(emulated(), tensor, {.var_capacity = capacity, .overflow_capacity = needed});
      EXPECT_EQ(frame.header().status, frame::kOk);
      EXPECT_LE(frame.header().var_used, capacity);
      EXPECT_EQ(frame.header().overflow_used, frame.overflow_cursor);
      EXPECT_EQ(frame.header().overflow_used == 0, capacity == needed);
      EXPECT_NO_FATAL_FAILURE(expect_round_trip(emulated(), frame, tensor));
      EXPECT_NO_FATAL_FAILURE(expect_round_trip(oracle(), frame, tensor));
    }
  }
}

TEST_F(Launches, AFrameWithoutRoomSaysSoAndDoesNotDecode) {
  const Tensor tensor = tensor_at(0, {Kind::kOutliers, 9}, Dtype::kBf16, 21, 5 * 8192 + 100);
  for (const uint64_t arena : {0, 1, 300}) {
    const Frame frame = encode(emulated(), tensor, {.var_capacity = 7, .overflow_capacity = arena});
    EXPECT_EQ(frame.header().status, frame::kNoRoom);
    EXPECT_LE(frame.header().var_used, 7u);
    EXPECT_LE(frame.overflow_cursor, arena);
    Tensor output(tensor.dtype, tensor.elements);
    EXPECT_EQ(decode(emulated(), frame, &output), frame::kBadHeader);
  }
}

TEST_F(Launches, SharedCursorsAreNeverHandedOutTwice) {
  const Tensor tensor = tensor_at(0, {Kind::kOutliers, 9}, Dtype::kBf16, 3, 6 * 8192);
  const uint64_t needed = encode(oracle(), tensor, {}).header().var_used;
  Frame frames[3];
  GuardedBuffer arena(3 * needed * frame::kUnitBytes);
  uint64_t cursor = 0;
  for (Frame& frame : frames) {
    memswap_encode_job job = encode_job(tensor, {.var_capacity = needed / 2}, &frame);
    job.overflow = arena.data();
    job.overflow_capacity = 3 * needed;
    job.overflow_cursor = &cursor;
    ASSERT_EQ(emulated().encode(&job, nullptr), 0);
  }
  EXPECT_TRUE(arena.guards_are_whole());
  uint64_t used = 0;
  for (Frame& frame : frames) {
    used += frame.header().overflow_used;
    uint32_t status = 0;
    Tensor output(tensor.dtype, tensor.elements);
    memswap_decode_job job = decode_job(frame, &output, &status);
    job.overflow = arena.data();
    job.overflow_capacity = 3 * needed;
    ASSERT_EQ(emulated().decode(&job, nullptr), 0);
    EXPECT_EQ(status, frame::kOk);
    EXPECT_TRUE(output.buffer == tensor.buffer);
  }
  EXPECT_EQ(used, cursor);
}

TEST_F(Launches, AnErrorOfCudaIsReturned) {
  const Tensor tensor = tensor_at(0, {Kind::kNormal, 0}, Dtype::kBf16, 1, 1000);
  Frame frame;
  const memswap_encode_job job = encode_job(tensor, {}, &frame);
  emulator::machine.fail_launch = 719;
  EXPECT_EQ(emulated().encode(&job, nullptr), 719);
  EXPECT_EQ(emulator::machine.last_error, 0) << "the next to ask would take it for its own";
  EXPECT_STREQ(emulated().message(719), "an emulated error");
  EXPECT_NE(emulated().message(-77), nullptr);
}

TEST_F(Launches, BadArgumentsEnqueueNothing) {
  const Tensor tensor = tensor_at(0, {Kind::kNormal, 0}, Dtype::kBf16, 1, 1000);
  Frame frame;
  const memswap_encode_job good = encode_job(tensor, {}, &frame);
  const auto expect_bad = [&](auto change) {
    memswap_encode_job job = good;
    change(job);
    EXPECT_EQ(memswap_codec_cuda()->encode(&job, nullptr), MEMSWAP_CODEC_BAD_ARGUMENT);
  };
  expect_bad([](memswap_encode_job& job) { job.input = nullptr; });
  expect_bad([](memswap_encode_job& job) { job.input = static_cast<const char*>(job.input) + 1; });
  expect_bad([](memswap_encode_job& job) { job.frame = static_cast<char*>(job.frame) + 64; });
  expect_bad([](memswap_encode_job& job) { job.frame = nullptr; });
  expect_bad([](memswap_encode_job& job) { job.dtype = 0; });
  expect_bad([](memswap_encode_job& job) { job.layout = 2; });
  expect_bad([](memswap_encode_job& job) { job.profile = 2; });
  expect_bad([](memswap_encode_job& job) { job.overflow = job.frame; });
  memswap_launch launch{};
  launch.workspace = static_cast<char*>(good.frame) + 64;
  EXPECT_EQ(memswap_codec_cuda()->encode(&good, &launch), MEMSWAP_CODEC_BAD_ARGUMENT);
  EXPECT_EQ(memswap_codec_cuda()->encode(nullptr, nullptr), MEMSWAP_CODEC_BAD_ARGUMENT);
  EXPECT_EQ(memswap_codec_cuda()->decode(nullptr, nullptr), MEMSWAP_CODEC_BAD_ARGUMENT);
  EXPECT_TRUE(emulator::launches.empty());
}

}  // namespace
}  // namespace memswap::test
