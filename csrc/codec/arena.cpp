#include "arena.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "lane/stream_lane.h"
#include "memswap/frame.h"
#include "storage/storage.h"
#include "work/without_gil.h"

namespace memswap {
namespace {

// The cursor stands in the last 8 of the bytes before the memory.
constexpr size_t kCursor = Arena::kBefore - sizeof(uint64_t);

// Bytes that a position in an arena can reach.
constexpr size_t kLongest = uint64_t{frame::kMaxBaseUnits} * frame::kUnitBytes;

}  // namespace

Arena::Chunk::Chunk(std::shared_ptr<DeviceStreams> streams, at::Tensor bytes, BlockPtr pinned,
                    c10::Stream owner)
    : streams(std::move(streams)),
      bytes(std::move(bytes)),
      pinned(std::move(pinned)),
      owner(owner),
      capacity((this->pinned ? this->pinned->nbytes() : this->bytes.nbytes() - kBefore) /
               frame::kUnitBytes),
      last_read(this->bytes.device().type()) {}

// Edge 13: the pool's block goes to others behind all encodes that wrote to it, and all decodes
// that read from it.
Arena::Chunk::~Chunk() {
  try {
    order_behind_reads();
    if (pinned) {
      const c10::DeviceGuard device_guard(owner.device());
      auto last_use = std::make_shared<StreamTransfer>(
          streams, StreamTransfer::Direction::kBack, std::make_shared<StorageRef>(bytes.storage()));
      last_use->record(owner);
      pinned->used_by(std::move(last_use));
    }
  } catch (const std::exception&) {
    // A device that is lost orders nothing, and nothing runs on it that could use the memory.
  }
}

void Arena::Chunk::order_behind_reads() {
  if (std::exchange(read, false)) {
    last_read.block(owner);
  }
}

std::byte* Arena::Chunk::memory() const {
  return pinned ? static_cast<std::byte*>(pinned->data())
                : static_cast<std::byte*>(bytes.mutable_data_ptr()) + kBefore;
}

Arena::Share::Share(std::shared_ptr<Arena> arena, std::shared_ptr<Chunk> chunk, uint64_t units)
    : arena_(std::move(arena)), chunk_(std::move(chunk)), units_(units) {}

Arena::Share::~Share() {
  const WithoutGil without_gil;
  const std::lock_guard lock(arena_->mutex_);
  if (chunk_) {
    --chunk_->live;
  }
}

void* Arena::Share::memory() const { return chunk_->memory(); }

uint64_t Arena::Share::capacity() const { return chunk_->capacity; }

uint64_t* Arena::Share::cursor() const {
  return reinterpret_cast<uint64_t*>(static_cast<std::byte*>(chunk_->bytes.mutable_data_ptr()) +
                                     kCursor);
}

uint64_t Arena::Share::units() const {
  const WithoutGil without_gil;
  const std::lock_guard lock(arena_->mutex_);
  return units_;
}

uint64_t Arena::Share::device_units() const {
  const WithoutGil without_gil;
  const std::lock_guard lock(arena_->mutex_);
  return chunk_ && chunk_->pinned ? 0 : units_;
}

void Arena::Share::settle(uint64_t used) {
  std::shared_ptr<Chunk> dropped;  // destroyed outside the lock
  const WithoutGil without_gil;
  const std::lock_guard lock(arena_->mutex_);
  if (std::exchange(settled_, true)) {
    return;
  }
  chunk_->spent -= units_ - std::min(used, units_);
  units_ = std::min(used, units_);
  if (units_ == 0) {
    --chunk_->live;
    dropped = std::move(chunk_);
  }
}

Arena::Reading Arena::Share::read() const {
  const WithoutGil without_gil;
  const std::lock_guard lock(arena_->mutex_);
  if (!chunk_) {
    return {};
  }
  ++chunk_->live;
  return {arena_, chunk_};
}

Arena::Reading::Reading(std::shared_ptr<Arena> arena, std::shared_ptr<Chunk> chunk)
    : arena_(std::move(arena)), chunk_(std::move(chunk)) {}

Arena::Reading::~Reading() {
  if (chunk_) {
    const WithoutGil without_gil;
    const std::lock_guard lock(arena_->mutex_);
    --chunk_->live;
  }
}

const void* Arena::Reading::memory() const { return chunk_ ? chunk_->memory() : nullptr; }

uint64_t Arena::Reading::capacity() const { return chunk_ ? chunk_->capacity : 0; }

void Arena::Reading::submitted(c10::Stream stream) {
  if (chunk_) {
    const WithoutGil without_gil;
    const std::lock_guard lock(arena_->mutex_);
    chunk_->last_read.record(stream);
    chunk_->read = true;
  }
}

Arena::Arena(std::shared_ptr<DeviceStreams> streams, c10::Stream encode_stream, size_t budget_bytes,
             size_t chunk_bytes, std::shared_ptr<Pool> pinned)
    : streams_(std::move(streams)),
      encode_stream_(encode_stream),
      pinned_(std::move(pinned)),
      chunk_bytes_(chunk_bytes),
      pins_(pinned_ != nullptr),
      budget_bytes_(budget_bytes) {}

std::shared_ptr<Arena::Share> Arena::reserve(uint64_t units, std::string& refusal) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Chunk> chunk;
  if (pins_) {
    chunk = find_room(units, /*pinned=*/true);
    if (!chunk) {
      chunk = grow_pinned(units);
    }
  }
  if (!chunk) {
    chunk = find_room(units, /*pinned=*/false);
  }
  if (!chunk) {
    chunk = grow(units, refusal);
  }
  if (!chunk) {
    ++refusals_;
    return nullptr;
  }
  chunk->spent += units;
  ++chunk->live;
  return std::make_shared<Share>(shared_from_this(), std::move(chunk), units);
}

std::shared_ptr<Arena::Chunk> Arena::find_room(uint64_t units, bool pinned) {
  for (const auto& chunk : chunks_) {
    if ((chunk->pinned != nullptr) == pinned && chunk->capacity - chunk->spent >= units) {
      return chunk;
    }
  }
  for (const auto& chunk : chunks_) {
    if ((chunk->pinned != nullptr) == pinned && chunk->live == 0 && chunk->capacity >= units) {
      set_back(*chunk);
      ++resets_;
      return chunk;
    }
  }
  return nullptr;
}

// Edge 11: behind the decodes that read what the next encodes will overwrite. Encodes themselves
// are in the order of the encode stream.
void Arena::set_back(Chunk& chunk) {
  chunk.order_behind_reads();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutModes without_modes;
  const c10::StreamGuard guard(encode_stream_);
  chunk.bytes.narrow(0, kCursor, sizeof(uint64_t)).zero_();
  chunk.spent = 0;
}

std::shared_ptr<Arena::Chunk> Arena::grow_pinned(uint64_t units) {
  const size_t nbytes = std::max(chunk_bytes_, units * frame::kUnitBytes);
  BlockPtr block = nbytes <= kLongest ? pinned_->allocate(nbytes) : nullptr;
  if (block && (!block->pinned() || block->data() == nullptr)) {
    block.reset();  // the device cannot reach it
  }
  std::string refusal;
  std::shared_ptr<Chunk> chunk;
  if (block) {
    order_after(block->uses(), encode_stream_);
    chunk = add(kBefore, std::move(block), refusal);
  }
  pins_ = chunk != nullptr;
  return chunk;
}

std::shared_ptr<Arena::Chunk> Arena::grow(uint64_t units, std::string& refusal) {
  const size_t reserved = reserved_bytes();
  const size_t least = units * frame::kUnitBytes + kBefore;
  const size_t left = budget_bytes_ - std::min(budget_bytes_, reserved);
  if (least > left || least > kLongest) {
    refusal = "the arena has no room for the worst case of " + std::to_string(least) +
              " bytes: " + std::to_string(reserved) + " of " + std::to_string(budget_bytes_) +
              " bytes are taken from the device";
    return nullptr;
  }
  return add(std::min({std::max(chunk_bytes_, least), left, kLongest}), nullptr, refusal);
}

std::shared_ptr<Arena::Chunk> Arena::add(size_t device_bytes, BlockPtr pinned,
                                         std::string& refusal) {
  std::shared_ptr<Chunk> chunk;
  try {
    const c10::StreamGuard guard(encode_stream_);
    chunk = std::make_shared<Chunk>(streams_, streams_->new_bytes(device_bytes), std::move(pinned),
                                    encode_stream_);
  } catch (const c10::OutOfMemoryError& error) {
    refusal =
        "the device has no memory for the arena: " + std::string(error.what_without_backtrace());
    return nullptr;
  }
  set_back(*chunk);
  chunks_.push_back(chunk);
  return chunk;
}

void Arena::set_budget(size_t bytes) {
  const std::lock_guard lock(mutex_);
  budget_bytes_ = bytes;
  pins_ = pinned_ && !planned_;
}

void Arena::set_room(size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    budget_bytes_ = chunk_bytes_ = bytes;
    planned_ = true;
    pins_ = false;
    const bool fits = std::all_of(chunks_.begin(), chunks_.end(), [&](const auto& chunk) {
      return chunk->bytes.nbytes() == bytes;
    });
    if (fits && chunks_.size() <= 1) {
      return;
    }
  }
  trim();
}

void Arena::set_chunk(size_t bytes) {
  const std::lock_guard lock(mutex_);
  chunk_bytes_ = bytes;
  planned_ = false;
  pins_ = pinned_ != nullptr;
}

bool Arena::could_hold(uint64_t units) const {
  const std::lock_guard lock(mutex_);
  return units * frame::kUnitBytes + kBefore <= budget_bytes_;
}

size_t Arena::trim() {
  std::vector<std::shared_ptr<Chunk>> freed;  // destroyed outside the lock
  const WithoutGil without_gil;
  const std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
    if ((*chunk)->live > 0) {
      ++chunk;
      continue;
    }
    bytes += (*chunk)->bytes.nbytes();
    freed.push_back(std::move(*chunk));
    chunk = chunks_.erase(chunk);
  }
  return bytes;
}

size_t Arena::reserved_bytes() const {
  size_t bytes = 0;
  for (const auto& chunk : chunks_) {
    bytes += chunk->bytes.nbytes();
  }
  return bytes;
}

Arena::Statistics Arena::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics statistics{.budget_bytes = budget_bytes_,
                        .reserved_bytes = reserved_bytes(),
                        .chunks = chunks_.size(),
                        .resets = resets_,
                        .refusals = refusals_};
  for (const auto& chunk : chunks_) {
    statistics.pinned_bytes += chunk->pinned ? chunk->pinned->nbytes() : 0;
    statistics.set_aside_bytes += chunk->spent * frame::kUnitBytes;
    statistics.live_shares += chunk->live;
  }
  return statistics;
}

}  // namespace memswap
