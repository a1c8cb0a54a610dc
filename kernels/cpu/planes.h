// Planes and streams of docs/format.md section 2, plainly. Shared by the scalar files alone.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "memswap/frame.h"

namespace memswap::cpu::scalar {

inline constexpr uint32_t kElements = frame::kBlockElements;

constexpr uint32_t bytes_of_bits(uint32_t bits) { return (bits + 7) / 8; }

constexpr uint32_t units_of_bytes(uint32_t bytes) {
  return (bytes + frame::kUnitBytes - 1) / frame::kUnitBytes;
}

// Where element e of a plane of `width` bits is.
struct PlanePosition {
  uint32_t byte;
  uint32_t shift;
};

constexpr PlanePosition plane_position(uint32_t e, uint32_t width) {
  if (width == 1) {
    return {e / 8, e % 8};
  }
  const uint32_t bytes = kElements / 8 * width;
  return {e % bytes, width * (e / bytes)};
}

template <uint32_t width>
using Width = std::integral_constant<uint32_t, width>;

// Calls visit(shift, width) for the planes that a field of `bits` bits is cut into, low bits first.
// The width is a constant: a position in a plane then needs no division.
template <typename Visit>
void for_each_plane(uint32_t bits, Visit visit) {
  uint32_t shift = 0;
  while (bits - shift >= 8) {
    visit(shift, Width<8>());
    shift += 8;
  }
  const auto visit_if_set = [&](auto width) {
    if (((bits - shift) & width) != 0) {
      visit(shift, width);
      shift += width;
    }
  };
  visit_if_set(Width<4>());
  visit_if_set(Width<2>());
  visit_if_set(Width<1>());
}

// Writes bits shift .. shift + bits - 1 of 1024 values as planes and returns their end.
template <typename Value>
uint8_t* put_planes(uint8_t* out, const Value* values, uint32_t shift, uint32_t bits) {
  for_each_plane(bits, [&](uint32_t plane_shift, auto width) {
    constexpr uint32_t mask = (1u << width) - 1;
    memset(out, 0, kElements / 8 * width);
    for (uint32_t e = 0; e < kElements; ++e) {
      const PlanePosition at = plane_position(e, width);
      const auto symbol = static_cast<uint32_t>(values[e] >> (shift + plane_shift)) & mask;
      out[at.byte] = static_cast<uint8_t>(out[at.byte] | symbol << at.shift);
    }
    out += kElements / 8 * width;
  });
  return out;
}

// The reverse: ORs the planes into the values and returns the planes' end.
template <typename Value>
const uint8_t* get_planes(const uint8_t* in, Value* values, uint32_t shift, uint32_t bits) {
  for_each_plane(bits, [&](uint32_t plane_shift, auto width) {
    constexpr uint32_t mask = (1u << width) - 1;
    for (uint32_t e = 0; e < kElements; ++e) {
      const PlanePosition at = plane_position(e, width);
      const auto symbol = static_cast<Value>(in[at.byte] >> at.shift & mask);
      values[e] = static_cast<Value>(values[e] | symbol << (shift + plane_shift));
    }
    in += kElements / 8 * width;
  });
  return in;
}

// Appends symbols of up to 8 bits to a stream.
class StreamWriter {
 public:
  explicit StreamWriter(uint8_t* out) : out_(out) {}

  void put(uint32_t symbol, uint32_t width) {
    pending_ |= symbol << pending_bits_;
    pending_bits_ += width;
    while (pending_bits_ >= 8) {
      flush_byte();
      pending_bits_ -= 8;
    }
  }

  // Pads the stream to a byte and returns its end.
  uint8_t* finish() {
    if (pending_bits_ != 0) {
      flush_byte();
      pending_bits_ = 0;
    }
    return out_;
  }

 private:
  void flush_byte() {
    *out_++ = static_cast<uint8_t>(pending_);
    pending_ >>= 8;
  }

  uint8_t* out_;
  uint32_t pending_ = 0;
  uint32_t pending_bits_ = 0;
};

// Symbol i of a stream of symbols of `width` bits, a divisor of 8.
constexpr uint32_t stream_symbol(const uint8_t* stream, uint32_t i, uint32_t width) {
  return stream[i * width / 8] >> (i * width % 8) & ((1u << width) - 1);
}

// Hands out a payload's parts one after another and knows whether they were all of it.
class PayloadReader {
 public:
  PayloadReader(const uint8_t* payload, uint32_t units)
      : payload_(payload), bytes_(units * frame::kUnitBytes) {}

  // The next `bytes` bytes, or NULL if the payload has no more so many.
  const uint8_t* take(uint32_t bytes) {
    if (bytes > bytes_ - taken_) {
      return nullptr;
    }
    const uint8_t* part = payload_ + taken_;
    taken_ += bytes;
    return part;
  }

  const uint8_t* take_stream(uint32_t symbols, uint32_t width) {
    return take(bytes_of_bits(symbols * width));
  }

  // Whether all was taken, up to the padding to a unit.
  bool is_at_end() const { return units_of_bytes(taken_) * frame::kUnitBytes == bytes_; }

 private:
  const uint8_t* payload_;
  uint32_t bytes_;
  uint32_t taken_ = 0;
};

// Zeroes the padding between the end of a payload's streams and its last unit; returns its units.
inline uint32_t finish_payload(uint8_t* payload, uint8_t* end) {
  const auto bytes = static_cast<uint32_t>(end - payload);
  const uint32_t units = units_of_bytes(bytes);
  memset(end, 0, units * frame::kUnitBytes - bytes);
  return units;
}

}  // namespace memswap::cpu::scalar
