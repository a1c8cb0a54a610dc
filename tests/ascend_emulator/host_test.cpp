// The host side of the Ascend codec: how work is tiled and launched, what is refused, and what
// happens when the runtime says no.
#include <deque>
#include <memory>

#include "emulator/tensors.h"
#include "harness.h"

namespace memswap::test {
namespace {

// A stream that runs nothing until it is told to.
struct Stream {
  struct Task {
    std::string kernel;
    void (*run)(void*);
    std::shared_ptr<void> context;
  };
  std::deque<Task> tasks;

  static int enqueue(void* stream, const char* kernel, const memswap_emulated_span*, size_t,
                     void (*run)(void*), void (*destroy)(void*), void* context) {
    static_cast<Stream*>(stream)->tasks.push_back(
        {kernel, run, std::shared_ptr<void>(context, destroy)});
    return 0;
  }
  void run_all() {
    for (; !tasks.empty(); tasks.pop_front()) {
      tasks.front().run(tasks.front().context.get());
    }
  }
};

using Launches = std::vector<std::pair<std::string, uint32_t>>;

constexpr Format kDense{Dtype::kBf16, Layout::kDense};
constexpr uint64_t kTile = frame::kTileElements;

// A job on memory of the device, and its frame there.
struct Encode {
  Encode(const Data& data, uint64_t capacity, uint64_t arena_units = 0)
      : sections(kDense.sections(data.size() / 2)) {
    job.input = device().upload(data.data(), data.size());
    job.elements = data.size() / 2;
    job.dtype = static_cast<uint8_t>(kDense.dtype);
    job.layout = static_cast<uint8_t>(kDense.layout);
    job.checksum = 1;
    frame_bytes = sections.bytes(capacity);
    job.frame = device().allocate(frame_bytes);
    device().clear(static_cast<uint8_t*>(job.frame), frame_bytes);
    job.var_capacity = capacity;
    if (arena_units != 0) {
      uint8_t* arena = device().allocate(128 + arena_units * frame::kUnitBytes);
      device().clear(arena, 128 + arena_units * frame::kUnitBytes);
      job.overflow = arena + 128;
      job.overflow_capacity = arena_units;
      job.overflow_cursor = reinterpret_cast<uint64_t*>(arena + 120);
    }
  }
  Frame frame() const {
    Frame result(frame_bytes);
    memcpy(result.begin, job.frame, frame_bytes);
    if (job.overflow != nullptr) {
      const auto* arena = static_cast<const uint8_t*>(job.overflow);
      result.overflow.assign(arena, arena + job.overflow_capacity * frame::kUnitBytes);
    }
    return result;
  }
  Sections sections;
  uint64_t frame_bytes;
  memswap_encode_job job{};
};

int encode(const memswap_encode_job& job, uint32_t max_processors = 0) {
  memswap_launch launch{};
  launch.max_processors = max_processors;
  machine().launches.clear();
  return memswap_codec_ascend()->encode(&job, &launch);
}

Data normal(uint64_t elements) { return make({Kind::kNormal, 0}, Dtype::kBf16, 1, elements); }

void test_tiling() {
  struct Case {
    uint64_t elements;
    uint32_t cores, bound, blocks;
  };
  // As many blocks as there are cores, tiles, and processors that the caller allows; at most 64.
  for (const Case& one : {Case{9 * kTile, 40, 0, 9},
                          {9 * kTile - 1, 40, 0, 9},
                          {9 * kTile, 4, 0, 4},
                          {9 * kTile, 40, 3, 3},
                          {1, 40, 0, 1},
                          {70 * kTile, 100, 0, 64},
                          {70 * kTile, 100, 99, 64},
                          {9 * kTile, 1, 0, 1}}) {
    machine().cores = one.cores;
    Stream stream;
    machine().stream = &Stream::enqueue;
    memswap_encode_job job = Encode(normal(1), 0).job;
    job.elements = one.elements;  // nothing runs
    memswap_launch launch{};
    launch.stream = &stream;
    launch.max_processors = one.bound;
    machine().launches.clear();
    const int code = memswap_codec_ascend()->encode(&job, &launch);
    const Launches expected{{"begin_frame", 1},
                            {"encode_dense_bf16", one.blocks},
                            {"place_tiles", 1},
                            {"encode_dense_bf16", one.blocks}};
    check(code == 0 && machine().launches == expected,
          std::to_string(one.elements) + " elements on " + std::to_string(one.cores) +
              " cores are encoded by " + std::to_string(one.blocks));
    machine().stream = nullptr;
    device().reset();
  }
}

void test_launches() {
  machine().cores = 2;
  const Data data = normal(2 * kTile);
  Encode with_arena(data, 0, 40000);
  check(encode(with_arena.job) == 0, "an encode with an arena");
  check(machine().launches == Launches{{"begin_frame", 1},
                                       {"encode_dense_bf16", 2},
                                       {"place_tiles", 1},
                                       {"encode_dense_bf16", 2}},
        "an encode measures, places and stores");
  Data output(data.size());
  const Frame frame = with_arena.frame();
  device().reset();
  check(ascend_decode(kDense, frame, &output) == frame::kOk && output == data, "it decodes");
  check(machine().launches.back() == std::pair<std::string, uint32_t>{"decode_bf16", 2},
        "a decode is one launch");
  Encode raw(data, 0);
  raw.job.layout = static_cast<uint8_t>(Layout::kRaw);
  raw.job.frame = device().allocate(frame::sections_of(kDense.dtype, Layout::kRaw, 2 * kTile).var);
  check(encode(raw.job) == 0 &&
            machine().launches == Launches{{"begin_frame", 1}, {"encode_raw16", 2}},
        "what has no payloads is stored as soon as it is looked at");
  Encode empty(Data(), 0);
  check(encode(empty.job) == 0 && machine().launches.size() == 1 &&
            empty.frame().header().status == frame::kOk,
        "an empty tensor needs a header alone");
  device().reset();
}

// Nothing waits: the work runs when the stream gets there, and the job may be gone.
void test_work_is_stream_ordered() {
  machine().cores = 3;
  const Data first = normal(3 * kTile);
  const Data second = make({Kind::kMixed, 0}, Dtype::kBf16, 2, 2 * kTile + 5);
  Encode one(first, 100, 60000);
  Encode two(second, 100);
  two.job.overflow = one.job.overflow;
  two.job.overflow_capacity = one.job.overflow_capacity;
  two.job.overflow_cursor = one.job.overflow_cursor;
  Stream stream;
  machine().stream = &Stream::enqueue;
  memswap_launch launch{};
  launch.stream = &stream;
  for (const Encode* encode : {&one, &two}) {
    memswap_encode_job job = encode->job;
    check(memswap_codec_ascend()->encode(&job, &launch) == 0, "an encode");
    memset(&job, 0xee, sizeof(job));
  }
  check(one.frame().header().magic == 0 && stream.tasks.size() == 8, "nothing has run yet");
  stream.run_all();
  machine().stream = nullptr;
  const Frame frames[] = {one.frame(), two.frame()};
  check(*one.job.overflow_cursor ==
            frames[0].header().overflow_used + frames[1].header().overflow_used,
        "two frames share an arena");
  device().reset();
  for (int i = 0; i < 2; ++i) {
    check_decodes(kDense, frames[i], i == 0 ? first : second, {}, "a frame in a shared arena");
  }
}

// Memory that is not the emulator's own, as another runtime's is.
void test_memory_of_somebody_else() {
  machine().cores = 3;
  const Data data = normal(2 * kTile + 5);
  const Sections sections = kDense.sections(data.size() / 2);
  Frame frame(sections.bytes(sections.max_var_units()));
  Data output(data.size());
  uint32_t status = 0;
  memswap_encode_job job{};
  job.input = data.data();
  job.elements = data.size() / 2;
  job.dtype = static_cast<uint8_t>(kDense.dtype);
  job.frame = frame.begin;
  job.var_capacity = sections.max_var_units();
  memswap_decode_job back{};
  back.frame = frame.begin;
  back.frame_bytes = frame.bytes;
  back.output = output.data();
  back.elements = job.elements;
  back.dtype = job.dtype;
  back.status = &status;
  check(encode(job) == 0 && memswap_codec_ascend()->decode(&back, nullptr) == 0 &&
            status == frame::kOk && output == data,
        "a round trip in memory that is lent for each launch");
  bool caught = false;
  try {
    ascend_emulator::launch(1, Options(), [&] {
      AscendC::GlobalTensor<uint32_t> beyond;
      beyond.SetGlobalBuffer(reinterpret_cast<uint32_t*>(frame.begin));
      beyond.GetValue(0);
    });
  } catch (const Violation&) {
    caught = true;
  }
  check(caught, "and that is nobody's afterwards");
}

// What the other tests of several cores and of the arena show, they would not show without each
// launch. `capacity`: of var, units.
void check_every_launch_is_needed(uint64_t capacity) {
  machine().cores = 3;
  const Data data = normal(3 * kTile);
  for (size_t missing = 0; missing < 4; ++missing) {
    Encode one(data, capacity, 60000);
    Stream stream;
    machine().stream = &Stream::enqueue;
    memswap_launch launch{};
    launch.stream = &stream;
    check(memswap_codec_ascend()->encode(&one.job, &launch) == 0, "an encode");
    const std::string kernel = stream.tasks[missing].kernel;
    stream.tasks.erase(stream.tasks.begin() + static_cast<std::ptrdiff_t>(missing));
    bool damaged = false;
    machine().dies = false;
    try {
      stream.run_all();
    } catch (const Violation&) {
      damaged = true;
    }
    machine().dies = true;
    machine().stream = nullptr;
    const Frame frame = one.frame();
    device().reset();
    Data output(data.size());
    check(damaged || cpu_decode(kDense, frame, &output) != frame::kOk,
          "launch " + std::to_string(missing) + ", " + kernel + ", left out with var of " +
              std::to_string(capacity) + " units: the frame is damaged");
  }
}

void test_every_launch_is_needed() {
  check_every_launch_is_needed(100);
  check_every_launch_is_needed(kDense.sections(3 * kTile).max_var_units());
}

void test_faults() {
  machine().cores = 3;
  const Data data = normal(3 * kTile);
  Encode one(data, 100, 60000);
  const memswap_codec& codec = *memswap_codec_ascend();
  const auto fails_with = [&](const char* call, int after, size_t launched) {
    machine().failing = call;
    machine().successes = after;
    machine().error = 507899;
    const int code = encode(one.job);
    machine().failing.clear();
    check(code == 507899 && std::string(codec.message(code)).find("507899") != std::string::npos,
          std::string(call) + " fails: its error is returned, and the message has its number");
    check(machine().launches.size() == launched,
          std::string(call) + " fails: nothing is launched behind it");
  };
  fails_with("aclrtGetDevice", 0, 0);
  fails_with("aclGetDeviceCapability", 0, 0);
  fails_with("begin_frame", 0, 0);
  fails_with("encode_dense_bf16", 0, 1);
  fails_with("place_tiles", 0, 2);
  fails_with("encode_dense_bf16", 1, 3);
  machine().cores = 0;
  const int code = encode(one.job);
  check(code != 0 && machine().launches.empty() &&
            std::string(codec.message(code)).find("no vector cores") != std::string::npos,
        "a device without vector cores is refused");
  machine().cores = 3;
  uint32_t status = 0;
  memswap_decode_job decode{};
  decode.frame = one.job.frame;
  decode.frame_bytes = one.frame_bytes;
  decode.output = const_cast<void*>(one.job.input);
  decode.elements = one.job.elements;
  decode.dtype = one.job.dtype;
  decode.status = &status;
  machine().failing = "decode_bf16";
  machine().error = 107003;
  check(codec.decode(&decode, nullptr) == 107003, "a decode that is not launched says so");
  machine().failing.clear();
  device().reset();
}

void test_arguments() {
  machine().cores = 3;
  const memswap_codec& codec = *memswap_codec_ascend();
  check(codec.version == MEMSWAP_CODEC_VERSION && std::string(codec.name) == "ascend" &&
            codec.check_first == 1 && codec.spare_tiles == 1,
        "the table says what it is");
  Encode good(normal(kTile), 100, 60000);
  const auto refused = [&](const char* what, int expected, auto change) {
    memswap_encode_job job = good.job;
    change(job);
    check(encode(job) == expected && machine().launches.empty(), std::string(what) + " is refused");
  };
  const auto move = [](auto* pointer, int bytes) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + bytes);
  };
  using Job = memswap_encode_job;
  constexpr int bad = MEMSWAP_CODEC_BAD_ARGUMENT;
  refused("a frame off by 64 bytes", bad, [&](Job& job) { job.frame = move(job.frame, 64); });
  refused("an odd tensor", bad, [&](Job& job) { job.input = move(job.input, 1); });
  refused("no tensor", bad, [&](Job& job) { job.input = nullptr; });
  refused("an unknown dtype", bad, [&](Job& job) { job.dtype = 20; });
  refused("a layout that does not fit", bad, [&](Job& job) { job.layout = 5; });
  refused("an arena without a cursor", bad, [&](Job& job) { job.overflow_cursor = nullptr; });
  refused("an arena beyond 31 bits", bad,
          [&](Job& job) { job.overflow_capacity = uint64_t{1} << 31; });
  refused("2**32 elements", MEMSWAP_CODEC_NOT_SUPPORTED,
          [&](Job& job) { job.elements = uint64_t{1} << 32; });
  refused("2**41 + 1 elements", bad, [&](Job& job) { job.elements = (uint64_t{1} << 41) + 1; });
  // The largest that is not: nothing runs, everything is computed.
  Stream stream;
  machine().stream = &Stream::enqueue;
  machine().cores = 48;
  memswap_launch launch{};
  launch.stream = &stream;
  memswap_encode_job largest = good.job;
  largest.elements = UINT32_MAX;
  machine().launches.clear();
  check(codec.encode(&largest, &launch) == 0 && machine().launches[1].second == 48,
        "2**32 - 1 elements are launched on all cores");
  machine().stream = nullptr;
  check(codec.encode(nullptr, nullptr) == bad && codec.decode(nullptr, nullptr) == bad,
        "a call without a job is refused");
  device().reset();
}

}  // namespace
}  // namespace memswap::test

int main() {
  using namespace memswap::test;
  guarded("tiling", test_tiling);
  guarded("launches", test_launches);
  guarded("streams", test_work_is_stream_ordered);
  guarded("lent memory", test_memory_of_somebody_else);
  guarded("missing launches", test_every_launch_is_needed);
  guarded("faults", test_faults);
  guarded("arguments", test_arguments);
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
