// Memory for the payloads that do not fit their frames.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lane/device_streams.h"
#include "memswap/frame.h"
#include "pool/pool.h"

namespace memswap {

// [Note: Credits]
// An encoder learns how long a payload is when it has made it, long after the host has let go of
// the original. So that it never finds no room, the host sets the worst case aside before the
// launch: each frame holds a share of one chunk, and the shares of a chunk never add up to more
// than it has. The encoder takes what it needs from the chunk's cursor, on the device. When the
// host learns how much that was, the share shrinks to it; a frame that took nothing gives its share
// back whole. The cursor only moves forward: what a frame took is free again when all of the chunk
// is, that is when the last share is dropped. Then the next encode that finds no room elsewhere
// sets the cursor back, on its own stream, behind the last decode that read from the chunk.
//
// A host that is a forward ahead has set aside as much as all frames of a forward could save. Where
// a codec's kernels reach pinned memory, the chunks are there, and the device has their cursors
// alone: a frame hardly ever takes anything of its share, so the link carries next to nothing, and
// the host waits for no header. The device's own memory serves where no more can be pinned, within
// a budget.
//
// Thread-safe. The device's memory belongs to the encode stream, which alone allocates it and gets
// it back, behind the last decode that read from it: whoever drops a chunk last, it orders that
// itself. Pinned memory goes back to its pool behind the same.
class Arena : public std::enable_shared_from_this<Arena> {
 private:
  struct Chunk;

 public:
  // Where an encoder puts what does not fit, as memswap_encode_job has it. Owned by the frame,
  // which may go while work on it is under way: what comes next in the chunk is ordered behind
  // that.
  class Reading;

  class Share {
   public:
    Share(std::shared_ptr<Arena> arena, std::shared_ptr<Chunk> chunk, uint64_t units);
    ~Share();

    void* memory() const;
    uint64_t capacity() const;  // units
    uint64_t* cursor() const;
    uint64_t units() const;         // set aside, or taken once that is known
    uint64_t device_units() const;  // the same, of the device's memory

    // The encoder took `used` units. Without any, the share has no memory any more.
    void settle(uint64_t used);

    // The encoder never ran.
    void cancel() { settle(0); }

    // For a decode: of nothing, if the encoder is known to have taken nothing.
    Reading read() const;

   private:
    const std::shared_ptr<Arena> arena_;
    std::shared_ptr<Chunk> chunk_;  // guarded by the arena's mutex once the encode was submitted,
    uint64_t units_;                // like what follows
    bool settled_ = false;
  };

  // A decode that is being submitted. The memory stays as it is, whatever the host learns
  // meanwhile.
  class Reading {
   public:
    Reading() = default;  // of nothing
    Reading(std::shared_ptr<Arena> arena, std::shared_ptr<Chunk> chunk);
    Reading(Reading&& other) = default;
    Reading& operator=(Reading&&) = delete;
    ~Reading();

    const void* memory() const;  // nullptr: nothing
    uint64_t capacity() const;   // units

    // The decode was submitted to `stream`, the only one that decodes.
    void submitted(c10::Stream stream);

   private:
    std::shared_ptr<Arena> arena_;
    std::shared_ptr<Chunk> chunk_;
  };

  struct Statistics {
    size_t budget_bytes = 0;
    size_t reserved_bytes = 0;  // taken from the device
    size_t pinned_bytes = 0;    // of the host
    size_t set_aside_bytes = 0;
    size_t chunks = 0;
    size_t live_shares = 0;
    size_t resets = 0;
    size_t refusals = 0;
  };

  // Chunks of at least `chunk_bytes`: in `pinned`, and where that refuses, or is nullptr, on the
  // device, there `budget_bytes` together.
  Arena(std::shared_ptr<DeviceStreams> streams, c10::Stream encode_stream, size_t budget_bytes,
        size_t chunk_bytes, std::shared_ptr<Pool> pinned = nullptr);

  // A share of `units` units for the next encode on the encode stream, or nullptr and a reason.
  std::shared_ptr<Share> reserve(uint64_t units, std::string& refusal);

  // A lower budget takes nothing away from live shares; chunks beyond it go with trim(). Asks a
  // pool that has refused again.
  void set_budget(size_t bytes);

  // From now on one chunk of exactly so many bytes of the device, as soon as nobody has a share of
  // another one.
  void set_room(size_t bytes);

  // Chunks of at least so many bytes again, pinned ones as well.
  void set_chunk(size_t bytes);

  // Bytes of the device that a chunk takes beside its units.
  static constexpr size_t kBefore = frame::kAlignmentBytes;

  // Whether the device has a share of `units` if nobody else has one.
  bool could_hold(uint64_t units) const;

  // Frees the chunks that nobody has a share of. Returns their bytes of the device.
  size_t trim();

  Statistics statistics() const;

 private:
  struct Chunk {
    Chunk(std::shared_ptr<DeviceStreams> streams, at::Tensor bytes, BlockPtr pinned,
          c10::Stream owner);
    ~Chunk();

    void order_behind_reads();
    std::byte* memory() const;

    const std::shared_ptr<DeviceStreams> streams;
    const at::Tensor bytes;  // the cursor, then the memory, if it is not
    const BlockPtr pinned;
    const c10::Stream owner;
    const uint64_t capacity;
    uint64_t spent = 0;  // units: no encode submitted so far gets the cursor beyond
    size_t live = 0;     // shares that may point into it, and decodes that are being submitted
    bool read = false;   // since the cursor was set back
    c10::Event last_read;
  };

  std::shared_ptr<Chunk> find_room(uint64_t units, bool pinned);
  std::shared_ptr<Chunk> grow_pinned(uint64_t units);
  std::shared_ptr<Chunk> grow(uint64_t units, std::string& refusal);
  std::shared_ptr<Chunk> add(size_t device_bytes, BlockPtr pinned, std::string& refusal);
  void set_back(Chunk& chunk);
  size_t reserved_bytes() const;

  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream encode_stream_;
  const std::shared_ptr<Pool> pinned_;
  size_t chunk_bytes_;
  bool planned_ = false;      // whether a room was set
  bool pins_;                 // whether the pool is asked: no room was set, and it has not refused
  mutable std::mutex mutex_;  // the GIL is not held: [Note: No lock while holding the GIL]
  size_t budget_bytes_;
  std::vector<std::shared_ptr<Chunk>> chunks_;
  size_t resets_ = 0;
  size_t refusals_ = 0;
};

}  // namespace memswap
