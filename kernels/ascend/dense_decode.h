// The decoder of shape dense: every mode.
#pragma once

#include "checksum.h"
#include "decode_job.h"
#include "exponent_escapes.h"
#include "splits.h"

namespace memswap::ascend {

template <class Split>
class DenseDecoder {
 public:
  __aicore__ inline DenseDecoder(TPipe* pipe, const DecodeJob& job, const FrameHeader& header)
      : pipe_(pipe),
        job_(job),
        header_(header),
        share_(job.elements, Split::kSlabBytes),
        verify_(job.verify != 0 && header.checked) {}

  // Returns error bits.
  __aicore__ inline uint32_t run() {
    if (share_.first_tile >= share_.end_tile) {
      return 0;
    }
    init();
    const uint32_t steps = (share_.end_tile - share_.first_tile) * kSteps;
    load(0);
    for (uint32_t step = 0; step < steps; ++step) {
      if (step + 1 < steps) {
        load(step + 1);
      }
      if (plans_[step % 2].blocks != 0) {
        decode(step);
      }
    }
    return errors_;
  }

 private:
  static constexpr uint32_t kBlocks = Split::kBlocks;
  static constexpr uint32_t kLanes = kBlocks * kBlockLanes;
  static constexpr uint32_t kSteps = frame::kTileBlocks / kBlocks;
  static constexpr uint32_t kStepBytes = kLanes * Split::kWidth;
  static constexpr uint32_t kWords = kStepBytes / 4;
  static constexpr uint32_t kMaxUnits = 16 * (Split::kExponentBits - 2);
  static constexpr uint32_t kLastMode = frame::kFw2 + Split::kExponentBits - 2;
  static constexpr uint32_t kExponentMask = (1u << Split::kExponentBits) - 1;

  // What a step was found to be when it was loaded.
  struct Plan {
    uint32_t blocks;  // 0: nothing to do, or nothing that can be trusted
    uint32_t count;   // elements
    uint32_t mode[kBlocks];
    uint32_t units[kBlocks];
    uint32_t center[kBlocks];
    uint32_t checksum;
  };

  __aicore__ inline void init() {
    pipe_->InitBuffer(slabs_, 2, kBlocks * Split::kSlabBytes);
    pipe_->InitBuffer(payloads_, 2, kBlocks * kSlotBytes);
    pipe_->InitBuffer(out_, 2, kStepBytes);
    pipe_->InitBuffer(exponents_, kLanes * 2);
    pipe_->InitBuffer(work_, 4 * kLanes * 2);
    pipe_->InitBuffer(is_escape_, kBlocks * kHighBitsBytes);
    pipe_->InitBuffer(ones_, kBlockLanes * 2);
    pipe_->InitBuffer(lane_numbers_, kBlockLanes * 2);
    masks_.init(pipe_);
    Duplicate(ones_.Get<half>(), static_cast<half>(1.0f), static_cast<int32_t>(kBlockLanes));
    CreateVecIndex(lane_numbers_.Get<int16_t>(), (int16_t)0, kBlockLanes);
    barrier();
    records_.init(pipe_, job_.frame + share_.records, share_.tiles);
    if (verify_) {
      checksum_.init(pipe_);
    }
  }

  // The work tensors are neighbours.
  __aicore__ inline Lanes work(uint32_t i) { return work_.Get<int16_t>()[i * kLanes]; }

  __aicore__ inline uint32_t first_block(uint32_t step) {
    return share_.first_tile * frame::kTileBlocks + step * kBlocks;
  }

  // Checks the tile's record and starts the moves of one step.
  __aicore__ inline void load(uint32_t step) {
    Plan& plan = plans_[step % 2];
    plan.blocks = 0;
    const uint32_t block = first_block(step);
    if (step % kSteps == 0) {
      read_record(share_.first_tile + step / kSteps);
    }
    if (payloads_at_ == nullptr || block >= share_.blocks) {
      return;
    }
    plan.count = Share::elements_from(job_.elements, block, kLanes);
    plan.blocks = (plan.count + kBlockLanes - 1) / kBlockLanes;
    plan.checksum = record_.checksum;
    Bytes slab = slabs_.template AllocTensor<uint8_t>();
    GlobalTensor<uint8_t> from;
    from.SetGlobalBuffer(job_.frame + frame::kHeaderBytes + uint64_t{block} * Split::kSlabBytes);
    DataCopy(slab, from, plan.blocks * Split::kSlabBytes);
    slabs_.EnQue(slab);
    Bytes payload = payloads_.template AllocTensor<uint8_t>();
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      const uint32_t i = step % kSteps * kBlocks + b;
      plan.mode[b] = record_.block[i] >> 12;
      plan.units[b] = record_.block[i] & 0xfffu;
      plan.center[b] = record_.center[i];
      if (plan.units[b] != 0) {
        from.SetGlobalBuffer(payloads_at_);
        DataCopyPad(payload[b * kSlotBytes], from,
                    DataCopyExtParams(1, plan.units[b] * frame::kUnitBytes, 0, 0, 0),
                    DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
        payloads_at_ += plan.units[b] * frame::kUnitBytes;
      }
    }
    payloads_.EnQue(payload);
  }

  __aicore__ inline void read_record(uint32_t tile) {
    record_ = records_.read(tile);
    const uint32_t left = share_.blocks - tile * frame::kTileBlocks;
    bool possible = true;
    for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
      const uint32_t mode = record_.block[i] >> 12;
      const uint32_t units = record_.block[i] & 0xfffu;
      possible =
          possible && (i < left ? mode >= frame::kLq2 && mode <= kLastMode && units <= kMaxUnits
                                : record_.block[i] == 0);
    }
    payloads_at_ = possible ? payloads_of(job_, header_, share_, record_) : nullptr;
    if (payloads_at_ == nullptr) {
      errors_ |= frame::kBadRecord;
    }
  }

  __aicore__ inline void decode(uint32_t step) {
    const Plan& plan = plans_[step % 2];
    const Lanes e = exponents_.Get<int16_t>();
    const Lanes codes = work(0);
    const Lanes packed = work(3);
    Bytes slab = slabs_.template DeQue<uint8_t>();
    Bytes payload = payloads_.template DeQue<uint8_t>();
    const uint32_t lanes = plan.blocks * kBlockLanes;
    barrier();
    for (uint32_t b = 0; b < plan.blocks; ++b) {
      bytes_to_half(packed[b * frame::kLowPlaneBytes],
                    slab[b * Split::kSlabBytes + Split::kRestBytes], frame::kLowPlaneBytes);
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
    payloads_.FreeTensor(payload);

    Lanes x = out_.template AllocTensor<int16_t>();
    Split::join(x, e, work_.Get<int16_t>(), slab, plan.blocks, ones_.Get<half>());
    slabs_.FreeTensor(slab);
    if (verify_) {
      verify(step, plan, x);
    }
    out_.EnQue(x);
    x = out_.template DeQue<int16_t>();
    GlobalTensor<int16_t> to;
    to.SetGlobalBuffer(reinterpret_cast<__gm__ int16_t*>(
        job_.output + uint64_t{first_block(step)} * kBlockLanes * Split::kWidth));
    DataCopyPad(to, x, DataCopyExtParams(1, plan.count * Split::kWidth, 0, 0, 0));
    out_.FreeTensor(x);
  }

  // The bits of v above L0, from the payload. Returns whether the block has escapes.
  __aicore__ inline bool add_planes(const Plan& plan, uint32_t b, const Lanes& codes,
                                    const Bytes& payload) {
    const uint32_t mode = plan.mode[b];
    if (mode == frame::kLq2) {
      return true;
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

  __aicore__ inline void verify(uint32_t step, const Plan& plan, const Lanes& x) {
    // Missing elements count as 0, and a frame may say otherwise.
    fill(x, plan.count * Split::kWidth / 2, kStepBytes / 2, (int16_t)0);
    barrier();
    checksum_.compute(x.template ReinterpretCast<int32_t>(), work_.Get<int32_t>(), kWords);
    hand_over<HardEvent::V_S>(pipe_);
    if (step % kSteps == 0) {
      sum_ = 0;
    }
    sum_ += checksum_.result(step % kSteps * kWords);
    const bool last = step % kSteps == kSteps - 1 || first_block(step) + kBlocks >= share_.blocks;
    if (last && static_cast<uint32_t>(sum_ % Checksum::kPrime) != plan.checksum) {
      errors_ |= frame::kBadChecksum;
    }
  }

  TPipe* pipe_;
  DecodeJob job_;
  FrameHeader header_;
  Share share_;
  bool verify_;
  TQue<TPosition::VECIN, 2> slabs_, payloads_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> exponents_, work_, is_escape_, ones_, lane_numbers_;
  Masks masks_;
  RecordReader records_;
  Checksum checksum_;
  TileRecord record_;
  GM_ADDR payloads_at_ = nullptr;  // of the step to be loaded next
  Plan plans_[2];
  uint64_t sum_ = 0;  // of the tile's checksum
  uint32_t errors_ = 0;
};

}  // namespace memswap::ascend
