// Payloads that begin with a bitmap: bitmaps that no encoder writes and decoders read all the same,
// and those that decoders refuse.
#pragma once

#include <algorithm>
#include <array>

#include "harness.h"

namespace memswap::test {

using frame::Record;

// A frame of one block of which 40 of the bitmap's bytes are mixed, taken apart.
struct BitmapBlock {
  static constexpr uint32_t kMixed = 40;

  explicit BitmapBlock(const Format& format)
      : format(format),
        tensor(make({Kind::kMixedBytes, kMixed}, format.dtype, 1, frame::kBlockElements)),
        frame(cpu_encode(format, tensor)) {
    memcpy(&record, frame.begin + sections().records, sizeof(record));
    const uint32_t units = Record::units(record.block[0]);
    const uint8_t* payload = frame.begin + sections().var;
    head.assign(payload, payload + frame::kMapsBytes + kMixed);
    streams.assign(payload + head.size(), payload + units * frame::kUnitBytes);
  }

  Sections sections() const { return format.sections(frame::kBlockElements); }
  uint32_t mode() const { return Record::mode(record.block[0]); }
  uint32_t units() const {
    return static_cast<uint32_t>(head.size() + streams.size()) / frame::kUnitBytes;
  }

  // The block's bitmap as it is, or with `extra` of the bytes listed that need not be.
  Data plain() const {
    Data bits(frame::kBitmapBytes);
    size_t next = frame::kMapsBytes;
    for (uint32_t j = 0; j < bits.size(); ++j) {
      const bool z = (head[j / 8] >> j % 8 & 1) != 0;
      const bool f = (head[frame::kByteMapBytes + j / 8] >> j % 8 & 1) != 0;
      bits[j] = z && f ? head[next++] : z ? 0xff : 0;
    }
    return bits;
  }
  Data listing(uint32_t extra) const {
    Data packed(head.begin(), head.begin() + frame::kMapsBytes);
    const Data bits = plain();
    for (uint32_t j = 0; j < bits.size(); ++j) {
      const bool uniform = bits[j] == 0 || bits[j] == 0xff;
      if (uniform && extra == 0) {
        continue;
      }
      extra -= uniform ? 1 : 0;
      packed[j / 8] = static_cast<uint8_t>(packed[j / 8] | 1 << j % 8);
      uint8_t& f = packed[frame::kByteMapBytes + j / 8];
      f = static_cast<uint8_t>(f | 1 << j % 8);
      packed.push_back(bits[j]);
    }
    return packed;
  }

  // What both decoders make of it, if the record says this of the block.
  void check_status(uint16_t entry, uint32_t expected, const std::string& what) const {
    const Sections at = sections();
    Frame changed(at.bytes(units()));
    Header header = frame.header();
    header.var_capacity = header.var_used = units();
    Record said = record;
    said.block[0] = entry;
    memcpy(changed.begin, &header, sizeof(header));
    memcpy(changed.begin + at.records, &said, sizeof(said));
    memcpy(changed.begin + at.var, head.data(), head.size());
    memcpy(changed.begin + at.var + head.size(), streams.data(), streams.size());
    const std::string name = format.name() + ", " + what;
    // Without the checksum: what is found is found in the payload itself.
    Data output(tensor.size());
    const uint32_t cpu = cpu_decode(format, changed, &output, false);
    check(cpu == expected, name + ": status " + std::to_string(cpu) + " of the CPU");
    output.assign(tensor.size(), 0);
    const int64_t status = ascend_decode(format, changed, &output, {}, false);
    check(status == expected, name + ": status " + std::to_string(status) + " of the kernels");
    check(expected != frame::kOk || output == tensor, name + ": the elements");
  }
  void check_status(uint32_t expected, const std::string& what, bool packed = true) const {
    check_status(Record::pack(mode(), units(), packed), expected, what);
  }

  Format format;
  Data tensor;
  Frame frame;
  Record record;
  Data head;     // Z, F and the mixed bytes: whole units
  Data streams;  // what is behind them, with its padding
};

inline void test_packed_bitmaps(const Format& format) {
  const BitmapBlock good(format);
  good.check_status(frame::kOk, "as it was encoded");
  {
    BitmapBlock block(format);
    block.head = good.plain();
    block.check_status(frame::kOk, "a plain bitmap that could be packed", false);
    block.check_status(Record::pack(block.mode(), block.units(), true), frame::kBadPayload,
                       "a plain bitmap that is called packed");
  }
  for (const uint32_t extra : {8u, 56u, frame::kBitmapBytes - BitmapBlock::kMixed}) {
    BitmapBlock block(format);
    block.head = good.listing(extra);
    block.check_status(frame::kOk, "a packed bitmap with " + std::to_string(extra) +
                                       " bytes that need not be there");
  }
  // A byte that is said to be all zeros and all ones: the first, one in the middle, the last.
  for (const uint32_t byte : {0u, 61u, frame::kBitmapBytes - 1}) {
    BitmapBlock block(format);
    const uint8_t kept = static_cast<uint8_t>(~(1 << byte % 8));
    block.head[byte / 8] &= kept;
    block.head[frame::kByteMapBytes + byte / 8] &= kept;
    block.check_status(frame::kBadPayload, "byte " + std::to_string(byte) + " in neither map");
  }
  {
    BitmapBlock block(format);
    std::fill(block.head.begin(), block.head.begin() + frame::kMapsBytes, 0);
    block.check_status(frame::kBadPayload, "no byte in any map");
    std::fill(block.head.begin(), block.head.begin() + frame::kMapsBytes, 0xff);
    block.streams.clear();
    block.check_status(frame::kBadPayload, "maps that promise more bytes than there are");
  }
  for (const uint32_t units : {0u, 1u, 3u, 4u, 8u, good.units() / 2, good.units() - 1}) {
    good.check_status(Record::pack(good.mode(), units, true), frame::kBadPayload,
                      "a payload of " + std::to_string(units) + " units");
  }
  for (const uint32_t units : {0u, 4u, 8u}) {
    good.check_status(Record::pack(good.mode(), units, false), frame::kBadPayload,
                      "a plain bitmap of " + std::to_string(units) + " units");
  }
  good.check_status(Record::pack(frame::kLiteral, good.units(), true), frame::kBadRecord,
                    "a literal block with a packed bitmap");
  good.check_status(Record::pack(frame::kReference, good.units(), true), frame::kBadRecord,
                    "a mode of another layout");
}

// Bit 11 of a record's entry is wrong in layouts that have no bitmaps.
inline void test_packed_without_bitmaps(const Format& format) {
  const Data data = make({Kind::kNormal, 0}, format.dtype, 1, frame::kBlockElements);
  const Frame frame = cpu_encode(format, data);
  frame.begin[format.sections(frame::kBlockElements).records + 5] |= 1 << (Record::kPackedBit - 8);
  Data output(data.size());
  check(cpu_decode(format, frame, &output) == frame::kBadRecord &&
            ascend_decode(format, frame, &output) == frame::kBadRecord,
        format.name() + ": a packed bitmap is a wrong record");
}

}  // namespace memswap::test
