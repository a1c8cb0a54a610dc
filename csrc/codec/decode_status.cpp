#include "decode_status.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <cstring>
#include <utility>

namespace memswap {

DecodeStatus::DecodeStatus(std::shared_ptr<DeviceStreams> streams, c10::Stream stream,
                           std::shared_ptr<Pool> pool)
    : streams_(std::move(streams)), stream_(stream), pool_(std::move(pool)) {
  const WithoutModes without_modes;
  const c10::StreamGuard guard(stream_);
  word_ = at::zeros({}, at::TensorOptions(streams_->device()).dtype(at::kInt));
}

uint32_t DecodeStatus::take_known() {
  const c10::DeviceGuard device_guard(streams_->device());
  const std::lock_guard lock(mutex_);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutModes without_modes;
  uint32_t found = 0;
  if (copy_) {
    if (!copy_->done()) {
      return 0;
    }
    copy_.reset();
    std::memcpy(&found, block_->data(), sizeof(found));
  }
  if (!block_) {
    block_ = pool_->allocate(sizeof(found));
  }
  // Before the guard: what a transfer finds current is a compute stream.
  auto copy = std::make_shared<StreamTransfer>(streams_, StreamTransfer::Direction::kBack,
                                               std::make_shared<StorageRef>(word_.storage()));
  const c10::StreamGuard guard(stream_);
  if (found != 0) {
    word_.zero_();
  }
  if (block_) {  // without pinned memory nobody learns of it: the next call tries again
    DeviceStreams::host_bytes(*block_, 0, sizeof(found))
        .copy_(streams_->device_bytes(word_.storage(), 0, sizeof(found)), /*non_blocking=*/true);
    copy->record(stream_);
    block_->used_by(copy);  // the lane may end before the copy, and its pinned memory with it
    copy_ = std::move(copy);
  }
  return found;
}

uint32_t DecodeStatus::wait() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutModes without_modes;
  const c10::StreamGuard guard(stream_);
  return static_cast<uint32_t>(word_.item<int32_t>());
}

}  // namespace memswap
