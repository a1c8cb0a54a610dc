// What a backend makes of the format's constants, as lines of text: two backends that were built
// with the same constants print the same lines (tests/unit/test_format_constants.py).
//
// Each of the golden frames' tensors is encoded with room, without room, and into an arena; each
// committed frame is decoded, and so are damaged copies of a frame.
#pragma once

#include <stdio.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "golden_frames.h"
#include "memswap/codec.h"
#include "memswap/portable.h"

namespace memswap::probe {

using Data = std::vector<uint8_t>;

// Host memory that begins at a multiple of 128, and of no larger power of two.
class Area {
 public:
  explicit Area(uint64_t bytes) : storage_(bytes + 2 * kAlignment), bytes_(bytes) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(storage_.data());
    begin_ = storage_.data() + (kAlignment - first % kAlignment) + kAlignment / 2;
  }
  explicit Area(const Data& data) : Area(data.size()) {
    std::copy(data.begin(), data.end(), begin_);
  }
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;

  uint8_t* begin() { return begin_; }
  uint64_t bytes() const { return bytes_; }
  Data data() const { return Data(begin_, begin_ + bytes_); }

 private:
  static constexpr uintptr_t kAlignment = 256;
  Data storage_;
  uint64_t bytes_;
  uint8_t* begin_;
};

// A backend whose jobs are in host memory: returns what its table's function does.
struct Backend {
  int (*encode)(const memswap_encode_job& job);
  int (*decode)(const memswap_decode_job& job);
};

// FNV-1a, 64 bits.
inline uint64_t hash_of(const uint8_t* bytes, uint64_t count) {
  uint64_t hash = 0xcbf29ce484222325;
  for (uint64_t i = 0; i < count; ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash;
}
inline uint64_t hash_of(const Data& data) { return hash_of(data.data(), data.size()); }

class Probe {
 public:
  Probe(const Backend& backend, std::string golden)
      : backend_(backend), golden_(std::move(golden)) {}

  void run() {
    for (const test::GoldenFrame& golden : test::kGoldenFrames) {
      name_ = golden.name;
      Data elements(golden.elements * frame::width_of(golden.dtype));
      test::fill(golden.pattern, golden.dtype, golden.seed, 0, golden.elements, elements.data());
      Area input(elements);
      const Data whole = encode(golden, input, Room::kAll);
      encode(golden, input, Room::kArena);
      encode(golden, input, Room::kNone);
      const Data committed = read(golden_ + "/" + name_ + ".msf");
      decode(golden, kCommitted, committed, true);
      if (name_ == "bf16-lq2" || name_ == "bf16-sparse-packed" || name_ == "int32-ints") {
        decode_damaged(golden, whole);
      }
    }
    refuse_unknown_dtype();
  }

 private:
  enum class Room { kAll, kArena, kNone };
  static constexpr const char* kCommitted = "decode";

  void say(const std::string& what, uint64_t value) {
    printf("%s %s %016llx\n", name_.c_str(), what.c_str(), static_cast<unsigned long long>(value));
  }

  static Data read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return Data(std::istreambuf_iterator<char>(file), {});
  }

  // Returns the portable frame; nothing where there is none.
  Data encode(const test::GoldenFrame& golden, Area& input, Room room) {
    const frame::Sections sections =
        frame::sections_of(golden.dtype, golden.layout, golden.elements);
    const uint64_t capacity = room == Room::kAll ? sections.max_var_units() : 0;
    // With the room of a tile that an encoder may leave unused.
    Area arena((sections.max_var_units() + frame::kTileBlocks * sections.max_payload_units) *
               frame::kUnitBytes);
    uint64_t cursor = 0;
    Area made(sections.bytes(capacity));
    memswap_encode_job job = test::encode_job_of(golden, input.begin());
    job.frame = made.begin();
    job.var_capacity = capacity;
    if (room == Room::kArena) {
      job.checksum = 0;  // so that a portable frame's flags are not all set
      job.overflow = arena.begin();
      job.overflow_capacity = arena.bytes() / frame::kUnitBytes;
      job.overflow_cursor = &cursor;
    }
    const std::string what = room == Room::kAll     ? "encode"
                             : room == Room::kArena ? "arena"
                                                    : "full";
    const int code = backend_.encode(job);
    if (code != MEMSWAP_CODEC_OK) {
      say(what + " code", static_cast<uint64_t>(code));
      return {};
    }
    frame::Header header{};
    memcpy(&header, made.begin(), sizeof(header));
    say(what + " status", header.status);
    const void* overflow = room == Room::kArena ? arena.begin() : nullptr;
    const uint64_t units = room == Room::kArena ? arena.bytes() / frame::kUnitBytes : 0;
    uint64_t bytes = 0;
    memswap_frame_portable(made.begin(), made.bytes(), overflow, units, nullptr, 0, &bytes);
    Area portable(bytes);
    const uint32_t status = memswap_frame_portable(made.begin(), made.bytes(), overflow, units,
                                                   portable.begin(), portable.bytes(), &bytes);
    if (status != frame::kOk) {
      say(what + " not portable", status);
      return {};
    }
    if (room == Room::kArena && header.overflow_used != 0 && sections.tiles == 1) {
      frame::Record record{};
      memcpy(&record, made.begin() + sections.records, sizeof(record));
      say(what + " base", record.base);
    }
    const Data result = portable.data();
    say(what + " frame", hash_of(result));
    return result;
  }

  void decode(const test::GoldenFrame& golden, const std::string& what, const Data& bytes,
              bool verify) {
    Area made(bytes);
    Area output(golden.elements * frame::width_of(golden.dtype));
    uint32_t status = 0;
    memswap_decode_job job{};
    job.frame = made.begin();
    job.frame_bytes = made.bytes();
    job.output = output.begin();
    job.elements = golden.elements;
    job.dtype = static_cast<uint8_t>(golden.dtype);
    job.verify = verify;
    job.status = &status;
    const int code = backend_.decode(job);
    if (code != MEMSWAP_CODEC_OK) {
      say(what + " code", static_cast<uint64_t>(code));
    } else if (status != 0) {
      // Which of a frame's faults is told first is a backend's own affair, but not of one fault.
      say(what + (what == kCommitted ? " refused" : " status"), what == kCommitted ? 1 : status);
    } else {
      say(what + " elements", hash_of(output.data()));
    }
  }

  // A header, a record, a payload and a checksum that contradict the rest. Only the last is for the
  // checksums: whether a block that is wrong is summed up as well is a backend's own affair.
  void decode_damaged(const test::GoldenFrame& golden, const Data& whole) {
    if (whole.empty()) {
      return;
    }
    const frame::Sections sections =
        frame::sections_of(golden.dtype, golden.layout, golden.elements);
    const auto damaged = [&](const char* what, bool verify, auto damage) {
      Data bytes = whole;
      frame::Header header{};
      frame::Record record{};
      memcpy(&header, bytes.data(), sizeof(header));
      memcpy(&record, bytes.data() + sections.records, sizeof(record));
      damage(header, record);
      memcpy(bytes.data(), &header, sizeof(header));
      memcpy(bytes.data() + sections.records, &record, sizeof(record));
      decode(golden, what, bytes, verify);
    };
    damaged("bad header", false, [](frame::Header& header, frame::Record&) { header.magic ^= 1; });
    damaged("bad record", false,
            [](frame::Header&, frame::Record& record) { record.block[0] |= 0xf000; });
    damaged("bad payload", false,
            [](frame::Header&, frame::Record& record) { record.block[0] -= 1; });
    damaged("bad checksum", true,
            [](frame::Header&, frame::Record& record) { record.checksum ^= 1; });
  }

  // Raw elements of a dtype that the format does not know.
  void refuse_unknown_dtype() {
    name_ = "no dtype";
    for (const int dtype : {0, int{frame::kLastDtype}, frame::kLastDtype + 1}) {
      Area input(8 * frame::kBlockElements);
      Area made(frame::kHeaderBytes + input.bytes() + frame::kRecordBytes);
      memswap_encode_job job{};
      job.input = input.begin();
      job.elements = frame::kBlockElements;
      job.dtype = static_cast<uint8_t>(dtype);
      job.layout = static_cast<uint8_t>(frame::Layout::kRaw);
      job.frame = made.begin();
      say("encode code", static_cast<uint64_t>(backend_.encode(job)));
    }
  }

  const Backend backend_;
  const std::string golden_;
  std::string name_;
};

}  // namespace memswap::probe
