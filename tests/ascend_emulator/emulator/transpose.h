// Transposition of 16 x 16 elements of 16 bits.
#pragma once

#include "elementwise.h"

namespace AscendC {

template <class T>
void Transpose(const LocalTensor<T>& dst, const LocalTensor<T>& src) {
  static_assert(sizeof(T) == 2, "rule types: Transpose takes 16-bit elements");
  const std::string call = ascend_emulator::call_name<T>("Transpose");
  const ascend_emulator::Access from = ascend_emulator::contiguous(call, "src", false, src, 256);
  const ascend_emulator::Access to = ascend_emulator::contiguous(call, "dst", true, dst, 256);
  ascend_emulator::need_disjoint(call, "dst and src", dst.GetPhyAddr(), dst.GetPhyAddr() + 512,
                                 src.GetPhyAddr(), src.GetPhyAddr() + 512);
  T* target = ascend_emulator::ub_pointer(dst);
  const T* source = ascend_emulator::ub_pointer(src);
  ascend_emulator::core().issue(PIPE_V, call, {from, to}, [=] {
    for (uint32_t row = 0; row < 16; ++row) {
      for (uint32_t column = 0; column < 16; ++column) {
        target[column * 16 + row] = source[row * 16 + column];
      }
    }
  });
}

struct TransDataTo5HDParams {
  TransDataTo5HDParams(bool dst_high, bool src_high, ascend_emulator::Limited<uint8_t> times,
                       ascend_emulator::Limited<uint16_t> dst_stride,
                       ascend_emulator::Limited<uint16_t> src_stride)
      : dstHighHalf(dst_high),
        srcHighHalf(src_high),
        repeatTimes(times),
        dstRepStride(dst_stride),
        srcRepStride(src_stride) {}
  bool dstHighHalf;
  bool srcHighHalf;
  uint8_t repeatTimes;
  uint16_t dstRepStride;
  uint16_t srcRepStride;
};

// Row i of a 16 x 16 matrix is the block at src[i]; row j of its transpose goes to dst[j].
template <class T>
void TransDataTo5HD(const LocalTensor<T> (&dst)[16], const LocalTensor<T> (&src)[16],
                    const TransDataTo5HDParams& params) {
  static_assert(sizeof(T) == 2, "rule types: the emulator's TransDataTo5HD takes 16-bit elements");
  const std::string call = ascend_emulator::call_name<T>("TransDataTo5HD");
  if (params.repeatTimes == 1 && (params.dstRepStride != 0 || params.srcRepStride != 0)) {
    ascend_emulator::violate("stride", call, "one repeat with strides ", params.dstRepStride,
                             " and ", params.srcRepStride,
                             ", which the device adds even then; expected 0");
  }
  ascend_emulator::Access reads{ascend_emulator::Space::kUnified, false, {}};
  ascend_emulator::Access writes{ascend_emulator::Space::kUnified, true, {}};
  std::array<uint64_t, 16> from{};
  std::array<uint64_t, 16> to{};
  const uint32_t repeats = params.repeatTimes;
  for (uint32_t row = 0; row < 16; ++row) {
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
      const uint64_t source = src[row].use(call, uint64_t{repeat} * params.srcRepStride * 32, 32);
      const uint64_t target = dst[row].use(call, uint64_t{repeat} * params.dstRepStride * 32, 32);
      ascend_emulator::need_alignment(call, "src", source);
      ascend_emulator::need_alignment(call, "dst", target);
      reads.footprint.add_range(source, source + 32);
      writes.footprint.add_range(target, target + 32);
    }
    from[row] = src[row].GetPhyAddr();
    to[row] = dst[row].GetPhyAddr();
  }
  for (const ascend_emulator::Touch& written : writes.footprint.touches) {
    for (const ascend_emulator::Touch& read : reads.footprint.touches) {
      if (written.block == read.block) {
        ascend_emulator::violate("overlap", call, "dst and src overlap at UB address ",
                                 read.block * 32);
      }
    }
  }
  ascend_emulator::Core& core = ascend_emulator::core();
  core.issue(PIPE_V, call, {reads, writes}, [=, &core] {
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
      for (uint32_t row = 0; row < 16; ++row) {
        for (uint32_t column = 0; column < 16; ++column) {
          std::memcpy(core.ub(to[column] + uint64_t{repeat} * params.dstRepStride * 32 + row * 2),
                      core.ub(from[row] + uint64_t{repeat} * params.srcRepStride * 32 + column * 2),
                      2);
        }
      }
    }
  });
}

}  // namespace AscendC
