// Vector instructions that work lane by lane on operands of one type.
#pragma once

#include "operands.h"
#include "type_table.h"

namespace AscendC {

struct BinaryRepeatParams {
  using Byte = ascend_emulator::Limited<uint8_t>;
  BinaryRepeatParams() = default;
  BinaryRepeatParams(Byte dst_block, Byte src0_block, Byte src1_block, Byte dst_repeat,
                     Byte src0_repeat, Byte src1_repeat)
      : dst{dst_block, dst_repeat}, src0{src0_block, src0_repeat}, src1{src1_block, src1_repeat} {}
  ascend_emulator::Strides dst, src0, src1;
};

struct UnaryRepeatParams {
  UnaryRepeatParams() = default;
  UnaryRepeatParams(ascend_emulator::Limited<uint16_t> dst_block,
                    ascend_emulator::Limited<uint16_t> src_block,
                    ascend_emulator::Limited<uint8_t> dst_repeat,
                    ascend_emulator::Limited<uint8_t> src_repeat)
      : dst{dst_block, dst_repeat}, src{src_block, src_repeat} {}
  ascend_emulator::Strides dst, src;
};

struct CopyRepeatParams {
  CopyRepeatParams(ascend_emulator::Limited<uint16_t> dst_block,
                   ascend_emulator::Limited<uint16_t> src_block,
                   ascend_emulator::Limited<uint16_t> dst_repeat,
                   ascend_emulator::Limited<uint16_t> src_repeat)
      : dst{dst_block, dst_repeat}, src{src_block, src_repeat} {}
  ascend_emulator::Strides dst, src;
};

}  // namespace AscendC

namespace ascend_emulator {

// dst[lane] = compute(src[lane]...), for 0 to 2 sources.
template <class T, class Compute, class... Sources>
void elementwise(const std::string& call, const Lanes& lanes, bool may_accumulate,
                 const std::pair<AscendC::LocalTensor<T>, Strides>& dst, Compute compute,
                 const Sources&... sources) {
  if (lanes.empty()) {
    return;
  }
  [[maybe_unused]] static constexpr const char* kRoles[] = {"src0", "src1"};
  const Operand to = operand(call, "dst", true, dst.first, lanes, dst.second);
  [[maybe_unused]] int position = 0;
  const std::array<Operand, sizeof...(Sources)> from{
      operand(call, kRoles[position++], false, sources.first, lanes, sources.second)...};
  std::vector<Access> accesses;
  for (const Operand& source : from) {
    need_no_overlap(call, to, source, may_accumulate);
    accesses.push_back({Space::kUnified, false, source.footprint});
  }
  accesses.push_back({Space::kUnified, true, to.footprint});

  bool dense = lanes.counted && to.strides.block == 1 && to.strides.repeat == 8;
  for (const Operand& source : from) {
    dense = dense && source.strides.block == 1 && source.strides.repeat == 8;
  }
  uint8_t* ub = core().ub(0);
  core().issue(PIPE_V, call, accesses, [=] {
    const auto at = [&](const Operand& operand, uint32_t repeat, uint32_t lane) {
      return *reinterpret_cast<const T*>(ub + operand.address(repeat, lane));
    };
    if (dense) {
      T* target = reinterpret_cast<T*>(ub + to.begin);
      if constexpr (sizeof...(Sources) == 0) {
        for (uint32_t i = 0; i < lanes.count; ++i) target[i] = compute();
      } else if constexpr (sizeof...(Sources) == 1) {
        const T* first = reinterpret_cast<const T*>(ub + from[0].begin);
        for (uint32_t i = 0; i < lanes.count; ++i) target[i] = compute(first[i]);
      } else {
        const T* first = reinterpret_cast<const T*>(ub + from[0].begin);
        const T* second = reinterpret_cast<const T*>(ub + from[1].begin);
        for (uint32_t i = 0; i < lanes.count; ++i) target[i] = compute(first[i], second[i]);
      }
      return;
    }
    for (uint32_t repeat = 0; repeat < lanes.repeats; ++repeat) {
      for (uint32_t lane = 0; lane < lanes.per_repeat; ++lane) {
        if (!lanes.active(repeat, lane)) {
          continue;
        }
        T result;
        if constexpr (sizeof...(Sources) == 0) {
          result = compute();
        } else if constexpr (sizeof...(Sources) == 1) {
          result = compute(at(from[0], repeat, lane));
        } else {
          result = compute(at(from[0], repeat, lane), at(from[1], repeat, lane));
        }
        std::memcpy(ub + to.address(repeat, lane), &result, sizeof(T));
      }
    }
  });
}

// Integers wrap; half and float round once.
template <class T, class Operation>
T wrapped(T a, T b, Operation operation) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(operation(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  } else {
    return static_cast<T>(operation(static_cast<float>(a), static_cast<float>(b)));
  }
}
template <class T>
bool less(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a < b;
  } else {
    return static_cast<float>(a) < static_cast<float>(b);
  }
}

struct OpAdd {
  template <class T>
  T operator()(T a, T b) const {
    return wrapped(a, b, [](auto x, auto y) { return x + y; });
  }
};
struct OpSub {
  template <class T>
  T operator()(T a, T b) const {
    return wrapped(a, b, [](auto x, auto y) { return x - y; });
  }
};
struct OpMul {
  template <class T>
  T operator()(T a, T b) const {
    return wrapped(a, b, [](auto x, auto y) { return x * y; });
  }
};
struct OpDiv {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<float>(a) / static_cast<float>(b));
  }
};
struct OpMax {
  template <class T>
  T operator()(T a, T b) const {
    return less(a, b) ? b : a;
  }
};
struct OpMin {
  template <class T>
  T operator()(T a, T b) const {
    return less(b, a) ? b : a;
  }
};
struct OpAnd {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct OpOr {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct OpShiftLeft {
  template <class T>
  T operator()(T a, T bits) const {
    const uint64_t shifted = static_cast<uint64_t>(a) << static_cast<unsigned>(bits);
    return static_cast<T>(shifted);
  }
};
struct OpShiftRight {
  template <class T>
  T operator()(T a, T bits) const {
    return static_cast<T>(static_cast<int64_t>(a) >> static_cast<unsigned>(bits));
  }
};

template <class T>
void need_shift(const std::string& call, T bits, bool left) {
  if (static_cast<int64_t>(bits) < 0 || static_cast<uint64_t>(bits) > sizeof(T) * 8) {
    violate("shift", call, "by ", static_cast<int64_t>(bits), " bits, expected 0 to ",
            sizeof(T) * 8);
  }
  if (left && std::is_signed_v<T>) {
    violate("shift", call,
            "of a signed type, whose sign bit the device keeps; expected an "
            "unsigned view");
  }
}

}  // namespace ascend_emulator

namespace AscendC {

#define ASCEND_EMULATOR_BINARY(NAME, ALLOWED, LIST)                                            \
  template <class T>                                                                           \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, \
            const int32_t& count) {                                                            \
    static_assert(ALLOWED<T>, "rule types: " #NAME " takes " LIST " on Atlas A2");             \
    const std::string call = ascend_emulator::call_name<T>(#NAME);                             \
    const ascend_emulator::Lanes lanes = ascend_emulator::lanes_of_count<T>(call, count);      \
    const ascend_emulator::Strides plain;                                                      \
    ascend_emulator::elementwise<T>(call, lanes, false, std::pair(dst, plain),                 \
                                    ascend_emulator::Op##NAME{}, std::pair(src0, plain),       \
                                    std::pair(src1, plain));                                   \
  }                                                                                            \
  template <class T, bool isSetMask = true, class Mask>                                        \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, \
            Mask mask, const ascend_emulator::Limited<uint8_t> repeats,                        \
            const BinaryRepeatParams& params) {                                                \
    static_assert(ALLOWED<T>, "rule types: " #NAME " takes " LIST " on Atlas A2");             \
    const std::string call = ascend_emulator::call_name<T>(#NAME);                             \
    const ascend_emulator::Lanes lanes =                                                       \
        ascend_emulator::masked_lanes<T, isSetMask>(call, mask, repeats);                      \
    ascend_emulator::elementwise<T>(                                                           \
        call, lanes, !ascend_emulator::types::bitwise<T> || std::is_same_v<T, int16_t>,        \
        std::pair(dst, params.dst), ascend_emulator::Op##NAME{}, std::pair(src0, params.src0), \
        std::pair(src1, params.src1));                                                         \
  }

#define ASCEND_EMULATOR_SCALAR(NAME, OPERATION, ALLOWED, LIST, CHECK)                              \
  template <class T, bool isSetMask = true>                                                        \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar,                 \
            const int32_t& count) {                                                                \
    static_assert(ALLOWED<T>, "rule types: " #NAME " takes " LIST " on Atlas A2");                 \
    const std::string call = ascend_emulator::call_name<T>(#NAME);                                 \
    CHECK;                                                                                         \
    const ascend_emulator::Lanes lanes = ascend_emulator::lanes_of_count<T>(call, count);          \
    const ascend_emulator::Strides plain;                                                          \
    ascend_emulator::elementwise<T>(                                                               \
        call, lanes, false, std::pair(dst, plain),                                                 \
        [scalar](T a) { return ascend_emulator::OPERATION{}(a, scalar); }, std::pair(src, plain)); \
  }                                                                                                \
  template <class T, bool isSetMask = true, class Mask>                                            \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, Mask mask,      \
            const ascend_emulator::Limited<uint8_t> repeats, const UnaryRepeatParams& params) {    \
    static_assert(ALLOWED<T>, "rule types: " #NAME " takes " LIST " on Atlas A2");                 \
    const std::string call = ascend_emulator::call_name<T>(#NAME);                                 \
    CHECK;                                                                                         \
    const ascend_emulator::Lanes lanes =                                                           \
        ascend_emulator::masked_lanes<T, isSetMask>(call, mask, repeats);                          \
    ascend_emulator::elementwise<T>(                                                               \
        call, lanes, false, std::pair(dst, params.dst),                                            \
        [scalar](T a) { return ascend_emulator::OPERATION{}(a, scalar); },                         \
        std::pair(src, params.src));                                                               \
  }

}  // namespace AscendC

namespace ascend_emulator {
// The two forms of a mask: a number of lanes, or a pointer to two words of bits.
template <class T, bool kSetMask, class Mask>
Lanes masked_lanes(const std::string& call, Mask mask, uint8_t repeats) {
  if constexpr (std::is_pointer_v<Mask>) {
    return lanes_of_bits<T, kSetMask>(call, mask[0], sizeof(T) == 2 ? mask[1] : 0, repeats);
  } else {
    static_assert(std::is_integral_v<Mask>, "rule mask: a number of lanes or uint64_t[2]");
    return lanes_of_mask<T, kSetMask>(call, static_cast<uint64_t>(mask), repeats);
  }
}
}  // namespace ascend_emulator

namespace AscendC {

namespace table = ascend_emulator::types;

ASCEND_EMULATOR_BINARY(Add, table::arithmetic, "int16_t, half, int32_t or float")
ASCEND_EMULATOR_BINARY(Sub, table::arithmetic, "int16_t, half, int32_t or float")
ASCEND_EMULATOR_BINARY(Mul, table::arithmetic, "int16_t, half, int32_t or float")
ASCEND_EMULATOR_BINARY(Max, table::arithmetic, "int16_t, half, int32_t or float")
ASCEND_EMULATOR_BINARY(Min, table::arithmetic, "int16_t, half, int32_t or float")
ASCEND_EMULATOR_BINARY(Div, table::floating, "half or float")
ASCEND_EMULATOR_BINARY(And, table::bitwise, "int16_t or uint16_t")
ASCEND_EMULATOR_BINARY(Or, table::bitwise, "int16_t or uint16_t")

ASCEND_EMULATOR_SCALAR(Adds, OpAdd, table::arithmetic, "int16_t, half, int32_t or float", )
ASCEND_EMULATOR_SCALAR(Muls, OpMul, table::arithmetic, "int16_t, half, int32_t or float", )
ASCEND_EMULATOR_SCALAR(Maxs, OpMax, table::arithmetic, "int16_t, half, int32_t or float", )
ASCEND_EMULATOR_SCALAR(Mins, OpMin, table::arithmetic, "int16_t, half, int32_t or float", )
ASCEND_EMULATOR_SCALAR(ShiftLeft, OpShiftLeft, table::shift,
                       "int16_t, uint16_t, int32_t or uint32_t",
                       ascend_emulator::need_shift(call, scalar, true))
ASCEND_EMULATOR_SCALAR(ShiftRight, OpShiftRight, table::shift,
                       "int16_t, uint16_t, int32_t or uint32_t",
                       ascend_emulator::need_shift(call, scalar, false))

#undef ASCEND_EMULATOR_BINARY
#undef ASCEND_EMULATOR_SCALAR

template <class T>
void Not(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) {
  static_assert(table::bitwise<T>, "rule types: Not takes int16_t or uint16_t on Atlas A2");
  const std::string call = ascend_emulator::call_name<T>("Not");
  const ascend_emulator::Strides plain;
  ascend_emulator::elementwise<T>(
      call, ascend_emulator::lanes_of_count<T>(call, count), false, std::pair(dst, plain),
      [](T a) { return static_cast<T>(~a); }, std::pair(src, plain));
}

template <class T>
void Abs(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) {
  static_assert(table::floating<T>, "rule types: Abs takes half or float on Atlas A2");
  const std::string call = ascend_emulator::call_name<T>("Abs");
  const ascend_emulator::Strides plain;
  ascend_emulator::elementwise<T>(
      call, ascend_emulator::lanes_of_count<T>(call, count), false, std::pair(dst, plain),
      [](T a) { return static_cast<T>(std::fabs(static_cast<float>(a))); }, std::pair(src, plain));
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count) {
  static_assert(table::duplicate<T>,
                "rule types: Duplicate takes 16- and 32-bit elements on Atlas A2");
  const std::string call = ascend_emulator::call_name<T>("Duplicate");
  ascend_emulator::elementwise<T>(call, ascend_emulator::lanes_of_count<T>(call, count), false,
                                  std::pair(dst, ascend_emulator::Strides{}),
                                  [value] { return value; });
}

template <class T, bool isSetMask = true, class Mask>
void Duplicate(const LocalTensor<T>& dst, const T& value, Mask mask,
               const ascend_emulator::Limited<uint8_t> repeats,
               const ascend_emulator::Limited<uint16_t> block_stride,
               const ascend_emulator::Limited<uint8_t> repeat_stride) {
  static_assert(table::duplicate<T>,
                "rule types: Duplicate takes 16- and 32-bit elements on Atlas A2");
  const std::string call = ascend_emulator::call_name<T>("Duplicate");
  ascend_emulator::elementwise<T>(
      call, ascend_emulator::masked_lanes<T, isSetMask>(call, mask, repeats), false,
      std::pair(dst, ascend_emulator::Strides{block_stride, repeat_stride}),
      [value] { return value; });
}

template <class T, bool isSetMask = true, class Mask>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask mask,
          const ascend_emulator::Limited<uint8_t> repeats, const CopyRepeatParams& params) {
  static_assert(table::wide_lanes<T>, "rule types: Copy takes 16- and 32-bit elements");
  const std::string call = ascend_emulator::call_name<T>("Copy");
  ascend_emulator::elementwise<T>(
      call, ascend_emulator::masked_lanes<T, isSetMask>(call, mask, repeats), false,
      std::pair(dst, params.dst), [](T a) { return a; }, std::pair(src, params.src));
}

}  // namespace AscendC
