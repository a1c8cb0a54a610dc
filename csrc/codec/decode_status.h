// What decodes on a stream have found wrong, read back without waiting for them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>

#include "lane/device_streams.h"
#include "lane/stream_lane.h"
#include "pool/pool.h"

namespace memswap {

// One word on the device, into which every decode puts bits of memswap::frame::Status. Thread-safe.
class DecodeStatus {
 public:
  // `stream` is the one that decodes; `pool` has pinned memory.
  DecodeStatus(std::shared_ptr<DeviceStreams> streams, c10::Stream stream,
               std::shared_ptr<Pool> pool);

  uint32_t* word() const { return static_cast<uint32_t*>(word_.mutable_data_ptr()); }

  // What had been found when the word was last read back, and once for each finding: the word is
  // cleared with it. Has it read back again, behind the decodes so far. Never waits.
  uint32_t take_known();

  // What has been found and not been taken; waits for the decodes.
  uint32_t wait();

 private:
  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream stream_;
  const std::shared_ptr<Pool> pool_;
  at::Tensor word_;
  std::mutex mutex_;
  BlockPtr block_;
  std::shared_ptr<StreamTransfer> copy_;  // to the block, or nullptr
};

}  // namespace memswap
