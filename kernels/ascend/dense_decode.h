// The reader of layouts dense and upcast: every mode.
#pragma once

#include "decode_frame.h"
#include "exponent_escapes.h"
#include "lq3_escapes.h"
#include "splits.h"

namespace memswap::ascend {

template <class Split>
class DenseReader {
  static constexpr bool kUpcast = std::is_same_v<Split, SplitUpcast>;
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = Split::kLanes;
  static constexpr uint32_t kRestBytes = rest_bytes<Split>();
  static constexpr uint32_t kBlockBytes = kBlockLanes * Split::kWidth;
  // A lane per element each, for planes and the checksum.
  static constexpr uint32_t kVectors = max_of(4u, Split::kJoinVectors, Split::kWidth);
  static constexpr uint32_t kLastMode = frame::kFw2 + Split::kExponentBits - 2;

 public:
  static constexpr uint32_t kWidth = Split::kWidth;
  static constexpr uint32_t kSlabBytes = kRestBytes + frame::kLowPlaneBytes;
  static constexpr uint32_t kMaxUnits =
      (kUpcast ? kBlockBytes - kSlabBytes : 128 * (Split::kExponentBits - 2)) / frame::kUnitBytes;
  static constexpr uint32_t kSlotBytes = kMaxUnits * frame::kUnitBytes;
  static constexpr uint32_t kUnifiedBytes =
      EscapeReader::kUnifiedBytes + Ranks::kUnifiedBytes + SymbolFetcher::kUnifiedBytes +
      unified(kLanes * 2) + unified(kVectors * kLanes * 2) + Masks::kUnifiedBytes +
      Ones::kUnifiedBytes + (Split::kHasPairs ? WordPairs::kUnifiedBytes : 0);

  __aicore__ static constexpr bool takes(uint32_t mode) {
    return (mode >= frame::kLq2 && mode <= kLastMode) || (kUpcast && mode == frame::kLiteral);
  }

  __aicore__ inline void init(TPipe* pipe) {
    pipe_ = pipe;
    escapes_.init(pipe_, &ranks_, &symbols_, &masks_);
    ranks_.init(pipe_);
    symbols_.init(pipe_);
    pipe_->InitBuffer(exponents_, kLanes * 2);
    pipe_->InitBuffer(work_, kVectors * kLanes * 2);
    masks_.init(pipe_);
    ones_.init(pipe_);
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
    if (escapes) {
      resolve(plan, codes, payload);
    }
    EscapeReader::exponents(e, codes, work(1), plan.center, plan.blocks,
                            masks_.low_bits(Split::kExponentBits), escapes);
    uint32_t offset = 0;
    for (uint32_t i = 0; i < Split::kFields; ++i) {
      load_field(work(i), slab[offset], kSlabBytes, work(Split::kFields), Split::field_width(i),
                 plan.blocks, masks_, ones_);
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
      add_plane(codes, payload[at], shift, width, work(1), work(2), masks_, ones_);
      at += kBlockLanes / 8 * width;
      shift += width;
    }
    return mode == frame::kLq3;
  }

  // Codes of 0 become what they stand for in blocks that have escapes.
  __aicore__ inline void resolve(const Plan& plan, const Lanes& codes, const Bytes& payload) {
    const Lanes flags = work(1);
    const int32_t n = static_cast<int32_t>(plan.blocks * kBlockLanes);
    EscapeStreams blocks[kBlocks];
    Mins(flags, codes, (int16_t)1, n);
    barrier();
    one_minus(flags, flags, n);
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      EscapeStreams& block = blocks[b];
      const uint32_t before = plan.mode[b] == frame::kLq3 ? kHighBitsBytes : 0;
      const uint32_t bytes = plan.units[b] * frame::kUnitBytes;
      block.mode = bytes >= before ? plan.mode[b] : 0;
      if (!block.has_escapes()) {
        Duplicate(flags[b * kBlockLanes], (int16_t)0, static_cast<int32_t>(kBlockLanes));
        continue;
      }
      block.streams = payload[b * kSlotBytes + before];
      block.length = bytes - before;
      block.before = before;
      block.center = plan.center[b];
    }
    barrier();
    escapes_.resolve(blocks, plan.blocks, codes, flags, work(2), work(3));
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      errors_ |= bad_payload_unless(blocks[b].good);
    }
  }

  TPipe* pipe_;
  TBuf<TPosition::VECCALC> exponents_, work_;
  EscapeReader escapes_;
  Ranks ranks_;
  SymbolFetcher symbols_;
  Masks masks_;
  Ones ones_;
  WordPairs pairs_;
  uint32_t errors_ = 0;
};

}  // namespace memswap::ascend
