#include "worker_codec_lane.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "backends.h"
#include "host_memory.h"
#include "memswap/sample.h"
#include "parallel.h"
#include "work/without_gil.h"

namespace memswap {
namespace {

const memswap_codec& cpu_codec() { return *codec_of(c10::DeviceType::CPU); }

std::string of_bytes(size_t nbytes) { return std::to_string(nbytes) + " bytes"; }

// What the owner of a frame and the work on it share.
struct HostFrame {
  HostFrame(size_t raw, uint8_t dtype_code, size_t expected, bool to_pool)
      : raw_nbytes(raw), dtype(dtype_code), swapped(to_pool), nbytes(expected) {}

  const size_t raw_nbytes;
  const uint8_t dtype;
  const bool swapped;
  std::atomic<size_t> nbytes;  // of the block

  // Written by the encode, before it ends; read by whoever has seen that.
  BlockPtr block;
};
using HostFramePtr = std::shared_ptr<HostFrame>;

// The calling thread's alone on a worker; all of torch's where somebody does the work because they
// would only wait for it.
memswap_launch launch_here() {
  return WorkQueue::on_worker() ? memswap_launch{} : on_torch_threads();
}

class Encode final : public WorkTicket {
 public:
  Encode(std::shared_ptr<WorkQueue> queue, std::shared_ptr<LeavingStorages> leaving,
         StorageRefPtr storage, HostFramePtr frame, BlockPtr block, const FramePlan& plan,
         const FrameOptions& options, std::shared_ptr<Pool> destination)
      : WorkTicket(std::move(queue)),
        leaving_(std::move(leaving)),
        plan_(plan),
        options_(options),
        storage_(std::move(storage)),
        frame_(std::move(frame)),
        block_(std::move(block)),
        destination_(std::move(destination)) {
    leaving_->add(*storage_);
  }

  StorageRefPtr kept_storage() override { return failed() ? storage_ : nullptr; }

  // After the end. Nothing where the encode failed, or nobody wanted it any more.
  const std::optional<FrameReport>& report() const { return report_; }

 private:
  void work() override {
    if (frame_.use_count() == 1) {
      return;  // nobody can ask for these bytes any more
    }
    for (const TicketPtr& use : block_->uses()) {  // of the range's previous owner
      use->synchronize();
    }
    auto* header = static_cast<frame::Header*>(block_->data());
    const void* const bytes = storage_->storage.data();
    const memswap_launch here = launch_here();
    if (!options_.layout) {
      choose_layout(bytes, here);
    }
    memswap_encode_job job = encode_job(plan_, options_);
    job.input = bytes;
    job.frame = header;
    check_codec(cpu_codec(), cpu_codec().encode(&job, &here),
                "encode " + of_bytes(frame_->raw_nbytes));
    if (header->status != frame::kOk) {
      throw TransferError(of_bytes(frame_->raw_nbytes) + " did not fit a frame with room for " +
                          std::to_string(plan_.var_capacity) + " units; they are where they were");
    }
    header->var_capacity = header->var_used;  // exact, and therefore portable
    report_ = FrameReport{*header};
    block_->shrink(plan_.sections.bytes(header->var_used));
    if (destination_) {
      move_to_destination();
    }
    frame_->nbytes = block_->nbytes();
    frame_->block = std::move(block_);
  }

  // The plan had room for any.
  void choose_layout(const void* bytes, const memswap_launch& here) {
    options_.layout = memswap_choose_layout(bytes, plan_.sections.elements, options_.dtype, &here);
    std::string refusal;
    const auto plan = plan_frame(options_, bytes, frame_->raw_nbytes, refusal);
    if (!plan || plan->frame_bytes() > block_->nbytes()) {
      throw TransferError("cannot encode " + of_bytes(frame_->raw_nbytes) + " in layout " +
                          std::to_string(*options_.layout) + ": " + refusal);
    }
    plan_ = *plan;
  }

  void move_to_destination() {
    BlockPtr away = destination_->allocate(block_->nbytes());
    if (!away) {
      throw TransferError("the pool has no room for a frame of " + of_bytes(block_->nbytes()) +
                          ": " + destination_->statistics().last_refusal);
    }
    for (const TicketPtr& use : away->uses()) {
      use->synchronize();
    }
    away->write(block_->data());
    block_ = std::move(away);
  }

  void let_go(bool failed) noexcept override {
    leaving_->remove(*storage_);
    block_.reset();
    if (failed) {
      frame_->nbytes = 0;
    } else {
      storage_.reset();
    }
    frame_.reset();
    destination_.reset();
  }

  const std::shared_ptr<LeavingStorages> leaving_;
  FramePlan plan_;
  FrameOptions options_;
  StorageRefPtr storage_;
  HostFramePtr frame_;
  BlockPtr block_;
  std::shared_ptr<Pool> destination_;
  std::optional<FrameReport> report_;
};

class HostWatch final : public FrameWatch {
 public:
  explicit HostWatch(std::shared_ptr<Encode> encode) : encode_(std::move(encode)) {}
  std::optional<FrameReport> report() override {
    return encode_->done() ? encode_->report() : std::nullopt;
  }

 private:
  const std::shared_ptr<Encode> encode_;
};

class HostEncoded final : public EncodedStorage {
 public:
  HostEncoded(HostFramePtr frame, std::shared_ptr<Encode> encode)
      : frame_(std::move(frame)), encode_(std::move(encode)) {}

  size_t nbytes() const override { return frame_->nbytes; }
  size_t raw_nbytes() const override { return frame_->raw_nbytes; }
  bool swapped() const override { return frame_->swapped; }
  std::shared_ptr<FrameWatch> watch() const override {
    return std::make_shared<HostWatch>(encode_);
  }

  const HostFramePtr& frame() const { return frame_; }
  const std::shared_ptr<Encode>& encode() const { return encode_; }

 private:
  const HostFramePtr frame_;
  const std::shared_ptr<Encode> encode_;
};

class Decode final : public WorkTicket {
 public:
  Decode(std::shared_ptr<WorkQueue> queue, const HostEncoded& encoded, StorageRefPtr output,
         std::shared_ptr<Pool> scratch)
      : WorkTicket(std::move(queue)),
        frame_(encoded.frame()),
        encode_(encoded.encode()),
        output_(std::move(output)),
        scratch_(std::move(scratch)) {}

  void abandon() noexcept override { give_up(); }

 private:
  void work() override {
    encode_->finish();
    if (encode_->failed()) {
      throw TransferError("cannot decode " + of_bytes(frame_->raw_nbytes) +
                          " that were never encoded; the encode had failed: " + encode_->error());
    }
    Block& block = *frame_->block;
    c10::DataPtr copy;
    const void* bytes = block.data();
    if (bytes == nullptr) {
      copy = host_bytes(scratch_.get(), block.nbytes());
      block.read(copy.get());
      bytes = copy.get();
    }
    uint32_t status = frame::kOk;
    memswap_decode_job job{};
    job.frame = bytes;
    job.frame_bytes = block.nbytes();
    job.output = output_->storage.mutable_data();
    job.elements = encode_->report()->header.elements;
    job.dtype = frame_->dtype;
    job.status = &status;
    const memswap_launch here = launch_here();
    check_codec(cpu_codec(), cpu_codec().decode(&job, &here),
                "decode " + of_bytes(frame_->raw_nbytes));
    if (status != frame::kOk) {
      throw TransferError("a frame of " + of_bytes(block.nbytes()) +
                          " is damaged: " + describe_status(status));
    }
  }

  void let_go(bool) noexcept override {
    output_.reset();
    frame_.reset();
    encode_.reset();
    scratch_.reset();
  }

  HostFramePtr frame_;
  std::shared_ptr<Encode> encode_;
  StorageRefPtr output_;
  std::shared_ptr<Pool> scratch_;
};

}  // namespace

WorkerCodecLane::WorkerCodecLane(size_t workers, std::shared_ptr<Pool> pool,
                                 std::shared_ptr<Pool> outputs, size_t max_leaving_bytes)
    : pool_(std::move(pool)),
      outputs_(outputs ? std::move(outputs) : pool_),
      queue_(std::make_shared<WorkQueue>(workers)),
      leaving_(std::make_shared<LeavingStorages>()),
      departures_(max_leaving_bytes, leaving_) {}

WorkerCodecLane::~WorkerCodecLane() { stop(); }

std::optional<Encoding> WorkerCodecLane::encode(StorageRefPtr storage,
                                                const FrameOptions& options) {
  return submit(std::move(storage), options, nullptr);
}

std::optional<Encoding> WorkerCodecLane::encode_to(StorageRefPtr storage,
                                                   const FrameOptions& options,
                                                   const std::shared_ptr<Lane>&,
                                                   const std::shared_ptr<Pool>& pool) {
  return submit(std::move(storage), options, pool);
}

std::optional<Encoding> WorkerCodecLane::submit(StorageRefPtr storage, const FrameOptions& options,
                                                std::shared_ptr<Pool> destination) {
  if (!storage || !storage->storage.device().is_cpu()) {
    throw std::invalid_argument("WorkerCodecLane encodes storages in host memory, found " +
                                (storage ? "one on " + storage->storage.device().str() : "None"));
  }
  const size_t nbytes = storage->storage.nbytes();
  std::string reason;
  const auto plan = plan_frame(options, storage->storage.data(), nbytes, reason);
  if (!plan) {
    return refuse(std::move(reason));
  }
  departures_.make_room(*storage);
  BlockPtr block = pool_->allocate(plan->frame_bytes());
  if (!block) {
    return refuse(pool_->statistics().last_refusal);
  }
  if (block->data() == nullptr) {
    throw std::invalid_argument("WorkerCodecLane needs a pool of host memory, found one of a file");
  }
  auto frame = std::make_shared<HostFrame>(nbytes, options.dtype, plan->frame_bytes(),
                                           destination != nullptr);
  auto ticket = std::make_shared<Encode>(queue_, leaving_, std::move(storage), frame,
                                         std::move(block), *plan, options, std::move(destination));
  auto encoded = std::make_shared<HostEncoded>(std::move(frame), ticket);
  departures_.add(ticket);
  queue_->submit(ticket);
  return Encoding{std::move(encoded), std::move(ticket)};
}

std::pair<StorageRefPtr, TicketPtr> WorkerCodecLane::decode(const EncodedStoragePtr& encoded) {
  const auto* ours = dynamic_cast<const HostEncoded*>(encoded.get());
  if (ours == nullptr) {
    throw std::invalid_argument("WorkerCodecLane decodes what a WorkerCodecLane has encoded");
  }
  auto output = std::make_shared<StorageRef>(host_storage(outputs_.get(), ours->raw_nbytes()));
  auto ticket = std::make_shared<Decode>(queue_, *ours, output, outputs_);
  queue_->submit(ticket);
  return {std::move(output), std::move(ticket)};
}

void WorkerCodecLane::stop() {
  const WithoutGil without_gil;  // the last storages may need it to be dropped
  queue_->stop();
}

}  // namespace memswap
