// Instructions that move lanes: compaction by a mask, lookup by offsets, broadcast, indices.
#pragma once

#include "elementwise.h"

namespace AscendC {
enum class GatherMaskMode : uint8_t { VERSION_V1, VERSION_V2 };

struct GatherMaskParams {
  GatherMaskParams() = default;
  GatherMaskParams(ascend_emulator::Limited<uint8_t> src0BlockStride,
                   ascend_emulator::Limited<uint16_t> repeatTimes,
                   ascend_emulator::Limited<uint16_t> src0RepeatStride,
                   ascend_emulator::Limited<uint8_t> src1RepeatStride)
      : src0_block(src0BlockStride),
        repeats(repeatTimes),
        src0_repeat(src0RepeatStride),
        src1_repeat(src1RepeatStride) {}
  uint32_t src0_block = 1;
  uint32_t repeats = 1;
  uint32_t src0_repeat = 8;
  uint32_t src1_repeat = 8;
};

struct BrcbRepeatParams {
  BrcbRepeatParams(ascend_emulator::Limited<uint16_t> dst_block,
                   ascend_emulator::Limited<uint16_t> dst_repeat)
      : dst{dst_block, dst_repeat} {}
  ascend_emulator::Strides dst;
};
}  // namespace AscendC

namespace ascend_emulator {

// `keep(repeat, lane)` at the time of execution says which lanes survive: at most one of `one_of`.
template <class T, class Keep>
uint64_t gather_mask(const std::string& call, const AscendC::LocalTensor<T>& dst,
                     const AscendC::LocalTensor<T>& src, bool counted, uint32_t mask,
                     uint32_t one_of, const AscendC::GatherMaskParams& params,
                     std::vector<Access> accesses, Keep keep) {
  const uint32_t lanes = counted ? mask : kRepeatBytes / sizeof(T);
  if (lanes == 0 || params.repeats == 0) {
    return 0;
  }
  if (lanes * sizeof(T) > kRepeatBytes && params.src0_block != 1) {
    violate("stride", call, "a block stride of ", params.src0_block, " with ", lanes,
            " lanes per repeat, expected 1 beyond one repeat's ", kRepeatBytes, " bytes");
  }
  const uint64_t begin = src.use(call, 0, 0);
  need_alignment(call, "src0", begin);
  const auto source = [begin, params](uint32_t repeat, uint32_t lane) {
    constexpr uint32_t per_block = kBlockBytes / sizeof(T);
    return begin +
           (uint64_t{repeat} * params.src0_repeat +
            uint64_t{lane / per_block} * params.src0_block) *
               kBlockBytes +
           lane % per_block * sizeof(T);
  };
  Access reads{Space::kUnified, false, {}};
  for (uint32_t repeat = 0; repeat < params.repeats; ++repeat) {
    for (uint32_t lane = 0; lane < lanes; lane += kBlockBytes / sizeof(T)) {
      const uint64_t first = source(repeat, lane);
      const uint64_t left = uint64_t{lanes - lane} * sizeof(T);
      src.use(call, first - begin, std::min(left, kBlockBytes));
      reads.footprint.add_range(first, first + std::min(left, kBlockBytes));
    }
  }
  accesses.push_back(reads);
  const uint64_t to = dst.use(call, 0, 0);
  need_alignment(call, "dst", to);
  const uint64_t src_end = source(params.repeats - 1, lanes - 1) + sizeof(T);
  // How much is written is known to the vector unit alone; hazards count the most it can be.
  const uint64_t most = uint64_t{params.repeats} * ((lanes + one_of - 1) / one_of) * sizeof(T);
  // Up to the end of the last block, the rest of which may or may not be overwritten.
  const uint64_t room =
      (std::min<uint64_t>(most, dst.GetLength()) + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  // Compaction in place from the first lane on writes nothing that is not yet read.
  if (to != begin) {
    need_disjoint(call, "dst and src0", to, to + room, begin, src_end);
  }
  accesses.push_back(access_range(Space::kUnified, true, to, to + room));
  Core& here = core();
  here.mask_spoiled_by = "GatherMask";
  uint64_t kept = 0;
  const uint64_t capacity = dst.GetLength() / sizeof(T);
  here.issue(PIPE_V, call, accesses, [&] {
    std::vector<T> values;
    for (uint32_t repeat = 0; repeat < params.repeats; ++repeat) {
      for (uint32_t lane = 0; lane < lanes; ++lane) {
        if (keep(repeat, lane)) {
          values.push_back(*reinterpret_cast<const T*>(here.ub(source(repeat, lane))));
        }
      }
    }
    kept = values.size();
    if (kept > capacity) {
      violate("unified bounds", call, kept, " elements survive, dst has room for ", capacity);
    }
    if (kept != 0) {
      std::memcpy(here.ub(to), values.data(), kept * sizeof(T));
    }
    const uint64_t end = to + kept * sizeof(T);
    for (uint64_t i = end; i % kBlockBytes != 0; ++i) {
      *here.ub(i) = static_cast<uint8_t>(0xb7 + i);
    }
  });
  here.pipelines.run_vector();
  here.set_initialized(to + kept * sizeof(T), to + room, false);
  return kept;
}

}  // namespace ascend_emulator

namespace AscendC {

template <class T, class U, GatherMaskMode mode = GatherMaskMode::VERSION_V2>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                const LocalTensor<U>& pattern, const bool reduceMode, const uint32_t mask,
                const GatherMaskParams& params, uint64_t& rsvdCnt) {
  static_assert(table::gather_mask<T, U>,
                "rule types: GatherMask takes 16-bit data with a uint16_t pattern or 32-bit data "
                "with a uint32_t pattern");
  const std::string call = ascend_emulator::call_name<T>("GatherMask");
  const uint32_t lanes = reduceMode ? mask : ascend_emulator::kRepeatBytes / sizeof(T);
  const uint64_t begin = pattern.use(call, 0, 0);
  ascend_emulator::need_alignment(call, "pattern", begin);
  ascend_emulator::Access reads{ascend_emulator::Space::kUnified, false, {}};
  for (uint32_t repeat = 0; repeat < params.repeats; ++repeat) {
    const uint64_t first = uint64_t{repeat} * params.src1_repeat * ascend_emulator::kBlockBytes;
    const uint64_t bytes = (uint64_t{lanes} + 7) / 8;
    pattern.use(call, first, bytes);
    reads.footprint.add_range(begin + first, begin + first + bytes);
  }
  ascend_emulator::Core& core = ascend_emulator::core();
  rsvdCnt = ascend_emulator::gather_mask(
      call, dst, src0, reduceMode, mask, 1, params, {reads}, [&](uint32_t repeat, uint32_t lane) {
        const uint64_t byte =
            begin + uint64_t{repeat} * params.src1_repeat * ascend_emulator::kBlockBytes + lane / 8;
        return (*core.ub(byte) >> lane % 8 & 1) != 0;
      });
}

template <class T, GatherMaskMode mode = GatherMaskMode::VERSION_V2>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t pattern,
                const bool reduceMode, const uint32_t mask, const GatherMaskParams& params,
                uint64_t& rsvdCnt) {
  static_assert(table::wide_lanes<T>, "rule types: GatherMask takes 16- and 32-bit elements");
  const std::string call = ascend_emulator::call_name<T>("GatherMask");
  if (pattern < 1 || pattern > 7) {
    ascend_emulator::violate("gather", call, "pattern ", int{pattern}, ", expected 1 to 7");
  }
  const uint32_t one_of = pattern == 7 ? 1 : pattern <= 2 ? 2 : 4;
  rsvdCnt = ascend_emulator::gather_mask(call, dst, src0, reduceMode, mask, one_of, params, {},
                                         [pattern](uint32_t, uint32_t lane) {
                                           return pattern == 7   ? true
                                                  : pattern <= 2 ? lane % 2 == pattern - 1u
                                                                 : lane % 4 == pattern - 3u;
                                         });
}

template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
            const LocalTensor<uint32_t>& offsets, const uint32_t base, const uint32_t count) {
  static_assert(table::wide_lanes<T>, "rule types: Gather takes 16- and 32-bit elements");
  const std::string call = ascend_emulator::call_name<T>("Gather");
  if (count == 0) {
    return;
  }
  ascend_emulator::Core& core = ascend_emulator::core();
  const uint64_t begin = src.use(call, 0, 0);
  ascend_emulator::need_alignment(call, "src", begin);
  const uint64_t bytes = src.GetLength();
  const ascend_emulator::Access indices =
      ascend_emulator::contiguous(call, "offsets", false, offsets, count);
  const ascend_emulator::Access to = ascend_emulator::contiguous(call, "dst", true, dst, count);
  ascend_emulator::need_disjoint(call, "dst and src", dst.GetPhyAddr(),
                                 dst.GetPhyAddr() + count * sizeof(T), begin, begin + bytes);
  ascend_emulator::need_disjoint(call, "dst and offsets", dst.GetPhyAddr(),
                                 dst.GetPhyAddr() + count * sizeof(T), offsets.GetPhyAddr(),
                                 offsets.GetPhyAddr() + count * 4);
  core.need_initialized(call, indices.footprint);
  core.set_initialized(to.footprint, true);
  T* target = ascend_emulator::ub_pointer(dst);
  const uint32_t* index = ascend_emulator::ub_pointer(offsets);
  // Any byte of src may be read; which ones must be initialised shows when it runs.
  core.pipelines.issue(
      PIPE_V, call,
      {indices, to,
       ascend_emulator::access_range(ascend_emulator::Space::kUnified, false, begin,
                                     begin + bytes)},
      [=, &core] {
        for (uint32_t i = 0; i < count; ++i) {
          const uint64_t offset = uint64_t{base} + index[i];
          if (offset % sizeof(T) != 0) {
            ascend_emulator::violate("gather", call, "offset ", offset, " of lane ", i,
                                     ", expected a multiple of ", sizeof(T));
          }
          if (offset + sizeof(T) > bytes) {
            ascend_emulator::violate("gather", call, "offset ", offset, " of lane ", i,
                                     ", the source has ", bytes, " bytes");
          }
          target[i] = *reinterpret_cast<const T*>(core.ub(begin + offset));
        }
      });
}

// Each of 8 elements per repeat fills a block of 32 bytes.
template <class T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
          const ascend_emulator::Limited<uint8_t> repeats, const BrcbRepeatParams& params) {
  static_assert(table::wide_lanes<T>, "rule types: Brcb takes 16- and 32-bit elements");
  const std::string call = ascend_emulator::call_name<T>("Brcb");
  constexpr uint32_t per_block = ascend_emulator::kBlockBytes / sizeof(T);
  if (repeats == 0) {
    return;
  }
  const ascend_emulator::Access from =
      ascend_emulator::contiguous(call, "src0", false, src0, uint64_t{repeats} * 8);
  const ascend_emulator::Lanes lanes{8 * per_block, repeats, false, 0, {~0ull, ~0ull}};
  const ascend_emulator::Operand to =
      ascend_emulator::operand(call, "dst", true, dst, lanes, params.dst);
  for (const ascend_emulator::Touch& touch : to.footprint.touches) {
    const uint64_t address = touch.block * ascend_emulator::kBlockBytes;
    ascend_emulator::need_disjoint(call, "dst and src0", address, address + 32, src0.GetPhyAddr(),
                                   src0.GetPhyAddr() + repeats * 8 * sizeof(T));
  }
  const T* source = ascend_emulator::ub_pointer(src0);
  ascend_emulator::Core& core = ascend_emulator::core();
  const uint32_t total = repeats;
  core.issue(PIPE_V, call, {from, {ascend_emulator::Space::kUnified, true, to.footprint}},
             [=, &core] {
               for (uint32_t repeat = 0; repeat < total; ++repeat) {
                 for (uint32_t lane = 0; lane < 8 * per_block; ++lane) {
                   std::memcpy(core.ub(to.address(repeat, lane)),
                               &source[repeat * 8 + lane / per_block], sizeof(T));
                 }
               }
             });
}

template <class T>
void CreateVecIndex(LocalTensor<T> dst, const T& first, uint32_t count) {
  static_assert(table::arithmetic<T>,
                "rule types: CreateVecIndex takes int16_t, half, int32_t or float on Atlas A2");
  const std::string call = ascend_emulator::call_name<T>("CreateVecIndex");
  if (count == 0) {
    return;
  }
  T* target = ascend_emulator::ub_pointer(dst);
  ascend_emulator::core().issue(
      PIPE_V, call, {ascend_emulator::contiguous(call, "dst", true, dst, count)}, [=] {
        for (uint32_t i = 0; i < count; ++i) {
          target[i] = ascend_emulator::OpAdd{}(first, static_cast<T>(static_cast<int>(i)));
        }
      });
}

}  // namespace AscendC
