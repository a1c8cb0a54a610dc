// Encoding and decoding through memswap_codec_ascend() in emulated device memory, and by the CPU's
// codec, for the tests. A check that fails is printed; main() returns how many did.
#pragma once

#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "emulated_machine.h"
#include "memswap/codec.h"
#include "memswap/portable.h"
#include "patterns.h"

namespace memswap::test {

using ascend_emulator::machine;
using ascend_emulator::Options;
using ascend_emulator::Violation;
using frame::Dtype;
using frame::Header;
using frame::Layout;
using frame::Sections;
using Data = std::vector<uint8_t>;

inline ascend_emulator::GlobalMemory& device() { return ascend_emulator::memory(); }

inline int failures = 0;
inline int checks = 0;

inline void check(bool holds, const std::string& promise) {
  ++checks;
  if (!holds && ++failures <= 20) {
    std::printf("FAILED: %s\n", promise.c_str());
  }
}

struct Format {
  Dtype dtype;
  Layout layout;
  uint32_t width() const { return frame::width_of(dtype); }
  Sections sections(uint64_t elements) const { return frame::sections_of(dtype, layout, elements); }
  bool has_profiles() const { return layout == Layout::kDense || layout == Layout::kUpcast; }
  bool has_bitmaps() const { return layout == Layout::kSparse || layout == Layout::kBits; }
  std::string name() const {
    static const char* const dtypes[] = {"",       "bf16",   "fp16",   "fp32",   "e4m3",
                                         "e5m2",   "fp64",   "bool",   "int8",   "uint8",
                                         "int16",  "uint16", "int32",  "uint32", "int64",
                                         "uint64", "bits8",  "bits16", "bits32", "bits64"};
    static const char* const layouts[] = {"dense", "sparse", "bits", "ints", "raw", "upcast"};
    return std::string(dtypes[static_cast<int>(dtype)]) + "-" + layouts[static_cast<int>(layout)];
  }
};

// Host memory, 128-byte aligned.
struct Frame {
  explicit Frame(uint64_t size) : bytes(size), storage(size + 128) {
    begin = storage.data() + (128 - reinterpret_cast<uintptr_t>(storage.data()) % 128) % 128;
  }
  Frame(const Frame& other) : Frame(other.bytes) {
    memcpy(begin, other.begin, bytes);
    overflow = other.overflow;
    code = other.code;
  }
  Frame& operator=(const Frame&) = delete;
  uint64_t bytes;
  Data storage;
  uint8_t* begin;
  Data overflow;  // the arena's bytes
  uint64_t cursor = 0;
  int code = 0;  // of the encode

  Header header() const {
    Header result;
    memcpy(&result, begin, sizeof(result));
    return result;
  }
};

struct Run {
  uint32_t cores = 3;
  Options options = {};
  bool checksum = true;
  bool fast = false;  // the profile, with `center`
  uint8_t center = 0;
  uint64_t overflow_capacity = 0;  // units
  uint64_t cursor = 0;             // of the arena, at the beginning
};

inline Frame ascend_encode(const Format& format, const Data& data, uint64_t capacity,
                           const Run& run = {}) {
  const uint64_t elements = data.size() / format.width();
  const Sections sections = format.sections(elements);
  Frame frame(sections.bytes(capacity));
  uint8_t* input = device().upload(data.data(), data.size());
  uint8_t* output = device().allocate(frame.bytes);
  // What is behind var_used stays as it was; the host copies the frame as a whole.
  device().clear(output + sections.var, frame.bytes - sections.var);
  memswap_encode_job job{};
  job.input = input;
  job.elements = elements;
  job.dtype = static_cast<uint8_t>(format.dtype);
  job.layout = static_cast<uint8_t>(format.layout);
  job.profile = run.fast ? MEMSWAP_FAST : MEMSWAP_CANONICAL;
  job.center = run.center;
  job.checksum = run.checksum;
  job.frame = output;
  job.var_capacity = capacity;
  uint8_t* arena = nullptr;
  uint8_t* cursor = nullptr;
  if (run.overflow_capacity != 0) {
    arena = device().allocate(run.overflow_capacity * frame::kUnitBytes);
    device().clear(arena, run.overflow_capacity * frame::kUnitBytes);
    cursor = device().upload(&run.cursor, sizeof(run.cursor));
    job.overflow = arena;
    job.overflow_capacity = run.overflow_capacity;
    job.overflow_cursor = reinterpret_cast<uint64_t*>(cursor);
  }
  machine().cores = run.cores;
  machine().options = run.options;
  const memswap_launch launch{};
  frame.code = memswap_codec_ascend()->encode(&job, &launch);
  memcpy(frame.begin, output, frame.bytes);
  if (frame.code == 0 && frame.header().status == frame::kOk) {
    device().download(output, frame.bytes);  // fails where a byte was never written
  }
  if (arena != nullptr) {
    frame.overflow = device().download(arena, run.overflow_capacity * frame::kUnitBytes);
    memcpy(&frame.cursor, cursor, sizeof(frame.cursor));
  }
  device().reset();
  return frame;
}

// Returns the status, or the codec's code where that is not 0.
inline int64_t ascend_decode(const Format& format, const Frame& frame, Data* data,
                             const Run& run = {}, bool verify = true) {
  memswap_decode_job job{};
  job.frame = device().upload(frame.begin, frame.bytes);
  job.frame_bytes = frame.bytes;
  job.elements = data->size() / format.width();
  job.dtype = static_cast<uint8_t>(format.dtype);
  job.verify = verify;
  uint8_t* output = device().allocate(data->size());
  uint8_t* status = device().allocate(sizeof(uint32_t));
  device().clear(output, data->size());
  device().clear(status, sizeof(uint32_t));
  job.output = output;
  job.status = reinterpret_cast<uint32_t*>(status);
  if (!frame.overflow.empty()) {
    // The cursor's place before it, as the arena has it.
    uint8_t* arena = device().allocate(frame.overflow.size() + 128);
    device().write(arena + 128, frame.overflow.data(), frame.overflow.size());
    job.overflow = arena + 128;
    job.overflow_capacity = frame.overflow.size() / frame::kUnitBytes;
  }
  machine().cores = run.cores;
  machine().options = run.options;
  const memswap_launch launch{};
  const int code = memswap_codec_ascend()->decode(&job, &launch);
  *data = device().download(output, data->size());
  uint32_t found;
  memcpy(&found, status, sizeof(found));
  device().reset();
  return code != 0 ? code : int64_t{found};
}

inline Frame cpu_encode(const Format& format, const Data& data, const Run& run = {}) {
  const uint64_t elements = data.size() / format.width();
  const Sections sections = format.sections(elements);
  Frame frame(sections.bytes(sections.max_var_units()));
  memswap_encode_job job{};
  job.input = data.data();
  job.elements = elements;
  job.dtype = static_cast<uint8_t>(format.dtype);
  job.layout = static_cast<uint8_t>(format.layout);
  job.profile = run.fast ? MEMSWAP_FAST : MEMSWAP_CANONICAL;
  job.center = run.center;
  job.checksum = 1;
  job.frame = frame.begin;
  job.var_capacity = sections.max_var_units();
  const memswap_launch launch{};
  check(memswap_codec_cpu()->encode(&job, &launch) == 0, "the CPU encodes");
  return frame;
}

inline uint32_t cpu_decode(const Format& format, const Frame& frame, Data* data,
                           bool verify = true) {
  uint32_t status = 0;
  memswap_decode_job job{};
  job.frame = frame.begin;
  job.frame_bytes = frame.bytes;
  job.output = data->data();
  job.elements = data->size() / format.width();
  job.dtype = static_cast<uint8_t>(format.dtype);
  job.verify = verify;
  job.status = &status;
  std::vector<uint64_t> arena(frame.overflow.size() / sizeof(uint64_t));
  memcpy(arena.data(), frame.overflow.data(), frame.overflow.size());
  if (!arena.empty()) {
    job.overflow = arena.data();
    job.overflow_capacity = arena.size();
  }
  const memswap_launch launch{};
  check(memswap_codec_cpu()->decode(&job, &launch) == 0, "the CPU decodes");
  return status;
}

// Frames of all encoders become the same bytes if their blocks are.
inline Data portable(const Frame& frame) {
  std::vector<uint64_t> arena(frame.overflow.size() / sizeof(uint64_t));
  memcpy(arena.data(), frame.overflow.data(), frame.overflow.size());
  const void* overflow = arena.empty() ? nullptr : arena.data();
  uint64_t bytes = 0;
  memswap_frame_portable(frame.begin, frame.bytes, overflow, arena.size(), nullptr, 0, &bytes);
  Frame out(bytes);
  const uint32_t status = memswap_frame_portable(frame.begin, frame.bytes, overflow, arena.size(),
                                                 out.begin, out.bytes, &bytes);
  check(status == frame::kOk, "a frame of the kernels becomes portable");
  return Data(out.begin, out.begin + out.bytes);
}

inline Data make(Pattern pattern, Dtype dtype, uint64_t seed, uint64_t elements) {
  Data data(elements * frame::width_of(dtype));
  fill(pattern, dtype, seed, 0, elements, data.data());
  return data;
}

inline Data bytes_of(const Frame& frame) { return Data(frame.begin, frame.begin + frame.bytes); }

// Units of all payloads, as the records tell.
inline uint64_t payload_units(const Format& format, const Frame& frame) {
  const Sections sections = format.sections(frame.header().elements);
  uint64_t units = 0;
  for (uint32_t tile = 0; tile < sections.tiles; ++tile) {
    frame::Record record;
    memcpy(&record, frame.begin + sections.records + tile * frame::kRecordBytes, sizeof(record));
    for (const uint16_t block : record.block) {
      units += frame::Record::units(block);
    }
  }
  return units;
}

// Both decoders on one frame.
inline void check_decodes(const Format& format, const Frame& frame, const Data& data,
                          const Run& run, const std::string& what) {
  Data output(data.size());
  check(cpu_decode(format, frame, &output) == frame::kOk && output == data,
        what + ": the CPU decodes it");
  output.assign(data.size(), 0);
  const int64_t status = ascend_decode(format, frame, &output, run);
  check(status == frame::kOk && output == data,
        what + ": the kernels decode it, status " + std::to_string(status));
}

// A test under a name, kept from ending the program by a broken rule of the device.
inline void guarded(const std::string& what, const std::function<void()>& test) {
  try {
    test();
  } catch (const Violation& violation) {
    device().reset();
    check(false, what + " keeps the rules: " + violation.what());
  }
}

}  // namespace memswap::test
