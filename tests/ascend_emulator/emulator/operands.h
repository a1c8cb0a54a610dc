// Operands of a vector instruction: lanes, strides, and the rules that hold for all of them.
#pragma once

#include <algorithm>

#include "tensors.h"

namespace ascend_emulator {

// A parameter of a narrow integer type. The device truncates what does not fit; here it is an
// error.
template <class Narrow>
class Limited {
 public:
  template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
  Limited(Integer value) : value_(static_cast<Narrow>(value)) {  // NOLINT: stands in for an integer
    if (static_cast<int64_t>(value) != static_cast<int64_t>(value_)) {
      violate("repeat", "argument", "found ", static_cast<int64_t>(value), ", expected at most ",
              uint64_t{std::numeric_limits<Narrow>::max()});
    }
  }
  operator Narrow() const { return value_; }  // NOLINT

 private:
  Narrow value_;
};

struct Strides {
  uint32_t block = 1;   // between the 8 blocks of a repeat, in blocks of 32 bytes
  uint32_t repeat = 8;  // between repeats, in blocks
};

// Which lanes of which repeats an instruction works on.
struct Lanes {
  uint32_t per_repeat;
  uint32_t repeats;
  bool counted;  // the first `count` lanes, contiguous; else `mask` in every repeat
  uint32_t count;
  uint64_t mask[2];

  // Whether `lanes` lanes (at most 32) from `lane` on, a multiple of that, are all active.
  bool all_active(uint32_t repeat, uint32_t lane, uint32_t lanes) const {
    const uint64_t some = (uint64_t{1} << lanes) - 1;
    return counted ? repeat * per_repeat + lane + lanes <= count
                   : (mask[lane / 64] >> lane % 64 & some) == some;
  }
  bool active(uint32_t repeat, uint32_t lane) const {
    return counted ? repeat * per_repeat + lane < count : (mask[lane / 64] >> lane % 64 & 1) != 0;
  }
  bool empty() const {
    return repeats == 0 || (counted ? count == 0 : mask[0] == 0 && mask[1] == 0);
  }
};

// The form with a count sets the mask itself and leaves a full one.
template <class T>
Lanes lanes_of_count(const std::string& call, int64_t count) {
  if (count < 0) {
    violate("mask", call, "count ", count, ", expected at least 0");
  }
  Core& here = core();
  here.mask[0] = here.mask[1] = ~uint64_t{0};
  here.mask_spoiled_by = nullptr;
  const uint32_t lanes = kRepeatBytes / sizeof(T);
  return {lanes,
          static_cast<uint32_t>((count + lanes - 1) / lanes),
          true,
          static_cast<uint32_t>(count),
          {0, 0}};
}

template <class T, bool kSetMask>
Lanes lanes_of_bits(const std::string& call, uint64_t low, uint64_t high, uint8_t repeats) {
  constexpr uint32_t lanes = kRepeatBytes / sizeof(T);
  Core& here = core();
  if (kSetMask) {
    if (lanes <= 64 && (high != 0 || (lanes < 64 && low >> (lanes % 64) != 0))) {
      violate("mask", call, "bits beyond lane ", lanes, " of ", type_name<T>());
    }
    here.mask[0] = low;
    here.mask[1] = high;
    here.mask_spoiled_by = nullptr;
  } else if (here.mask_spoiled_by != nullptr) {
    violate("mask", call, "isSetMask=false after ", here.mask_spoiled_by,
            ", which leaves the mask undefined; expected SetVectorMask or ResetMask first");
  }
  Lanes result{lanes, repeats, false, 0, {here.mask[0], here.mask[1]}};
  if (lanes <= 64) {
    result.mask[0] &= lanes == 64 ? ~uint64_t{0} : (uint64_t{1} << lanes % 64) - 1;
    result.mask[1] = 0;
  }
  return result;
}

template <class T, bool kSetMask>
Lanes lanes_of_mask(const std::string& call, uint64_t mask, uint8_t repeats) {
  constexpr uint32_t lanes = kRepeatBytes / sizeof(T);
  if (kSetMask && mask > lanes) {
    violate("mask", call, "found ", mask, " lanes, expected at most ", lanes, " of ",
            type_name<T>());
  }
  const auto bits = [](uint64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
  return lanes_of_bits<T, kSetMask>(call, bits(mask), mask > 64 ? bits(mask - 64) : 0, repeats);
}

struct Operand {
  const char* role;
  bool write;
  uint32_t element_bytes;
  Strides strides;
  uint64_t begin = 0;
  Footprint footprint{};
  std::vector<uint32_t> repeat_starts{};  // index of each repeat's first touch

  uint64_t address(uint32_t repeat, uint32_t lane) const {
    const uint32_t per_block = kBlockBytes / element_bytes;
    return begin +
           (uint64_t{repeat} * strides.repeat + uint64_t{lane / per_block} * strides.block) *
               kBlockBytes +
           lane % per_block * element_bytes;
  }
};

inline void need_alignment(const std::string& call, const char* role, uint64_t address) {
  if (address % kBlockBytes != 0) {
    violate("alignment", call, role, " at UB address ", address, ", expected a multiple of ",
            kBlockBytes);
  }
}

// The operand's bytes, inside its tensor and aligned.
template <class T>
Operand operand(const std::string& call, const char* role, bool write,
                const AscendC::LocalTensor<T>& tensor, const Lanes& lanes, Strides strides = {}) {
  Operand result{role, write, sizeof(T), strides};
  result.begin = tensor.use(call, 0, 0);
  need_alignment(call, role, result.begin);
  if (write && strides.block == 0) {
    violate("stride", call, role, " has a block stride of 0, expected at least 1");
  }
  constexpr uint32_t per_block = kBlockBytes / sizeof(T);
  uint64_t end = result.begin;
  result.footprint.touches.reserve(uint64_t{lanes.repeats} * lanes.per_repeat / per_block);
  for (uint32_t repeat = 0; repeat < lanes.repeats; ++repeat) {
    result.repeat_starts.push_back(static_cast<uint32_t>(result.footprint.touches.size()));
    for (uint32_t lane = 0; lane < lanes.per_repeat; lane += per_block) {
      if (lanes.all_active(repeat, lane, per_block)) {
        const uint64_t address = result.address(repeat, lane);
        end = std::max(end, address + kBlockBytes);
        result.footprint.touches.push_back({address / kBlockBytes, ~0u});
        continue;
      }
      uint32_t bytes = 0;
      for (uint32_t i = 0; i < per_block; ++i) {
        if (lanes.active(repeat, lane + i)) {
          bytes |= ((1u << sizeof(T)) - 1) << i * sizeof(T);
          end = std::max(end, result.address(repeat, lane + i) + sizeof(T));
        }
      }
      if (bytes != 0) {
        result.footprint.touches.push_back({result.address(repeat, lane) / kBlockBytes, bytes});
      }
    }
  }
  result.repeat_starts.push_back(static_cast<uint32_t>(result.footprint.touches.size()));
  tensor.use(call, 0, end - result.begin);
  return result;
}

// In one repeat, destination and source are the same or disjoint; and no repeat reads what an
// earlier one wrote, but for accumulation (destination = source with a repeat stride of 0).
inline void need_no_overlap(const std::string& call, const Operand& to, const Operand& from,
                            bool may_accumulate) {
  const uint32_t repeats = static_cast<uint32_t>(to.repeat_starts.size()) - 1;
  const bool same = to.begin == from.begin && to.element_bytes == from.element_bytes &&
                    to.strides.block == from.strides.block;
  if (same && (to.strides.repeat == from.strides.repeat || repeats == 1) &&
      (to.strides.repeat >= 8 * to.strides.block || repeats == 1 ||
       (may_accumulate && to.strides.repeat == 0))) {
    return;
  }
  // Per block: the last repeat that reads it, from 1, and which bytes are ever read.
  static thread_local std::vector<uint32_t> last_reader(kUnifiedBytes / kBlockBytes);
  static thread_local std::vector<uint32_t> read_bytes(kUnifiedBytes / kBlockBytes);
  for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
    for (uint32_t i = from.repeat_starts[repeat]; i < from.repeat_starts[repeat + 1]; ++i) {
      last_reader[from.footprint.touches[i].block] = repeat + 1;
      read_bytes[from.footprint.touches[i].block] |= from.footprint.touches[i].bytes;
    }
  }
  uint32_t clash = 0;
  uint64_t where = 0;
  for (uint32_t repeat = 0; repeat < repeats && clash == 0; ++repeat) {
    for (uint32_t i = to.repeat_starts[repeat]; i < to.repeat_starts[repeat + 1]; ++i) {
      const Touch& touch = to.footprint.touches[i];
      const uint32_t reader = last_reader[touch.block];
      if (reader > repeat + 1 ||
          (reader == repeat + 1 && !same && (read_bytes[touch.block] & touch.bytes) != 0)) {
        clash = repeat + 1;
        where = touch.block * kBlockBytes;
        break;
      }
    }
  }
  for (const Touch& touch : from.footprint.touches) {
    last_reader[touch.block] = 0;
    read_bytes[touch.block] = 0;
  }
  if (clash != 0) {
    violate("overlap", call, to.role, " of repeat ", clash - 1, " overwrites ", from.role,
            " of this or a later repeat at UB address ", where,
            ", expected the same operand or a disjoint one");
  }
}

// For instructions without the exception of equal operands.
inline void need_disjoint(const std::string& call, const char* what, uint64_t begin, uint64_t end,
                          uint64_t other_begin, uint64_t other_end) {
  if (begin < other_end && other_begin < end) {
    violate("overlap", call, what, " overlap: UB bytes ", begin, " to ", end, " and ", other_begin,
            " to ", other_end);
  }
}

// A contiguous operand of an instruction that takes a count.
template <class T>
Access contiguous(const std::string& call, const char* role, bool write,
                  const AscendC::LocalTensor<T>& tensor, uint64_t elements) {
  const uint64_t begin = tensor.use(call, 0, elements * sizeof(T));
  need_alignment(call, role, begin);
  return access_range(Space::kUnified, write, begin, begin + elements * sizeof(T));
}

template <class T>
T* ub_pointer(const AscendC::LocalTensor<T>& tensor) {
  return reinterpret_cast<T*>(core().ub(tensor.GetPhyAddr()));
}

}  // namespace ascend_emulator
