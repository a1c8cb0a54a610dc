// How fast the CPU codec is beside a memcpy of the raw tensor, and how far it compresses beside the
// order-0 entropy bound. Each iteration copies, encodes and decodes in turns, so that whatever
// else the machine does hits all three; figures are medians over the iterations, of rates in bytes
// of the raw tensor. One thread is timed by its own CPU clock, which stands still while other
// processes have the core; more threads by the wall clock.
//
//   memswap_codec_cpu_bench --benchmark_filter=avx512/bfloat16/.*/64MB
//
// Columns: encode, decode, memcpy: GB/s (1e9 bytes; memcpy by one thread). encode_x, decode_x: of
// memcpy. choose: what memswap_choose_layout takes, of an encode. ratio: raw bytes over the frame's
// (without unused var); bound: what order-0 allows.
#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "data.h"
#include "memswap/codec.h"
#include "memswap/cpu.h"
#include "memswap/sample.h"

namespace memswap::bench {

namespace {

using frame::Dtype;
using frame::Layout;

struct Case {
  const char* dtype_name;
  Dtype dtype;
  Layout layout;
  Kind kind;
  bool fast;
};

constexpr Case kCases[] = {
    {"bfloat16/dense", Dtype::kBf16, Layout::kDense, Kind::kNormal, false},
    {"bfloat16/dense", Dtype::kBf16, Layout::kDense, Kind::kActivations, false},
    {"bfloat16/dense", Dtype::kBf16, Layout::kDense, Kind::kDropout, false},
    {"bfloat16/dense", Dtype::kBf16, Layout::kDense, Kind::kRandom, false},
    {"bfloat16/fast", Dtype::kBf16, Layout::kDense, Kind::kNormal, true},
    {"bfloat16/sparse", Dtype::kBf16, Layout::kSparse, Kind::kSoftmax, false},
    {"bfloat16/sparse", Dtype::kBf16, Layout::kSparse, Kind::kDropout, false},
    {"float16/dense", Dtype::kFp16, Layout::kDense, Kind::kNormal, false},
    {"float16/sparse", Dtype::kFp16, Layout::kSparse, Kind::kSoftmax, false},
    {"float16/sparse", Dtype::kFp16, Layout::kSparse, Kind::kDropout, false},
    {"float32/dense", Dtype::kFp32, Layout::kDense, Kind::kNormal, false},
    {"float32/upcast", Dtype::kFp32, Layout::kUpcast, Kind::kUpcast, false},
    {"float32/sparse", Dtype::kFp32, Layout::kSparse, Kind::kSoftmax, false},
    {"float32/sparse", Dtype::kFp32, Layout::kSparse, Kind::kDropout, false},
    {"float64/dense", Dtype::kFp64, Layout::kDense, Kind::kNormal, false},
    {"e4m3/dense", Dtype::kE4m3, Layout::kDense, Kind::kNormal, false},
    {"e4m3/dense", Dtype::kE4m3, Layout::kDense, Kind::kActivations, false},
    {"e5m2/dense", Dtype::kE5m2, Layout::kDense, Kind::kNormal, false},
    {"e5m2/dense", Dtype::kE5m2, Layout::kDense, Kind::kActivations, false},
    {"bool/bits", Dtype::kBool, Layout::kBits, Kind::kMask, false},
    {"int64/ints", Dtype::kInt64, Layout::kInts, Kind::kTokens, false},
    {"uint8/raw", Dtype::kUint8, Layout::kRaw, Kind::kRandom, false},
};

// Threads that wait for work, as a parallel_for.
class Pool {
 public:
  explicit Pool(size_t threads) {
    for (size_t i = 1; i < threads; ++i) {
      threads_.emplace_back([this](std::stop_token stop) { serve(stop); });
    }
  }

  static void parallel_for(void* pool, size_t count, void (*task)(void*, size_t), void* context) {
    static_cast<Pool*>(pool)->run(count, task, context);
  }

 private:
  void run(size_t count, void (*task)(void*, size_t), void* context) {
    std::unique_lock lock(mutex_);
    task_ = task;
    context_ = context;
    next_ = 0;
    count_ = count;
    unfinished_ = count;
    changed_.notify_all();
    work(lock);
    changed_.wait(lock, [this] { return unfinished_ == 0; });
  }

  void work(std::unique_lock<std::mutex>& lock) {
    while (next_ < count_) {
      const size_t mine = next_++;
      lock.unlock();
      task_(context_, mine);
      lock.lock();
      if (--unfinished_ == 0) {
        changed_.notify_all();
      }
    }
  }

  void serve(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [this] { return next_ < count_; })) {
      work(lock);
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  void (*task_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  size_t next_ = 0;
  size_t count_ = 0;
  size_t unfinished_ = 0;
  std::vector<std::jthread> threads_;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<uint8_t, Free>;

// Touched, so that nothing measures page faults.
Buffer make_buffer(size_t bytes) {
  const size_t rounded = (bytes + 4095) / 4096 * 4096;
  Buffer buffer(static_cast<uint8_t*>(std::aligned_alloc(4096, rounded)));
  memset(buffer.get(), 0x5a, rounded);
  return buffer;
}

double now_s(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

template <typename Work>
double seconds_of(clockid_t clock, Work work) {
  const double start = now_s(clock);
  work();
  return now_s(clock) - start;
}

double median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// One tensor with what encoding and decoding it need.
class Trip {
 public:
  Trip(const Case& what, size_t bytes)
      : bytes_(bytes), tensor_(make_tensor(what.dtype, what.kind, bytes)) {
    input_ = make_buffer(bytes);
    memcpy(input_.get(), tensor_.data(), bytes);
    const uint64_t elements = bytes / frame::width_of(what.dtype);
    const frame::Sections sections = frame::sections_of(what.dtype, what.layout, elements);
    frame_bytes_ = sections.bytes(sections.max_var_units());
    frame_ = make_buffer(frame_bytes_);
    output_ = make_buffer(bytes);
    encode_.input = input_.get();
    encode_.elements = elements;
    encode_.dtype = static_cast<uint8_t>(what.dtype);
    encode_.layout = static_cast<uint8_t>(what.layout);
    encode_.frame = frame_.get();
    encode_.var_capacity = sections.max_var_units();
    decode_.frame = frame_.get();
    decode_.frame_bytes = frame_bytes_;
    decode_.output = output_.get();
    decode_.elements = elements;
    decode_.dtype = encode_.dtype;
    decode_.status = &status_;
  }

  void use_fast_profile() {
    encode_.profile = MEMSWAP_FAST;
    encode_.center = static_cast<uint8_t>(header().center_sum / header().blocks);
  }

  bool encode(const memswap_codec& codec, const memswap_launch& launch) {
    return codec.encode(&encode_, &launch) == 0;
  }
  bool decode(const memswap_codec& codec, const memswap_launch& launch) {
    return codec.decode(&decode_, &launch) == 0;
  }
  void choose(const memswap_launch& launch) {
    benchmark::DoNotOptimize(
        memswap_choose_layout(input_.get(), encode_.elements, encode_.dtype, &launch));
  }
  void copy() {
    memcpy(output_.get(), input_.get(), bytes_);
    benchmark::ClobberMemory();
  }
  bool matches() const { return status_ == 0 && memcmp(output_.get(), input_.get(), bytes_) == 0; }

  const std::vector<uint8_t>& tensor() const { return tensor_; }
  double ratio() const {
    const frame::Header& all = header();
    const frame::Sections sections = frame::sections_of(
        static_cast<Dtype>(all.dtype), static_cast<Layout>(all.layout), all.elements);
    return static_cast<double>(bytes_) / static_cast<double>(sections.bytes(all.var_used));
  }

 private:
  const frame::Header& header() const {
    return *reinterpret_cast<const frame::Header*>(frame_.get());
  }

  size_t bytes_;
  std::vector<uint8_t> tensor_;
  Buffer input_;  // the same at the start of a page; an allocator of tensors aligns them, too
  uint64_t frame_bytes_ = 0;
  Buffer frame_;
  Buffer output_;
  uint32_t status_ = 0;
  memswap_encode_job encode_{};
  memswap_decode_job decode_{};
};

void run(benchmark::State& state, const char* isa, const Case& what, size_t bytes, size_t threads) {
  const memswap_codec* codec = memswap_codec_cpu_with(isa);
  if (codec == nullptr) {
    state.SkipWithError("not built, or not on this processor");
    return;
  }
  Pool pool(threads);
  memswap_launch launch{};
  if (threads > 1) {
    launch.max_processors = static_cast<uint32_t>(threads);
    launch.parallel_for = &Pool::parallel_for;
    launch.pool = &pool;
  }
  Trip trip(what, bytes);
  bool ok = trip.encode(*codec, launch);
  if (what.fast) {
    trip.use_fast_profile();
    ok = ok && trip.encode(*codec, launch);
  }
  ok = ok && trip.decode(*codec, launch) && trip.matches();
  const clockid_t clock = threads > 1 ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
  std::vector<double> copy_s, encode_s, decode_s, choose_s;
  for (auto _ : state) {
    copy_s.push_back(seconds_of(clock, [&] { trip.copy(); }));
    encode_s.push_back(seconds_of(clock, [&] { ok = ok && trip.encode(*codec, launch); }));
    decode_s.push_back(seconds_of(clock, [&] { ok = ok && trip.decode(*codec, launch); }));
    choose_s.push_back(seconds_of(clock, [&] { trip.choose(launch); }));
    state.SetIterationTime(encode_s.back() + decode_s.back());
  }
  if (!ok || !trip.matches()) {
    state.SkipWithError("what came back is not what went in");
    return;
  }
  const double copy = median(copy_s), encode = median(encode_s), decode = median(decode_s);
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  state.counters["memcpy"] = gigabytes / copy;
  state.counters["encode"] = gigabytes / encode;
  state.counters["decode"] = gigabytes / decode;
  state.counters["encode_x"] = copy / encode;
  state.counters["decode_x"] = copy / decode;
  state.counters["choose"] = median(choose_s) / encode;
  state.counters["ratio"] = trip.ratio();
  state.counters["bound"] = entropy_ratio(what.dtype, trip.tensor());
}

void register_all() {
  for (const char* isa : {"scalar", "vector", "avx512"}) {
    for (const Case& what : kCases) {
      for (const size_t megabytes : {1, 4, 16, 64, 256}) {
        for (const size_t threads : {1, 2}) {
          const std::string name = std::string(isa) + "/" + what.dtype_name + "/" +
                                   name_of(what.kind) + "/" + std::to_string(megabytes) +
                                   "MB/threads:" + std::to_string(threads);
          const size_t bytes = megabytes << 20;
          benchmark::RegisterBenchmark(
              name.c_str(), [=](benchmark::State& state) { run(state, isa, what, bytes, threads); })
              ->UseManualTime()
              ->Unit(benchmark::kMillisecond);
        }
      }
    }
  }
}

}  // namespace

}  // namespace memswap::bench

int main(int argc, char** argv) {
  memswap::bench::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
