// ENCODE and ENCODE_SWAP: a losslessly encoded frame, on the device or in a pool.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "away.h"
#include "codec/codec_lane.h"
#include "codec/frame_plan.h"
#include "lane/lane.h"
#include "pool/pool.h"

namespace memswap {

class FrameForm final : public AwayForm {
 public:
  FrameForm(std::shared_ptr<CodecLane> lane, EncodedStoragePtr encoded, bool can_fetch_ahead)
      : lane_(std::move(lane)), encoded_(std::move(encoded)), can_fetch_ahead_(can_fetch_ahead) {}

  Returning bring() override;
  // Until the encoder has reported, that includes what is set aside for the frame's overflow.
  size_t device_nbytes() const override { return encoded_->device_nbytes(); }
  size_t pool_nbytes() const override { return encoded_->swapped() ? encoded_->nbytes() : 0; }
  size_t returning_nbytes() const override { return pool_nbytes(); }
  bool can_fetch_ahead() const override { return can_fetch_ahead_; }
  bool decodes() const override { return !encoded_->swapped(); }
  AnyLanePtr sent_by() const override { return lane_; }
  Reason short_of() const override { return reasons::kCodecRoom; }
  void wait_sent() override;

 private:
  const std::shared_ptr<CodecLane> lane_;
  const EncodedStoragePtr encoded_;
  const bool can_fetch_ahead_;
};

// A storage that leaves as a frame, and what its encoder finds out.
struct LeavingFrame {
  Leaving leaving;
  std::shared_ptr<FrameWatch> watch;
};

// Encodes storages by one codec lane, and where there is a pool, copies the frames there.
class FrameSender {
 public:
  // Frames of `pool` travel by `copies`; without both, frames stay where they were made.
  // `works_ahead`: the device works while the thread that asks goes on. Where the device is the
  // processor, encoding and decoding are done at once by the thread that asks: waiting would not
  // make them cheaper, and takes memory.
  FrameSender(std::shared_ptr<CodecLane> lane, bool works_ahead,
              std::shared_ptr<Lane> copies = nullptr, std::shared_ptr<Pool> pool = nullptr)
      : lane_(std::move(lane)),
        works_ahead_(works_ahead),
        copies_(std::move(copies)),
        pool_(std::move(pool)) {}

  // Starts encoding a storage. Nothing: there is no room, and nothing was started.
  std::optional<LeavingFrame> send(const StorageRefPtr& storage, const FrameOptions& options);

  const std::shared_ptr<CodecLane>& lane() const { return lane_; }
  const std::shared_ptr<Lane>& copies() const { return copies_; }  // nullptr: frames stay
  bool works_ahead() const { return works_ahead_; }
  // Why `send` last refused, in words for the user.
  std::string why_refused() const { return lane_->last_refusal(); }
  bool arena_was_full() const { return lane_->arena_was_full(); }

 private:
  const std::shared_ptr<CodecLane> lane_;
  const bool works_ahead_;
  const std::shared_ptr<Lane> copies_;
  const std::shared_ptr<Pool> pool_;
};

}  // namespace memswap
