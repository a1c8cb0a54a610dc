// The reader of shapes dense and upcast: every mode.
#pragma once

#include "decode_frame.h"
#include "exponent_escapes.h"
#include "splits.h"

namespace memswap::ascend {

template <class Split>
class DenseReader {
  static constexpr bool kUpcast = std::is_same_v<Split, SplitUpcast>;
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = Split::kLanes;
  static constexpr uint32_t kRestBytes = rest_bytes<Split>();
  static constexpr uint32_t kBlockBytes = kBlockLanes * Split::kWidth;
  static constexpr uint32_t kLastMode = frame::kFw2 + Split::kExponentBits - 2;

 public:
  static constexpr uint32_t kWidth = Split::kWidth;
  static constexpr uint32_t kSlabBytes = kRestBytes + frame::kLowPlaneBytes;
  static constexpr uint32_t kMaxUnits =
      (kUpcast ? kBlockBytes - kSlabBytes : 128 * (Split::kExponentBits - 2)) / frame::kUnitBytes;
  static constexpr uint32_t kSlotBytes = kUpcast ? kBlockBytes - kSlabBytes : 1024;

  __aicore__ static constexpr bool takes(uint32_t mode) {
    return (mode >= frame::kLq2 && mode <= kLastMode) || (kUpcast && mode == frame::kLiteral);
  }

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    pipe_->InitBuffer(exponents_, kLanes * 2);
    pipe_->InitBuffer(work_, kVectors * kLanes * 2);
    pipe_->InitBuffer(is_escape_, kBlocks * kHighBitsBytes);
    pipe_->InitBuffer(ones_, kBlockLanes * 2);
    pipe_->InitBuffer(lane_numbers_, kBlockLanes * 2);
    masks_.init(pipe_);
    Duplicate(ones_.Get<half>(), static_cast<half>(1.0f), static_cast<int32_t>(kBlockLanes));
    CreateVecIndex(lane_numbers_.Get<int16_t>(), (int16_t)0, kBlockLanes);
    barrier();
    if constexpr (Split::kHasPairs) {
      pairs_.init(pipe_, kLanes);
    }
  }

  __aicore__ inline LocalTensor<int32_t> scratch() { return work_.Get<int32_t>(); }

  __aicore__ inline void load(const Bytes& slot, GM_ADDR from, uint32_t, uint32_t units) {
    load_bytes(slot, from, units * frame::kUnitBytes);
  }

  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes& slab,
                                    const Bytes& payload) {
    errors_ = 0;
    const Lanes e = exponents_.Get<int16_t>();
    const Lanes codes = work(0);
    const Lanes packed = work(3);
    const uint32_t lanes = plan.blocks * kBlockLanes;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      bytes_to_half(packed[b * frame::kLowPlaneBytes], slab[b * kSlabBytes + kRestBytes],
                    frame::kLowPlaneBytes);
    }
    barrier();
    half_to_lanes(packed, plan.blocks * frame::kLowPlaneBytes);
    barrier();
    unpack_rows(codes, packed, 2, plan.blocks);
    and_all(codes, codes, masks_.low_bits(2), lanes);
    barrier();
    bool escapes = false;
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      escapes = add_planes(plan, b, codes[b * kBlockLanes], payload[b * kSlotBytes]) || escapes;
    }
    // E = c - v = ~v + 1 + c.
    Not(as_bits(e), as_bits(codes), static_cast<int32_t>(lanes));
    barrier();
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      Adds(e[b * kBlockLanes], e[b * kBlockLanes], static_cast<int16_t>(plan.center[b] + 1),
           static_cast<int32_t>(kBlockLanes));
    }
    barrier();
    and_all(e, e, masks_.low_bits(Split::kExponentBits), lanes);
    barrier();
    if (escapes) {
      patch(plan, e, codes, payload, lanes);
    }
    uint32_t offset = 0;
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      load_field(work(i), slab[offset], kSlabBytes, work(Split::kFields), Split::field_width(i),
                 plan.blocks, masks_, ones_.Get<half>());
      offset += kBlockLanes / 8 * Split::field_width(i);
    }
    Split::join(x, e, work(0), masks_, &pairs_, plan.blocks);
    if constexpr (kUpcast) {
      for (uint32_t b = 0; b < plan.blocks; ++b) {
        if (plan.mode[b] == frame::kLiteral &&
            !read_literal(x[b * kBlockBytes], slab[b * kSlabBytes], kSlabBytes,
                          payload[b * kSlotBytes], plan.units[b], kBlockBytes)) {
          errors_ |= frame::kBadPayload;
        }
      }
    }
    return errors_;
  }

 private:
  // A lane per element each, for planes and the checksum.
  static constexpr uint32_t kVectors = max_of(4u, Split::kJoinVectors, kWidth);
  static constexpr uint32_t kExponentMask = (1u << Split::kExponentBits) - 1;

  // The work tensors are neighbours.
  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }

  // The bits of v above L0, from the payload. Returns whether the block has escapes.
  __aicore__ inline bool add_planes(const Plan& plan, uint32_t b, const Lanes& codes,
                                    const Bytes& payload) {
    const uint32_t mode = plan.mode[b];
    if (mode == frame::kLq2) {
      return true;
    }
    if (mode == frame::kLiteral) {
      return false;
    }
    const uint32_t bits = mode == frame::kLq3 ? 1 : mode - frame::kFw2;
    const bool exact = plan.units[b] == 16 * bits;
    if (mode == frame::kLq3 ? plan.units[b] < 16 : !exact) {
      errors_ |= frame::kBadPayload;
      return false;
    }
    uint32_t shift = 2;
    uint32_t at = 0;
    for (uint32_t width = 4; width >= 1; width /= 2) {
      if ((bits & width) == 0) {
        continue;
      }
      add_plane(codes, payload[at], shift, width, work(1), work(2), masks_, ones_.Get<half>());
      at += kBlockLanes / 8 * width;
      shift += width;
    }
    return mode == frame::kLq3;
  }

  __aicore__ inline void patch(const Plan& plan, const Lanes& e, const Lanes& codes,
                               const Bytes& payload, uint32_t lanes) {
    const Lanes positions = work(2);
    const LocalTensor<uint16_t> is_escape = is_escape_.Get<uint16_t>();
    uint32_t counts[kBlocks];
    lanes_to_half(codes, lanes);
    barrier();
    CompareScalar(is_escape_.Get<uint8_t>(), as_half(codes), static_cast<half>(0.0f), CMPMODE::EQ,
                  lanes);
    barrier();
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      uint64_t kept = 0;
      if (plan.mode[b] <= frame::kLq3) {
        GatherMask(as_bits(positions)[b * kBlockLanes], as_bits(lane_numbers_.Get<int16_t>()),
                   is_escape[b * kHighBitsBytes / 2], true, kBlockLanes,
                   GatherMaskParams(1, 1, 0, 0), kept);
      }
      counts[b] = static_cast<uint32_t>(kept);
    }
    hand_over<HardEvent::V_S>(pipe_);
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      if (plan.mode[b] > frame::kLq3) {
        continue;
      }
      EscapeReader reader(payload[b * kSlotBytes], plan.units[b] * frame::kUnitBytes,
                          plan.center[b], kExponentMask);
      const Lanes at = positions[b * kBlockLanes];
      const Lanes exponents = e[b * kBlockLanes];
      const bool good = plan.mode[b] == frame::kLq3
                            ? plan.units[b] >= 16 && reader.patch_lq3(exponents, at, counts[b])
                            : reader.patch_lq2(exponents, at, counts[b]);
      if (!good) {
        errors_ |= frame::kBadPayload;
      }
    }
    hand_over<HardEvent::S_V>(pipe_);
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> exponents_, work_, is_escape_, ones_, lane_numbers_;
  Masks masks_;
  WordPairs pairs_;
  uint32_t errors_ = 0;
};

}  // namespace memswap::ascend
