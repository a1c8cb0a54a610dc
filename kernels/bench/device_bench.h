// What the benchmarks of devices share: cases, arguments, sizes, medians, and the JSON they print.
//
// GB/s are 10^9 bytes of the uncompressed tensor per second, for the copy as well (which moves that
// many bytes twice). Copy, encode and decode take turns within a repeat; the medians are of the
// device's events' times. Buffers rotate, so that no tensor is found in the L2 cache. Every decoded
// tensor is compared with what was encoded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "memswap/codec.h"
#include "memswap/frame.h"
#include "patterns.h"  // kernels/tests

namespace memswap::bench {

using frame::Dtype;
using frame::Header;
using frame::Layout;
using frame::Sections;
using test::Kind;
using test::Pattern;

struct Case {
  const char* name;
  Dtype dtype;
  Layout layout;
  Pattern pattern;
  bool is_fast;
  bool is_ragged = false;  // ends within a block

  uint32_t width() const { return frame::width_of(dtype); }
};

inline constexpr Case kCases[] = {
    {"bf16 dense", Dtype::kBf16, Layout::kDense, {Kind::kNormal, 0}, false},
    {"bf16 dense ragged", Dtype::kBf16, Layout::kDense, {Kind::kNormal, 0}, false, true},
    {"bf16 dense fast", Dtype::kBf16, Layout::kDense, {Kind::kNormal, 0}, true},
    {"bf16 sparse half", Dtype::kBf16, Layout::kSparse, {Kind::kSparse, 8}, false},
    {"bf16 sparse causal", Dtype::kBf16, Layout::kSparse, {Kind::kCausal, 10}, false},
    {"fp16 dense", Dtype::kFp16, Layout::kDense, {Kind::kNormal, 0}, false},
    {"fp32 dense", Dtype::kFp32, Layout::kDense, {Kind::kNormal, 0}, false},
    {"fp32 upcast", Dtype::kFp32, Layout::kUpcast, {Kind::kUpcast, 0}, false},
    {"e4m3 dense", Dtype::kE4m3, Layout::kDense, {Kind::kNormal, 0}, false},
    {"bool bits", Dtype::kBool, Layout::kBits, {Kind::kBooleans, 0}, false},
    {"bool bits causal", Dtype::kBool, Layout::kBits, {Kind::kCausal, 10}, false},
    {"int64 ints", Dtype::kInt64, Layout::kInts, {Kind::kRange, 15}, false},
};

struct Arguments {
  bool is_small = false;  // little of everything: for sanitizers, emulators and tests
  int repeats = 51;
  const char* only = nullptr;  // a case's name: this one alone, without bounds of processors
  uint64_t megabytes = 0;      // this size alone
};

// [--small] [--repeats N] [--case NAME] [--megabytes N]; ends the process where they are others.
inline Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--small") == 0) {
      arguments.is_small = true;
      arguments.repeats = 2;
    } else if (std::strcmp(argv[i], "--repeats") == 0 && i + 1 < argc) {
      arguments.repeats = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--case") == 0 && i + 1 < argc) {
      arguments.only = argv[++i];
    } else if (std::strcmp(argv[i], "--megabytes") == 0 && i + 1 < argc) {
      arguments.megabytes = static_cast<uint64_t>(std::max(1, std::atoi(argv[++i])));
    } else {
      std::fprintf(stderr, "usage: %s [--small] [--repeats N] [--case NAME] [--megabytes N]\n",
                   argv[0]);
      std::exit(2);
    }
  }
  return arguments;
}

inline void require(bool is_right, const char* what) {
  if (!is_right) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
  }
}

// Whole blocks, as tensors of models have them; of a ragged case 100 elements less.
inline uint64_t bytes_of(const Case& of, uint64_t wanted) {
  const uint64_t block = uint64_t{frame::kBlockElements} * of.width();
  const uint64_t bytes = (wanted + block - 1) / block * block;
  return of.is_ragged ? bytes - 100 * of.width() : bytes;
}

// What is measured: every case at every size, and the first case under bounds of processors.
template <class Measure>
void for_each(const Arguments& arguments, uint64_t small_bytes,
              const std::vector<uint32_t>& processor_bounds, Measure measure) {
  constexpr uint64_t kMegabyte = 1000000;
  std::vector<uint64_t> sizes = {small_bytes};
  if (!arguments.is_small) {
    sizes = {kMegabyte, 4 * kMegabyte, 16 * kMegabyte, 64 * kMegabyte, 256 * kMegabyte};
  }
  if (arguments.megabytes != 0) {
    sizes = {arguments.megabytes * kMegabyte};
  }
  for (const Case& of : kCases) {
    if (arguments.only != nullptr && std::strcmp(arguments.only, of.name) != 0) {
      continue;
    }
    for (const uint64_t bytes : sizes) {
      measure(of, arguments.is_small ? bytes : bytes_of(of, bytes), 0u);
    }
  }
  if (arguments.only != nullptr) {
    return;
  }
  for (const uint32_t bound : processor_bounds) {
    measure(kCases[0], arguments.is_small ? small_bytes : bytes_of(kCases[0], 64 * kMegabyte),
            bound);
    if (arguments.is_small) {
      return;
    }
  }
}

// A million different elements, repeated: making patterns is slow.
inline std::vector<uint8_t> make_tensor(const Case& of, uint64_t bytes) {
  std::vector<uint8_t> tensor(bytes);
  const uint64_t distinct = std::min<uint64_t>(bytes / of.width(), 1 << 20) * of.width();
  test::fill(of.pattern, of.dtype, 2, 0, distinct / of.width(), tensor.data());
  for (uint64_t at = distinct; at < bytes; at += distinct) {
    std::memcpy(&tensor[at], tensor.data(), std::min(distinct, bytes - at));
  }
  return tensor;
}

inline memswap_encode_job encode_job(const Case& of, uint64_t elements, const void* input,
                                     void* frame, uint64_t var_capacity) {
  memswap_encode_job job{};
  job.input = input;
  job.elements = elements;
  job.dtype = static_cast<uint8_t>(of.dtype);
  job.layout = static_cast<uint8_t>(of.layout);
  job.frame = frame;
  job.var_capacity = var_capacity;
  return job;
}

inline memswap_decode_job decode_job(const Case& of, uint64_t elements, const void* frame,
                                     uint64_t frame_bytes, void* output, void* status) {
  memswap_decode_job job{};
  job.frame = frame;
  job.frame_bytes = frame_bytes;
  job.output = output;
  job.elements = elements;
  job.dtype = static_cast<uint8_t>(of.dtype);
  job.layout_hint = static_cast<uint8_t>(1 + static_cast<uint32_t>(of.layout));
  job.status = static_cast<uint32_t*>(status);
  return job;
}

// The centre that a step after the one of this frame would be given.
inline uint8_t center_of(const Header& header) {
  return static_cast<uint8_t>(header.center_sum / std::max(header.blocks, 1u));
}

// Milliseconds of one call each. Of a row: a call in a row of them, one per set of buffers.
struct Times {
  std::vector<float> copy, encode, decode, encode_row, decode_row;
};

inline double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

inline void print_head(const char* device, int64_t processors, const Arguments& arguments) {
  std::printf("{\"device\": \"%s\", \"processors\": %lld, \"repeats\": %d, \"results\": [", device,
              static_cast<long long>(processors), arguments.repeats);
}

inline void print(const Case& of, uint64_t bytes, uint32_t max_processors, uint64_t frame_bytes,
                  const Times& times, bool is_first) {
  const auto gigabytes_per_s = [&](double ms) { return static_cast<double>(bytes) / ms / 1e6; };
  const double copy_ms = median(times.copy), encode_ms = median(times.encode),
               decode_ms = median(times.decode);
  std::printf(
      "%s\n  {\"case\": \"%s\", \"megabytes\": %.6g, \"max_processors\": %u, \"ratio\": %.4f, "
      "\"copy_gb_s\": %.1f, \"encode_gb_s\": %.1f, \"decode_gb_s\": %.1f, "
      "\"encode_row_gb_s\": %.1f, \"decode_row_gb_s\": %.1f, \"encode_of_copy\": %.3f, "
      "\"decode_of_copy\": %.3f, \"encode_us\": %.1f, \"decode_us\": %.1f}",
      is_first ? "" : ",", of.name, static_cast<double>(bytes) / 1e6, max_processors,
      static_cast<double>(bytes) / static_cast<double>(frame_bytes), gigabytes_per_s(copy_ms),
      gigabytes_per_s(encode_ms), gigabytes_per_s(decode_ms),
      gigabytes_per_s(median(times.encode_row)), gigabytes_per_s(median(times.decode_row)),
      copy_ms / encode_ms, copy_ms / decode_ms, encode_ms * 1e3, decode_ms * 1e3);
  std::fflush(stdout);
}

inline void print_end() { std::printf("\n]}\n"); }

}  // namespace memswap::bench
