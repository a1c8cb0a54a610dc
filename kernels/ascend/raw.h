// Layout raw: every block is literal and in its slab.
#pragma once

#include "decode_frame.h"
#include "encode_frame.h"

namespace memswap::ascend {

// The checksum's, where nothing else of the layout has room for it.
template <uint32_t kWidth>
class ChecksumScratch {
 public:
  static constexpr uint32_t kUnifiedBytes = unified(2 * step_blocks(kWidth) * kBlockLanes * kWidth);

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(words_, 2 * step_blocks(kWidth) * kBlockLanes * kWidth);
  }
  __aicore__ inline LocalTensor<int32_t> scratch() { return words_.Get<int32_t>(); }

 private:
  TBuf<TPosition::VECCALC> words_;
};

template <uint32_t kBytes>
class RawCoder : public ChecksumScratch<kBytes> {
 public:
  static constexpr uint32_t kWidth = kBytes;
  static constexpr uint32_t kSlabBytes = kBlockLanes * kWidth;
  static constexpr bool kHasPayloads = false;
  static constexpr uint32_t kMeasureBytes = ChecksumScratch<kBytes>::kUnifiedBytes;
  static constexpr uint32_t kStoreBytes = 0;

  __aicore__ inline void init_measure(TPipe* pipe, const EncodeJob&) {
    ChecksumScratch<kBytes>::init(pipe);
  }

  __aicore__ inline void measure(const Step& step, const Bytes&, TileRecord* record,
                                 HeaderCounters*) {
    for (uint32_t b = 0; b < step.blocks; ++b) {
      record->set(step.first + b, frame::kLiteral, 0, 0);
    }
  }

  __aicore__ inline void encode(const Step& step, const Bytes& x, const Bytes& slab,
                                const TileRecord&, GM_ADDR) {
    copy_bytes(slab, x, step.blocks * kSlabBytes);
  }
};

template <uint32_t kBytes>
class RawReader : public ChecksumScratch<kBytes> {
 public:
  static constexpr uint32_t kWidth = kBytes;
  static constexpr uint32_t kSlabBytes = kBlockLanes * kWidth;
  static constexpr uint32_t kSlotBytes = 0;
  static constexpr uint32_t kMaxUnits = 0;

  __aicore__ static constexpr bool takes(uint32_t mode) { return mode == frame::kLiteral; }
  __aicore__ inline void load(const Bytes&, GM_ADDR, uint32_t, uint32_t) {}
  __aicore__ inline uint32_t decode(const Plan& plan, const Bytes& x, const Bytes& slab,
                                    const Bytes&) {
    copy_bytes(x, slab, plan.blocks * kSlabBytes);
    return 0;
  }
};

}  // namespace memswap::ascend
