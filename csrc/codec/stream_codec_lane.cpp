#include "stream_codec_lane.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "backends.h"
#include "pool/pinned_slabs.h"
#include "self_check.h"
#include "storage/torch_npu.h"
#include "work/without_gil.h"

namespace memswap {

using Direction = StreamTransfer::Direction;

namespace {

// Blocks for headers: some hundreds are under way at most.
constexpr size_t kHeaderSlab = size_t{256} << 10;

// Where kernels would not reach it, an arena has no pinned memory.
std::shared_ptr<Pool> reached(c10::Device device, const std::shared_ptr<Pool>& pinned) {
  const memswap_codec* codec = codec_of(device.type());
  return codec != nullptr && codec->maps_host != 0 ? pinned : nullptr;
}

}  // namespace

// A frame's header on its way to the host, and what depends on it. `arrival` is the ticket of what
// writes it to the block: the encode itself, or a copy behind it.
class StreamCodecLane::Header final : public FrameWatch {
 public:
  Header(BlockPtr block, TicketPtr arrival, const std::shared_ptr<Arena::Share>& overflow)
      : arrival_(std::move(arrival)), block_(std::move(block)), overflow_(overflow) {}

  std::optional<FrameReport> report() override {
    const WithoutGil without_gil;
    std::shared_ptr<Arena::Share> overflow;  // these two are destroyed outside the lock
    BlockPtr block;
    {
      const std::lock_guard lock(mutex_);
      if (report_) {
        return report_;
      }
    }
    if (!arrival_->done()) {
      return std::nullopt;
    }
    const std::lock_guard lock(mutex_);
    if (!report_) {
      FrameReport found{};
      std::memcpy(&found.header, block_->data(), sizeof(found.header));
      report_ = found;
      block.swap(block_);
      if ((overflow = overflow_.lock())) {
        overflow->settle(found.header.overflow_used);
      }
    }
    return report_;
  }

  // The frame goes: what writes the header lets go of it, in order.
  void abandon() noexcept { arrival_->abandon(); }
  void wait() { arrival_->wait(); }

  // Blocks the calling thread until there is a report.
  void synchronize() {
    arrival_->synchronize();
    report();
  }

 private:
  const TicketPtr arrival_;
  std::mutex mutex_;
  BlockPtr block_;                              // pinned; until the header has been read
  const std::weak_ptr<Arena::Share> overflow_;  // the frame's; a frame that is gone needs none
  std::optional<FrameReport> report_;
};

// A frame on the device, or in a block of a pool.
class StreamCodecLane::Encoded final : public EncodedStorage {
 public:
  Encoded(std::shared_ptr<DeviceStreams> streams, const FramePlan& plan, size_t raw_nbytes,
          bool planned, std::shared_ptr<Arena::Share> overflow,
          std::shared_ptr<StreamTransfer> encode, std::shared_ptr<Header> header)
      : streams_(std::move(streams)),
        plan_(plan),
        raw_nbytes_(raw_nbytes),
        planned_(planned),
        overflow_(std::move(overflow)),
        encode_(std::move(encode)),
        header_(std::move(header)) {}

  // Edge 10, for what is still under way of a frame that nobody decodes.
  ~Encoded() override {
    header_->abandon();
    if (copy_) {
      copy_->abandon();
    }
  }

  void stays(StorageRefPtr frame) { frame_ = std::move(frame); }
  void sent_to(BlockPtr block, TicketPtr copy, std::shared_ptr<Lane> lane) {
    block_ = std::move(block);
    copy_ = std::move(copy);
    lane_ = std::move(lane);
    sending_ = true;
  }

  size_t nbytes() const override { return plan_.frame_bytes(); }
  size_t raw_nbytes() const override { return raw_nbytes_; }
  bool swapped() const override { return lane_ != nullptr; }
  size_t overflow_nbytes() const override {
    return overflow_ ? overflow_->device_units() * frame::kUnitBytes : 0;
  }
  std::shared_ptr<FrameWatch> watch() const override { return header_; }

  size_t device_nbytes() const override {
    if (!planned_) {
      return (swapped() ? 0 : nbytes()) + overflow_nbytes();
    }
    if (!swapped()) {
      return nbytes();
    }
    std::shared_ptr<StreamTransfer> fetched;  // destroyed outside the lock
    const std::lock_guard lock(mutex_);
    fetched = fetched_.lock();
    return ((sending_ ? 1 : 0) + (fetched && fetched->owns_storage() ? 1 : 0)) * nbytes();
  }

  void wait_sent() override {
    if (swapped()) {
      encode_->wait();
      header_->wait();
      copy_->wait();
      const std::lock_guard lock(mutex_);
      sending_ = false;
    }
  }

  // A decode brings the frame back; it owns it until it has been waited for.
  void fetched_by(const std::shared_ptr<StreamTransfer>& decode) const {
    const std::lock_guard lock(mutex_);
    fetched_ = decode;
  }

  // Those of the lane that encoded it, which no other lane has.
  const std::shared_ptr<DeviceStreams>& streams() const { return streams_; }
  const FramePlan& plan() const { return plan_; }
  const std::shared_ptr<Arena::Share>& overflow() const { return overflow_; }
  const std::shared_ptr<StreamTransfer>& encode() const { return encode_; }
  const StorageRefPtr& frame() const { return frame_; }
  const BlockPtr& block() const { return block_; }
  const std::shared_ptr<Lane>& lane() const { return lane_; }

 private:
  const std::shared_ptr<DeviceStreams> streams_;
  const FramePlan plan_;
  const size_t raw_nbytes_;
  const bool planned_;
  const std::shared_ptr<Arena::Share> overflow_;
  const std::shared_ptr<StreamTransfer> encode_;
  const std::shared_ptr<Header> header_;
  StorageRefPtr frame_;         // one that stays on the device, or
  BlockPtr block_;              // one that was sent away,
  TicketPtr copy_;              // this way,
  std::shared_ptr<Lane> lane_;  // on the lane that brings it back
  mutable std::mutex mutex_;    // guards what follows; nothing is called under it
  bool sending_ = false;        // whether the frame that was sent may still be on the device
  mutable std::weak_ptr<StreamTransfer> fetched_;  // the last decode of one that came back
};

StreamCodecLane::StreamCodecLane(c10::Device device, const Options& options)
    : streams_(std::make_shared<DeviceStreams>(device)),
      encode_stream_(streams_->new_stream()),
      decode_stream_(streams_->new_stream()),
      arena_pool_(options.arena_pool),
      arena_(std::make_shared<Arena>(streams_, encode_stream_, options.arena_budget,
                                     options.arena_chunk, reached(device, options.arena_pool))),
      arena_chunk_(options.arena_chunk),
      header_pool_(std::make_shared<Pool>(
          std::make_shared<PinnedSlabs>(device),
          PoolOptions{.slab_bytes = kHeaderSlab, .alignment = frame::kAlignmentBytes})),
      headers_(device, /*max_leaving_bytes=*/0, /*chunk_bytes=*/frame::kHeaderBytes),
      status_(streams_, decode_stream_, header_pool_),
      departures_(options.max_leaving_bytes) {}

// Allocated and cleared on the encode stream, which alone uses it.
void* StreamCodecLane::workspace(const memswap_codec& codec) {
  if (codec.workspace_bytes == 0) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  if (!workspace_.defined()) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const WithoutModes without_modes;
    const c10::StreamGuard guard(encode_stream_);
    workspace_ = at::zeros({static_cast<int64_t>(codec.workspace_bytes)},
                           at::TensorOptions(streams_->device()).dtype(at::kByte));
  }
  return workspace_.mutable_data_ptr();
}

template <class Job>
int StreamCodecLane::launch(const char* name, c10::Stream stream, const Job& job,
                            int (*run)(const Job*, const memswap_launch*), void* workspace) const {
  return submit(name, stream, [=](void* native) {
    memswap_launch launch{};
    launch.stream = native;
    launch.workspace = workspace;
    return run(&job, &launch);
  });
}

std::optional<FramePlan> StreamCodecLane::plan(const StorageRefPtr& storage,
                                               const FrameOptions& options) {
  TORCH_CHECK_VALUE(storage && storage->storage.device() == streams_->device(),
                    "memswap: this codec lane serves ", streams_->device(), ", found ",
                    storage ? storage->storage.device().str() : "None");
  TORCH_CHECK_VALUE(options.layout, "memswap: an encode on ", streams_->device(),
                    " waits for no sample, so it is told a layout; found None");
  const memswap_codec* codec = codec_of(streams_->device().type());
  if (codec == nullptr) {
    return refuse("no codec is known for " + streams_->device().str());
  }
  std::string reason;
  auto plan = plan_frame(options, storage->storage.data(), storage->storage.nbytes(), reason);
  if (!plan) {
    return refuse(std::move(reason));
  }
  if (std::string fault = distrust(*codec, streams_->device(), options.dtype, *options.layout);
      !fault.empty()) {
    return refuse(std::move(fault));
  }
  return plan;
}

std::optional<Encoding> StreamCodecLane::encode(StorageRefPtr storage,
                                                const FrameOptions& options) {
  const auto plan = this->plan(storage, options);
  if (!plan) {
    return std::nullopt;
  }
  return start(std::move(storage), options, *plan, nullptr, nullptr);
}

std::optional<Encoding> StreamCodecLane::encode_to(StorageRefPtr storage,
                                                   const FrameOptions& options,
                                                   const std::shared_ptr<Lane>& lane,
                                                   const std::shared_ptr<Pool>& pool) {
  TORCH_CHECK_VALUE(lane && pool, "memswap: encode_to needs a lane and a pool, found None");
  const auto plan = this->plan(storage, options);
  if (!plan) {
    return std::nullopt;
  }
  BlockPtr block = pool->allocate(plan->frame_bytes());
  if (!block) {
    return refuse(pool->statistics().last_refusal);
  }
  return start(std::move(storage), options, *plan, lane, std::move(block));
}

// `copies` moves the frame to `block`, or both are nullptr and the frame stays.
std::optional<Encoding> StreamCodecLane::start(StorageRefPtr storage, const FrameOptions& options,
                                               const FramePlan& plan,
                                               const std::shared_ptr<Lane>& copies,
                                               BlockPtr block) {
  const c10::DeviceGuard device_guard(streams_->device());
  const memswap_codec& codec = *codec_of(streams_->device().type());
  settle_known();
  departures_.make_room(*storage);
  BlockPtr header_block = header_pool_->allocate(frame::kHeaderBytes);
  if (!header_block) {
    return refuse("no pinned memory for a frame's header: " +
                  header_pool_->statistics().last_refusal);
  }
  std::shared_ptr<Arena::Share> overflow;
  if (const uint64_t most = plan.most_overflow(codec.spare_tiles); most > 0) {
    std::string reason;
    overflow = arena_->reserve(most, reason);
    // Without a plan the device keeps enough to do while the host waits.
    for (size_t left = planned_ ? SIZE_MAX : unsettled() / 2;
         !overflow && left > 0 && arena_->could_hold(most) && settle_oldest(); --left) {
      overflow = arena_->reserve(most, reason);
    }
    if (!overflow) {
      return refuse(std::move(reason), /*arena_is_full=*/true);
    }
  }
  StorageRefPtr frame;
  void* counters = nullptr;
  try {
    counters = workspace(codec);
    frame = std::make_shared<StorageRef>(streams_->new_bytes(plan.frame_bytes()).storage());
  } catch (const c10::OutOfMemoryError& error) {
    if (overflow) {
      overflow->cancel();
    }
    return refuse("the device has no memory for a frame: " +
                  std::string(error.what_without_backtrace()));
  }
  auto ticket =
      std::make_shared<StreamTransfer>(streams_, Direction::kAway, storage, departures_.leaving());
  ticket->also_owns(frame);
  streams_->order(encode_stream_, ticket->compute());  // edges 1 and 2
  memswap_encode_job job = encode_job(plan, options);
  job.frame = frame->storage.mutable_data();
  job.input = storage->storage.nbytes() > 0 ? storage->storage.data() : job.frame;
  if (codec.reports != 0) {
    job.report = header_block->data();
    header_block->used_by(ticket);
  }
  if (overflow) {
    job.overflow = overflow->memory();
    job.overflow_capacity = overflow->capacity();
    job.overflow_cursor = overflow->cursor();
  }
  const int code = launch("memswap::encode", encode_stream_, job, codec.encode, counters);
  ticket->record(encode_stream_);
  if (code != MEMSWAP_CODEC_OK) {
    // The share counts as used up: what was launched before the failure may move the cursor.
    return refuse("codec '" + std::string(codec.name) + "': " + codec.message(code));
  }
  departures_.add(ticket);
  // Edge 4, where the encode does not write the header to the host itself. Where the frame leaves,
  // its header goes the same way and ahead of it, so that the lane that moves frames bounds and
  // orders all that it still owns of one. Under a plan, which orders that itself (wait_sent), no
  // header waits behind frames: the host waits for it.
  const bool planned = planned_;
  TicketPtr arrival = ticket;
  if (codec.reports == 0) {
    Lane& header_lane = copies && !planned ? *copies : headers_;
    arrival = header_lane.send(frame, header_block, {0, frame::kHeaderBytes}, {ticket});
  }
  auto header = std::make_shared<Header>(header_block, std::move(arrival), overflow);
  auto encoded = std::make_shared<Encoded>(streams_, plan, storage->storage.nbytes(), planned,
                                           std::move(overflow), ticket, header);
  if (copies) {
    TicketPtr copy = copies->send(std::move(frame), block, {}, {ticket});  // edge 5
    encoded->sent_to(std::move(block), std::move(copy), copies);
  } else {
    encoded->stays(std::move(frame));
  }
  const std::lock_guard lock(mutex_);
  unsettled_.push_back(header);
  return Encoding{std::move(encoded), std::move(ticket)};
}

std::pair<StorageRefPtr, TicketPtr> StreamCodecLane::decode(const EncodedStoragePtr& given) {
  const auto* encoded = dynamic_cast<const Encoded*>(given.get());
  TORCH_CHECK_VALUE(encoded != nullptr,
                    "memswap: a StreamCodecLane decodes what a StreamCodecLane has encoded");
  TORCH_CHECK_VALUE(encoded->streams() == streams_, "memswap: the codec lane of ",
                    streams_->device(), " decodes the frames that it has encoded, found one that ",
                    "another lane encoded on ", encoded->streams()->device());
  const c10::DeviceGuard device_guard(streams_->device());
  const memswap_codec& codec = *codec_of(streams_->device().type());
  departures_.reap();  // first: it may free memory
  auto output = std::make_shared<StorageRef>(streams_->new_bytes(encoded->raw_nbytes()).storage());
  StorageRefPtr frame = encoded->frame();
  TicketPtr fetch;
  if (encoded->swapped()) {
    std::tie(frame, fetch) = encoded->lane()->fetch(encoded->block());
  }
  auto ticket = std::make_shared<StreamTransfer>(streams_, Direction::kBack, output);
  ticket->also_owns(frame);
  if (fetch) {
    // The block knows the fetch's ticket as well, so it must be told to let go of the frame; not
    // before compute is behind the decode, or compute would wait for the copy alone.
    ticket->also_needs(std::shared_ptr<void>(nullptr, [fetch](void*) { fetch->abandon(); }));
  }
  if (fetch) {
    encoded->fetched_by(ticket);
  }
  streams_->order(decode_stream_, ticket->compute());  // edge 7
  encoded->encode()->order_before(decode_stream_);     // edge 6
  if (fetch) {
    order_after({fetch}, decode_stream_);  // edge 8
  }
  const FramePlan& plan = encoded->plan();
  memswap_decode_job job{};
  job.frame = frame->storage.data();
  job.frame_bytes = plan.frame_bytes();
  Arena::Reading overflow = encoded->overflow() ? encoded->overflow()->read() : Arena::Reading();
  job.overflow = overflow.memory();
  job.overflow_capacity = overflow.capacity();
  job.elements = plan.sections.elements;
  job.output = job.elements > 0 ? output->storage.mutable_data() : frame->storage.mutable_data();
  job.dtype = static_cast<uint8_t>(plan.dtype);
  job.layout_hint = static_cast<uint8_t>(1 + static_cast<uint32_t>(plan.layout));
  job.status = status_.word();
  const int code = launch("memswap::decode", decode_stream_, job, codec.decode, nullptr);
  ticket->record(decode_stream_);
  overflow.submitted(decode_stream_);
  check_codec(codec, code, "decode " + std::to_string(encoded->raw_nbytes()) + " bytes");
  return {std::move(output), std::move(ticket)};
}

void StreamCodecLane::set_overflow_room(std::optional<size_t> bytes) {
  planned_ = bytes.has_value();
  if (bytes) {
    arena_->set_room(*bytes);
  } else {
    arena_->set_chunk(arena_chunk_);
  }
}

// Encodes whose headers the host has not seen.
size_t StreamCodecLane::unsettled() {
  const std::lock_guard lock(mutex_);
  return unsettled_.size();
}

// Waits for the oldest header that the host has not seen. Whether there was one.
bool StreamCodecLane::settle_oldest() {
  std::shared_ptr<Header> oldest;
  {
    const std::lock_guard lock(mutex_);
    while (!oldest && !unsettled_.empty()) {
      oldest = unsettled_.front().lock();
      unsettled_.pop_front();
    }
  }
  if (oldest) {
    oldest->synchronize();
  }
  return oldest != nullptr;
}

// Looks at the headers that have arrived, oldest first: shares of the arena shrink to what was
// used.
void StreamCodecLane::settle_known() {
  std::shared_ptr<Header> known;  // headers are destroyed outside the lock
  while (true) {
    std::shared_ptr<Header> oldest;
    {
      const auto done = [&](const std::weak_ptr<Header>& front) {
        return front.expired() || !(front.owner_before(known) || known.owner_before(front));
      };
      const std::lock_guard lock(mutex_);
      while (!unsettled_.empty() && done(unsettled_.front())) {
        unsettled_.pop_front();
      }
      if (unsettled_.empty()) {
        return;
      }
      oldest = unsettled_.front().lock();
    }
    if (oldest && !oldest->report()) {
      return;
    }
    known = std::move(oldest);
  }
}

}  // namespace memswap
