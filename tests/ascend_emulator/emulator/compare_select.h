// Comparison to bitmaps, and selection by them. Bit i of a bitmap stands for lane i.
#pragma once

#include "operands.h"
#include "type_table.h"

namespace AscendC {
enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
}  // namespace AscendC

namespace ascend_emulator {

template <class T>
bool compare_lane(T a, T b, AscendC::CMPMODE mode) {
  using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, float>;
  const Wide x = static_cast<Wide>(a);
  const Wide y = static_cast<Wide>(b);
  switch (mode) {
    case AscendC::CMPMODE::LT:
      return x < y;
    case AscendC::CMPMODE::GT:
      return x > y;
    case AscendC::CMPMODE::EQ:
      return x == y;
    case AscendC::CMPMODE::LE:
      return x <= y;
    case AscendC::CMPMODE::GE:
      return x >= y;
    default:
      return x != y;
  }
}

template <class T, class U>
void need_compare(const std::string& call, AscendC::CMPMODE mode, uint32_t count) {
  static_assert(types::compare<T>, "rule types: Compare takes half, float or int32_t");
  static_assert(types::is_one_of<U, uint8_t, int8_t>, "rule types: a bitmap is uint8_t");
  if (std::is_same_v<T, int32_t> && mode != AscendC::CMPMODE::EQ) {
    violate("types", call, "int32_t in mode ", static_cast<int>(mode), ", expected EQ only");
  }
  if (count * sizeof(T) % kRepeatBytes != 0) {
    violate("compare", call, count, " elements are ", count * sizeof(T),
            " bytes, expected a multiple of ", kRepeatBytes);
  }
  core().mask_spoiled_by = "Compare";
}

template <class U, class T, class Value>
void compare(const std::string& call, const AscendC::LocalTensor<U>& dst,
             const AscendC::LocalTensor<T>& src0, std::vector<Access> reads, uint32_t count,
             AscendC::CMPMODE mode, Value second) {
  if (count == 0) {
    return;
  }
  reads.push_back(contiguous(call, "src0", false, src0, count));
  reads.push_back(contiguous(call, "dst", true, dst, count / 8));
  need_disjoint(call, "dst and src0", dst.GetPhyAddr(), dst.GetPhyAddr() + count / 8,
                src0.GetPhyAddr(), src0.GetPhyAddr() + count * sizeof(T));
  uint8_t* to = reinterpret_cast<uint8_t*>(ub_pointer(dst));
  const T* first = ub_pointer(src0);
  core().issue(PIPE_V, call, reads, [=] {
    for (uint32_t i = 0; i < count; i += 8) {
      uint32_t bits = 0;
      for (uint32_t k = 0; k < 8; ++k) {
        bits |= static_cast<uint32_t>(compare_lane<T>(first[i + k], second(i + k), mode)) << k;
      }
      to[i / 8] = static_cast<uint8_t>(bits);
    }
  });
}

template <class T, class U, class Value>
void select(const std::string& call, const AscendC::LocalTensor<T>& dst,
            const AscendC::LocalTensor<U>& bitmap, const AscendC::LocalTensor<T>& src0,
            std::vector<Access> accesses, uint32_t count, Value other) {
  static_assert(types::floating<T>, "rule types: Select takes half or float");
  if (count == 0) {
    return;
  }
  core().mask_spoiled_by = "Select";
  const uint64_t bitmap_bytes = (uint64_t{count} + 7) / 8;
  const Access bits =
      contiguous(call, "selMask", false, bitmap, (bitmap_bytes + sizeof(U) - 1) / sizeof(U));
  const Access to = contiguous(call, "dst", true, dst, count);
  need_disjoint(call, "dst and selMask", dst.GetPhyAddr(), dst.GetPhyAddr() + count * sizeof(T),
                bitmap.GetPhyAddr(), bitmap.GetPhyAddr() + bitmap_bytes);
  accesses.push_back(contiguous(call, "src0", false, src0, count));
  if (dst.GetPhyAddr() != src0.GetPhyAddr()) {
    need_disjoint(call, "dst and src0", dst.GetPhyAddr(), dst.GetPhyAddr() + count * sizeof(T),
                  src0.GetPhyAddr(), src0.GetPhyAddr() + count * sizeof(T));
  }
  accesses.push_back(bits);
  accesses.push_back(to);
  const uint8_t* mask = reinterpret_cast<const uint8_t*>(ub_pointer(bitmap));
  T* target = ub_pointer(dst);
  const T* first = ub_pointer(src0);
  core().issue(PIPE_V, call, accesses, [=] {
    for (uint32_t i = 0; i < count; ++i) {
      target[i] = (mask[i / 8] >> i % 8 & 1) != 0 ? first[i] : other(i);
    }
  });
}

}  // namespace ascend_emulator

namespace AscendC {

template <class T, class U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
             CMPMODE mode, uint32_t count) {
  const std::string call = ascend_emulator::call_name<T>("Compare");
  ascend_emulator::need_compare<T, U>(call, mode, count);
  const T* second = ascend_emulator::ub_pointer(src1);
  ascend_emulator::compare(call, dst, src0,
                           {ascend_emulator::contiguous(call, "src1", false, src1, count)}, count,
                           mode, [second](uint32_t i) { return second[i]; });
}

template <class T, class U>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T scalar,
                   CMPMODE mode, uint32_t count) {
  const std::string call = ascend_emulator::call_name<T>("CompareScalar");
  ascend_emulator::need_compare<T, U>(call, mode, count);
  ascend_emulator::compare(call, dst, src0, {}, count, mode, [scalar](uint32_t) { return scalar; });
}

template <class T, class U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE mode, uint32_t count) {
  const std::string call = ascend_emulator::call_name<T>("Select");
  if (mode != SELMODE::VSEL_TENSOR_TENSOR_MODE) {
    ascend_emulator::violate("select", call, "two tensors in mode ", static_cast<int>(mode),
                             ", expected VSEL_TENSOR_TENSOR_MODE");
  }
  const T* second = ascend_emulator::ub_pointer(src1);
  ascend_emulator::select(call, dst, mask, src0,
                          {ascend_emulator::contiguous(call, "src1", false, src1, count)}, count,
                          [second](uint32_t i) { return second[i]; });
}

template <class T, class U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& mask, const LocalTensor<T>& src0,
            T scalar, SELMODE mode, uint32_t count) {
  const std::string call = ascend_emulator::call_name<T>("Select");
  if (mode != SELMODE::VSEL_TENSOR_SCALAR_MODE) {
    ascend_emulator::violate("select", call, "a scalar in mode ", static_cast<int>(mode),
                             ", expected VSEL_TENSOR_SCALAR_MODE");
  }
  ascend_emulator::select(call, dst, mask, src0, {}, count, [scalar](uint32_t) { return scalar; });
}

}  // namespace AscendC
