#include "staged_lane.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "device_streams.h"
#include "work/without_gil.h"

namespace memswap {
namespace {

// The block's memory as a storage in host memory, which owns the block.
StorageRefPtr storage_over(BlockPtr block) {
  void* const data = block->data();
  const size_t nbytes = block->nbytes();
  auto owner = std::make_unique<BlockPtr>(std::move(block));
  c10::DataPtr pointer(
      data, owner.get(), [](void* held) { delete static_cast<BlockPtr*>(held); },
      c10::Device(c10::DeviceType::CPU));
  (void)owner.release();
  return std::make_shared<StorageRef>(c10::Storage(c10::Storage::use_byte_size_t(), nbytes,
                                                   std::move(pointer), /*allocator=*/nullptr,
                                                   /*resizable=*/false));
}

// Of the first leg, so that whoever waits for a send waits for what concerns the device.
class StagedSend final : public StreamTicket {
 public:
  StagedSend(TicketPtr copy, TicketPtr write) : copy_(std::move(copy)), write_(std::move(write)) {}

  void wait() override { copy_->wait(); }
  bool done() override { return copy_->done() && write_->done(); }
  void synchronize() override { copy_->synchronize(); }
  void abandon() noexcept override { copy_->abandon(); }
  void order_before(c10::Stream stream) override { order_after({copy_}, stream); }

 private:
  const TicketPtr copy_;
  const TicketPtr write_;  // its failure is the lane's to make good
};

}  // namespace

class StagedFetch final : public StreamTicket {
 public:
  StagedFetch(std::shared_ptr<StreamLane> copies, TicketPtr read, BlockPtr staging,
              StorageRefPtr storage, size_t offset, Tickets after, c10::Stream compute)
      : copies_(std::move(copies)),
        read_(std::move(read)),
        staging_(std::move(staging)),
        storage_(std::move(storage)),
        offset_(offset),
        after_(std::move(after)),
        compute_(compute) {}

  void wait() override { launched()->wait(); }
  void synchronize() override { launched()->synchronize(); }
  void order_before(c10::Stream stream) override { order_after({launched()}, stream); }
  bool failed() override { return read_->failed() || given_up_; }
  bool done() override {
    if (!read_->done()) {
      return false;
    }
    return failed() || launched()->done();
  }

  // What was not launched yet is not launched any more.
  void abandon() noexcept override {
    const WithoutGil without_gil;
    BlockPtr staging;  // destroyed outside the lock
    StorageRefPtr storage;
    const std::lock_guard lock(mutex_);
    if (copy_) {
      copy_->abandon();
    } else {
      given_up_ = true;
      staging.swap(staging_);
      storage.swap(storage_);
    }
  }

  // Begins the second leg, once the first has ended; what a failed read says is thrown.
  void launch() {
    const WithoutGil without_gil;
    read_->synchronize();
    const std::lock_guard lock(mutex_);
    if (!copy_ && !given_up_) {
      const c10::StreamGuard guard(compute_);  // edge e
      copy_ = copies_->fetch_into(staging_, storage_, offset_, std::move(after_));
      staging_.reset();
      storage_.reset();
    }
  }

  bool read_well() const { return read_->done() && !read_->failed(); }

 private:
  TicketPtr launched() {
    launch();
    const std::lock_guard lock(mutex_);
    if (!copy_) {
      throw TransferError("nobody was to wait for this any more");
    }
    return copy_;
  }

  const std::shared_ptr<StreamLane> copies_;
  const TicketPtr read_;
  std::mutex mutex_;  // guards what follows
  BlockPtr staging_;
  StorageRefPtr storage_;
  const size_t offset_;
  Tickets after_;
  const c10::Stream compute_;
  TicketPtr copy_;
  std::atomic<bool> given_up_{false};
};

StagedLane::StagedLane(std::shared_ptr<StreamLane> copies, std::shared_ptr<WorkerLane> files,
                       std::shared_ptr<Pool> pinned, std::shared_ptr<Pool> pageable,
                       c10::Device device, size_t max_staging_bytes)
    : copies_(std::move(copies)),
      files_(std::move(files)),
      pinned_(std::move(pinned)),
      pageable_(std::move(pageable)),
      streams_(std::make_shared<DeviceStreams>(device)),
      max_staging_bytes_(max_staging_bytes) {
  if (!copies_ || !files_ || !pinned_ || !pageable_) {
    throw std::invalid_argument("a StagedLane needs two lanes and two pools, found None");
  }
}

void StagedLane::check(const StorageRef& storage, const Block&) const {
  if (storage.storage.device() != streams_->device()) {
    throw std::invalid_argument("this lane serves " + streams_->device().str() +
                                ", the storage is on " + storage.storage.device().str());
  }
}

StorageRefPtr StagedLane::allocate(size_t nbytes) {
  const c10::DeviceGuard guard(streams_->device());
  return std::make_shared<StorageRef>(streams_->new_bytes(nbytes).storage());
}

TicketPtr StagedLane::start_send(StorageRefPtr storage, size_t offset, BlockPtr block,
                                 Tickets after) {
  advance();
  const size_t nbytes = block->nbytes();
  if (block->data() || nbytes == 0) {
    return copies_->send(std::move(storage), std::move(block), {offset, nbytes}, std::move(after));
  }
  BlockPtr staging = new_staging(nbytes);
  TicketPtr copy = copies_->send(std::move(storage), staging, {offset, nbytes}, std::move(after));
  TicketPtr write = files_->send(storage_over(staging), block, {}, {copy});  // edge a
  const std::lock_guard lock(mutex_);
  writes_.push_back(write);
  staged_[block.get()] = {block, std::move(staging), write};
  return std::make_shared<StagedSend>(std::move(copy), std::move(write));
}

TicketPtr StagedLane::start_fetch(BlockPtr block, StorageRefPtr storage, size_t offset,
                                  Tickets after) {
  advance();
  if (block->data() || block->nbytes() == 0) {
    return copies_->fetch_into(std::move(block), std::move(storage), offset, std::move(after));
  }
  BlockPtr staging;
  {
    const std::lock_guard lock(mutex_);
    const auto found = staged_.find(block.get());
    if (found != staged_.end() && found->second.block.lock() == block) {
      staging = found->second.staging;
    }
  }
  if (staging) {
    if (staging->nbytes() > block->nbytes()) {
      staging->shrink(block->nbytes());  // as the block was, when its send had ended
    }
    return copies_->fetch_into(std::move(staging), std::move(storage), offset, std::move(after));
  }
  staging = new_staging(block->nbytes());
  TicketPtr read =
      files_->fetch_into(std::move(block), storage_over(staging), 0, staging->uses());  // edge c
  auto ticket = std::make_shared<StagedFetch>(copies_, std::move(read), std::move(staging),
                                              std::move(storage), offset, std::move(after),
                                              streams_->current());
  const std::lock_guard lock(mutex_);
  fetches_.push_back(ticket);
  return ticket;
}

BlockPtr StagedLane::new_staging(size_t nbytes) {
  const auto in_use = [&] { return pinned_->statistics().in_use_bytes; };
  while (in_use() + nbytes > max_staging_bytes_ && finish_oldest_write()) {
  }
  for (;;) {
    if (BlockPtr block = pinned_->allocate(nbytes)) {
      return block;
    }
    if (!finish_oldest_write()) {
      break;
    }
  }
  BlockPtr block = pageable_->allocate(nbytes);
  if (!block) {
    throw TransferError("no host memory for " + std::to_string(nbytes) +
                        " bytes on their way between the device and a file: " +
                        pageable_->statistics().last_refusal);
  }
  return block;
}

bool StagedLane::finish_oldest_write() {
  TicketPtr oldest;
  {
    const std::lock_guard lock(mutex_);
    if (writes_.empty()) {
      return false;
    }
    oldest = writes_.front();
  }
  try {
    oldest->synchronize();
  } catch (const TransferError&) {
    // advance() keeps the staging block: the bytes are there.
  }
  advance();
  return true;
}

void StagedLane::finish_writes() {
  const WithoutGil without_gil;
  while (finish_oldest_write()) {
  }
}

size_t StagedLane::staged_nbytes() {
  advance();
  return pinned_->statistics().in_use_bytes + pageable_->statistics().in_use_bytes;
}

void StagedLane::advance() {
  const WithoutGil without_gil;
  std::vector<std::shared_ptr<StagedFetch>> ready;
  std::vector<Staged> over;  // destroyed outside the lock
  TicketPtr failed;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(fetches_, [&](const std::weak_ptr<StagedFetch>& weak) {
      const auto fetch = weak.lock();
      if (fetch && fetch->read_well()) {
        ready.push_back(fetch);
      }
      return !fetch || fetch->read_well() || fetch->failed();
    });
    std::erase_if(writes_, [&](const TicketPtr& write) {
      failed = write->done() && write->failed() ? write : failed;
      return write->done();
    });
    for (auto known = staged_.begin(); known != staged_.end();) {
      Staged& staged = known->second;
      if (staged.write->done() && (!staged.write->failed() || staged.block.expired())) {
        over.push_back(std::move(staged));
        known = staged_.erase(known);
      } else {
        ++known;
      }
    }
  }
  for (const auto& fetch : ready) {
    fetch->launch();
  }
  if (failed) {
    try {
      failed->synchronize();
    } catch (const TransferError& error) {
      const std::lock_guard lock(mutex_);
      failure_ = failure_.empty() ? error.what() : failure_;
    }
  }
}

std::string StagedLane::take_failure() {
  advance();
  const std::lock_guard lock(mutex_);
  return std::exchange(failure_, {});
}

}  // namespace memswap
