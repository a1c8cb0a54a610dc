// Reductions over the lanes of each repeat.
#pragma once

#include "elementwise.h"

namespace AscendC {
enum class ReduceOrder : uint8_t {
  ORDER_VALUE_INDEX,
  ORDER_INDEX_VALUE,
  ORDER_ONLY_VALUE,
  ORDER_ONLY_INDEX
};
}

namespace ascend_emulator {

// dst[repeat x stride] = the lanes of the repeat, combined; `fold` takes (values, lanes).
template <class T, class Fold>
void whole_reduce(const std::string& call, const AscendC::LocalTensor<T>& dst,
                  const AscendC::LocalTensor<T>& src, const Lanes& lanes, int32_t dst_stride,
                  Strides strides, Fold fold) {
  if (lanes.empty()) {
    return;
  }
  const Operand from = operand(call, "src", false, src, lanes, strides);
  const uint64_t begin = dst.use(call, 0, 0);
  need_alignment(call, "dst", begin);
  if (dst_stride < 1) {
    violate("stride", call, "dst has a repeat stride of ", dst_stride, ", expected at least 1");
  }
  Access writes{Space::kUnified, true, {}};
  for (uint32_t repeat = 0; repeat < lanes.repeats; ++repeat) {
    const uint64_t offset = uint64_t{repeat} * static_cast<uint32_t>(dst_stride) * sizeof(T);
    dst.use(call, offset, sizeof(T));
    writes.footprint.add_range(begin + offset, begin + offset + sizeof(T));
  }
  for (const Touch& written : writes.footprint.touches) {
    for (const Touch& read : from.footprint.touches) {
      if (written.block == read.block && (written.bytes & read.bytes) != 0) {
        violate("overlap", call, "dst and src overlap at UB address ", read.block * kBlockBytes);
      }
    }
  }
  Core& here = core();
  const uint32_t stride = static_cast<uint32_t>(dst_stride);
  here.issue(PIPE_V, call, {{Space::kUnified, false, from.footprint}, writes}, [=, &here] {
    for (uint32_t repeat = 0; repeat < lanes.repeats; ++repeat) {
      std::vector<T> values;
      for (uint32_t lane = 0; lane < lanes.per_repeat; ++lane) {
        if (lanes.active(repeat, lane)) {
          values.push_back(*reinterpret_cast<const T*>(here.ub(from.address(repeat, lane))));
        }
      }
      const T result = fold(values);
      std::memcpy(here.ub(begin + uint64_t{repeat} * stride * sizeof(T)), &result, sizeof(T));
    }
  });
}

template <class T>
T tree_sum(std::vector<T> values) {
  // Pairs of neighbours, as the device adds them: every partial sum rounds in T.
  while (values.size() > 1) {
    std::vector<T> sums;
    for (size_t i = 0; i < values.size(); i += 2) {
      sums.push_back(i + 1 < values.size() ? OpAdd{}(values[i], values[i + 1]) : values[i]);
    }
    values = std::move(sums);
  }
  return values[0];
}

inline void need_only_value(const std::string& call, AscendC::ReduceOrder order) {
  if (order != AscendC::ReduceOrder::ORDER_ONLY_VALUE) {
    violate("reduce", call, "order ", static_cast<int>(order),
            ", expected ORDER_ONLY_VALUE: the emulator has no other");
  }
}

// One of the lanes' values, picked by `Op`: a maximum or a minimum.
template <class Op, class T, bool isSetMask>
void whole_reduce_to_one(const char* name, const AscendC::LocalTensor<T>& dst,
                         const AscendC::LocalTensor<T>& src, int32_t mask, Limited<uint8_t> repeats,
                         int32_t dst_stride, Strides strides, AscendC::ReduceOrder order) {
  const std::string call = call_name<T>(name);
  need_only_value(call, order);
  whole_reduce(call, dst, src, masked_lanes<T, isSetMask>(call, mask, repeats), dst_stride, strides,
               [](const std::vector<T>& values) {
                 T best = values[0];
                 for (const T value : values) best = Op{}(best, value);
                 return best;
               });
}

}  // namespace ascend_emulator

namespace AscendC {

template <class T, bool isSetMask = true>
void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                    const ascend_emulator::Limited<uint8_t> repeats, const int32_t dst_stride,
                    const int32_t src_block, const int32_t src_repeat,
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
  static_assert(table::floating<T>, "rule types: WholeReduceMax takes half or float");
  ascend_emulator::whole_reduce_to_one<ascend_emulator::OpMax, T, isSetMask>(
      "WholeReduceMax", dst, src, mask, repeats, dst_stride,
      {static_cast<uint32_t>(src_block), static_cast<uint32_t>(src_repeat)}, order);
}

template <class T, bool isSetMask = true>
void WholeReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                    const ascend_emulator::Limited<uint8_t> repeats, const int32_t dst_stride,
                    const int32_t src_block, const int32_t src_repeat,
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX) {
  static_assert(table::floating<T>, "rule types: WholeReduceMin takes half or float");
  ascend_emulator::whole_reduce_to_one<ascend_emulator::OpMin, T, isSetMask>(
      "WholeReduceMin", dst, src, mask, repeats, dst_stride,
      {static_cast<uint32_t>(src_block), static_cast<uint32_t>(src_repeat)}, order);
}

template <class T, bool isSetMask = true>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                    const ascend_emulator::Limited<uint8_t> repeats, const int32_t dst_stride,
                    const int32_t src_block, const int32_t src_repeat) {
  static_assert(table::floating<T>, "rule types: WholeReduceSum takes half or float");
  const std::string call = ascend_emulator::call_name<T>("WholeReduceSum");
  ascend_emulator::whole_reduce(
      call, dst, src, ascend_emulator::masked_lanes<T, isSetMask>(call, mask, repeats), dst_stride,
      {static_cast<uint32_t>(src_block), static_cast<uint32_t>(src_repeat)},
      [](const std::vector<T>& values) { return ascend_emulator::tree_sum(values); });
}

}  // namespace AscendC
