#include "arena.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "memswap/frame.h"
#include "work/without_gil.h"

namespace memswap {
namespace {

// The cursor stands in the last 8 of the bytes before the memory.
constexpr size_t kCursor = Arena::kBefore - sizeof(uint64_t);

}  // namespace

Arena::Chunk::Chunk(at::Tensor memory, c10::Stream owner)
    : bytes(std::move(memory)),
      owner(owner),
      capacity((bytes.nbytes() - kBefore) / frame::kUnitBytes),
      last_read(bytes.device().type()) {}

Arena::Chunk::~Chunk() {
  try {
    order_behind_reads();
  } catch (const std::exception&) {
    // A device that is lost orders nothing, and nothing runs on it that could use the memory.
  }
}

void Arena::Chunk::order_behind_reads() {
  if (std::exchange(read, false)) {
    last_read.block(owner);
  }
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

void* Arena::Share::memory() const {
  return static_cast<std::byte*>(chunk_->bytes.mutable_data_ptr()) + kBefore;
}

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

const void* Arena::Reading::memory() const {
  return chunk_ ? static_cast<const std::byte*>(chunk_->bytes.const_data_ptr()) + kBefore : nullptr;
}

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
             size_t chunk_bytes)
    : streams_(std::move(streams)),
      encode_stream_(encode_stream),
      chunk_bytes_(chunk_bytes),
      budget_bytes_(budget_bytes) {}

std::shared_ptr<Arena::Share> Arena::reserve(uint64_t units, std::string& refusal) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Chunk> chunk = find_room(units);
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

std::shared_ptr<Arena::Chunk> Arena::find_room(uint64_t units) {
  for (const auto& chunk : chunks_) {
    if (chunk->capacity - chunk->spent >= units) {
      return chunk;
    }
  }
  for (const auto& chunk : chunks_) {
    if (chunk->live == 0 && chunk->capacity >= units) {
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

std::shared_ptr<Arena::Chunk> Arena::grow(uint64_t units, std::string& refusal) {
  const size_t reserved = reserved_bytes();
  const size_t least = units * frame::kUnitBytes + kBefore;
  const size_t left = budget_bytes_ - std::min(budget_bytes_, reserved);
  const size_t longest = uint64_t{frame::kMaxBaseUnits} * frame::kUnitBytes;
  if (least > left || least > longest) {
    refusal = "the arena has no room for the worst case of " + std::to_string(least) +
              " bytes: " + std::to_string(reserved) + " of " + std::to_string(budget_bytes_) +
              " bytes are taken from the device";
    return nullptr;
  }
  const size_t nbytes = std::min({std::max(chunk_bytes_, least), left, longest});
  std::shared_ptr<Chunk> chunk;
  try {
    const c10::StreamGuard guard(encode_stream_);
    chunk = std::make_shared<Chunk>(streams_->new_bytes(nbytes), encode_stream_);
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
}

void Arena::set_room(size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    budget_bytes_ = chunk_bytes_ = bytes;
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
    statistics.set_aside_bytes += chunk->spent * frame::kUnitBytes;
    statistics.live_shares += chunk->live;
  }
  return statistics;
}

}  // namespace memswap
