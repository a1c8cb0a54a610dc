// Vectors of 16-bit lanes and what every kernel does with them. The vector unit has no integers of
// 8 bits and no bit operations on 32: everything is done in lanes of 16 bits, whose type is a view.
#pragma once

#include "kernel_operator.h"
#include "memswap/frame.h"

namespace memswap::ascend {

using namespace AscendC;  // NOLINT: kernel code reads like the API's documentation

using Lanes = LocalTensor<int16_t>;
using Bytes = LocalTensor<uint8_t>;

constexpr uint32_t kRepeatLanes = 128;  // of 16 bits in one repeat of 256 bytes
constexpr uint64_t kAllLanes = 128;
constexpr uint32_t kBlockLanes = frame::kBlockElements;
constexpr uint32_t kBlockRepeats = kBlockLanes / kRepeatLanes;
constexpr uint32_t kUnifiedBlockBytes = 32;  // strides count these

// Stride, in blocks of 32 bytes, between vectors that are `lanes` 16-bit lanes apart.
__aicore__ inline uint8_t stride_of(uint32_t lanes) {
  return static_cast<uint8_t>(lanes * 2 / kUnifiedBlockBytes);
}

__aicore__ inline LocalTensor<uint16_t> as_bits(const Lanes& lanes) {
  return lanes.ReinterpretCast<uint16_t>();
}
__aicore__ inline LocalTensor<half> as_half(const Lanes& lanes) {
  return lanes.ReinterpretCast<half>();
}

// Of constants; <algorithm> is not for device code.
template <class First>
__aicore__ constexpr First max_of(First first) {
  return first;
}
template <class First, class... Rest>
__aicore__ constexpr First max_of(First first, Rest... rest) {
  const First other = max_of(static_cast<First>(rest)...);
  return first > other ? first : other;
}

__aicore__ constexpr uint32_t round_up(uint32_t value, uint32_t to) {
  return (value + to - 1) / to * to;
}

// What a buffer takes of UB. Every class that has buffers adds them up (kUnifiedBytes), so that the
// compiler refuses a kernel that does not fit.
__aicore__ constexpr uint32_t unified(uint32_t bytes) {
  return round_up(bytes, kUnifiedBlockBytes);
}
// 192 KiB without the system's 256 bytes, and the 8 KiB that Select and Compare may take.
constexpr uint32_t kUsableUnifiedBytes = 192 * 1024 - 256 - 8 * 1024;

// What follows on the vector pipe sees what came before.
__aicore__ inline void barrier() { PipeBarrier<PIPE_V>(); }

// What the second pipe does from here on sees what the first one has done.
template <HardEvent kEvent>
__aicore__ inline void hand_over(TPipe* pipe) {
  const TEventID id = pipe->FetchEventID(kEvent);
  SetFlag<kEvent>(id);
  WaitFlag<kEvent>(id);
}

// dst = src & constant, where `constant` fills one repeat.
__aicore__ inline void and_all(const Lanes& dst, const Lanes& src, const Lanes& constant,
                               uint32_t lanes) {
  And(as_bits(dst), as_bits(src), as_bits(constant), kAllLanes,
      static_cast<uint8_t>(lanes / kRepeatLanes), BinaryRepeatParams(1, 1, 1, 8, 8, 0));
}

// Constants for and_all: 1, 3, 7, 15, 31 and 255.
class Masks {
  static constexpr uint32_t kMasks = 6;

 public:
  static constexpr uint32_t kUnifiedBytes = unified(kMasks * kRepeatLanes * 2);

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(buffer_, kMasks * kRepeatLanes * 2);
    const uint32_t bits[kMasks] = {1, 3, 7, 15, 31, 255};
    for (uint32_t i = 0; i < kMasks; ++i) {
      Duplicate(buffer_.Get<int16_t>()[i * kRepeatLanes], static_cast<int16_t>(bits[i]),
                static_cast<int32_t>(kRepeatLanes));
    }
    barrier();
  }
  // The lowest `width` bits; 1, 2, 3, 4, 5 or 8.
  __aicore__ inline Lanes low_bits(uint32_t width) {
    const uint32_t index = width == 8 ? 5 : width - 1;
    return buffer_.Get<int16_t>()[index * kRepeatLanes];
  }

 private:
  TBuf<TPosition::VECCALC> buffer_;
};

// A block's lanes of 1.0: what Select puts where a bitmap's bits are set, beside 0.0.
class Ones {
 public:
  static constexpr uint32_t kUnifiedBytes = unified(kBlockLanes * 2);

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(buffer_, kBlockLanes * 2);
    Duplicate(buffer_.Get<half>(), static_cast<half>(1.0f), static_cast<int32_t>(kBlockLanes));
    barrier();
  }
  // At most a block's bits.
  __aicore__ inline void expand(const LocalTensor<half>& to, const Bytes& bitmap, uint32_t bits) {
    Select(to, bitmap, buffer_.Get<half>(), static_cast<half>(0.0f),
           SELMODE::VSEL_TENSOR_SCALAR_MODE, bits);
  }

 private:
  TBuf<TPosition::VECCALC> buffer_;
};

// 1 - x; where lanes are 0 or 1, the others.
__aicore__ inline void one_minus(const Lanes& to, const Lanes& x, int32_t n) {
  Muls(to, x, (int16_t)-1, n);
  barrier();
  Adds(to, to, (int16_t)1, n);
  barrier();
}

// Exponents become distances below their block's centre, (c - E) mod 256, or distances exponents:
// the difference is the same. `lanes`: of a block; `mask`: the bits that are kept of the result.
__aicore__ inline void subtract_from_centers(const Lanes& to, const Lanes& x,
                                             const uint32_t* centers, uint32_t blocks,
                                             uint32_t lanes, const Lanes& mask) {
  // c - x = ~x + 1 + c.
  Not(as_bits(to), as_bits(x), static_cast<int32_t>(blocks * lanes));
  barrier();
  for (uint32_t b = 0; b < blocks; ++b) {
    Adds(to[b * lanes], to[b * lanes], static_cast<int16_t>(centers[b] + 1),
         static_cast<int32_t>(lanes));
  }
  barrier();
  and_all(to, to, mask, blocks * lanes);
  barrier();
}

// Elements from..to-1 become `value`; `to` is a multiple of what a repeat holds, 128 or 64.
template <class T>
__aicore__ inline void fill(const LocalTensor<T>& tensor, uint32_t from, uint32_t to, T value) {
  constexpr uint32_t in_repeat = 256 / sizeof(T);
  uint32_t next = from / in_repeat * in_repeat;
  const uint32_t kept = from - next;
  if (kept != 0) {
    uint64_t mask[2] = {kept < 64 ? ~uint64_t{0} << kept : 0, 0};
    if constexpr (in_repeat == 128) {
      mask[1] = kept < 64 ? ~uint64_t{0} : ~uint64_t{0} << (kept - 64);
    }
    Duplicate(tensor[next], value, mask, 1, 1, 8);
    next += in_repeat;
  }
  if (next < to) {
    Duplicate(tensor[next], value, static_cast<int32_t>(to - next));
  }
}

// The lanes of a block whose bits are set, in their order; the others become 0 behind them, since
// what follows works on all lanes. Returns how many there are.
__aicore__ inline uint32_t compact(const Lanes& to, const Lanes& from,
                                   const LocalTensor<uint16_t>& where) {
  uint64_t kept = 0;
  GatherMask(as_bits(to), as_bits(from), where, true, kBlockLanes, GatherMaskParams(1, 1, 0, 0),
             kept);
  barrier();
  fill(to, static_cast<uint32_t>(kept), kBlockLanes, (int16_t)0);
  barrier();
  return static_cast<uint32_t>(kept);
}

// Bytes from..to-1 become 0. What is behind the last byte of a padded copy is undefined, and an odd
// byte is within a lane: it is the scalar unit's.
__aicore__ inline void clear_bytes(TPipe* pipe, const Lanes& lanes, uint32_t from, uint32_t to) {
  if (from >= to) {
    return;
  }
  if (from % 2 != 0) {
    hand_over<HardEvent::V_S>(pipe);
    lanes.ReinterpretCast<uint8_t>().SetValue(from, uint8_t{0});
    hand_over<HardEvent::S_V>(pipe);
  }
  fill(lanes, (from + 1) / 2, to / 2, (int16_t)0);
  barrier();
}

// Numbers of 16-bit lanes as Gather's offsets, which are bytes. There is no conversion from 16 to
// 32 bits but through float, which holds 16 bits exactly.
__aicore__ inline void lane_offsets(const LocalTensor<uint32_t>& offsets, const Lanes& numbers,
                                    uint32_t count) {
  const LocalTensor<float> floats = offsets.ReinterpretCast<float>();
  Cast(floats, numbers, RoundMode::CAST_NONE, count);
  barrier();
  Cast(offsets.ReinterpretCast<int32_t>(), floats, RoundMode::CAST_RINT, count);
  barrier();
  ShiftLeft(offsets, offsets, uint32_t{1}, static_cast<int32_t>(count));
  barrier();
}

// A copy within UB; whole blocks of 32 bytes.
__aicore__ inline void copy_bytes(const Bytes& to, const Bytes& from, uint32_t bytes) {
  DataCopy(to.ReinterpretCast<int16_t>(), from.ReinterpretCast<int16_t>(), bytes / 2);
}

// Bytes <-> lanes of 0..255, through half, which holds them exactly. The source lanes are lost.
__aicore__ inline void lanes_to_half(const Lanes& lanes, uint32_t count) {
  Cast(as_half(lanes), lanes, RoundMode::CAST_RINT, count);
}
__aicore__ inline void half_to_bytes(const Bytes& dst, const Lanes& lanes, uint32_t count) {
  Cast(dst, as_half(lanes), RoundMode::CAST_RINT, count);
}
__aicore__ inline void bytes_to_half(const Lanes& lanes, const Bytes& src, uint32_t count) {
  Cast(as_half(lanes), src, RoundMode::CAST_NONE, count);
}
__aicore__ inline void half_to_lanes(const Lanes& lanes, uint32_t count) {
  Cast(lanes, as_half(lanes), RoundMode::CAST_RINT, count);
}

}  // namespace memswap::ascend
