// Device memory for the payloads that do not fit their frames.
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
// Thread-safe. The memory belongs to the encode stream, which alone allocates it and gets it back,
// behind the last decode that read from it: whoever drops a chunk last, it orders that itself.
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
    uint64_t units() const;  // set aside, or taken once that is known

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
    size_t set_aside_bytes = 0;
    size_t chunks = 0;
    size_t live_shares = 0;
    size_t resets = 0;
    size_t refusals = 0;
  };

  // Chunks of at least `chunk_bytes`, `budget_bytes` together.
  Arena(std::shared_ptr<DeviceStreams> streams, c10::Stream encode_stream, size_t budget_bytes,
        size_t chunk_bytes);

  // A share of `units` units for the next encode on the encode stream, or nullptr and a reason.
  std::shared_ptr<Share> reserve(uint64_t units, std::string& refusal);

  // A lower budget takes nothing away from live shares; chunks beyond it go with trim().
  void set_budget(size_t bytes);

  // From now on one chunk of exactly so many bytes, as soon as nobody has a share of another one.
  void set_room(size_t bytes);

  // Chunks of at least so many bytes again.
  void set_chunk(size_t bytes);

  // Bytes of the device that a chunk takes beside its units.
  static constexpr size_t kBefore = frame::kAlignmentBytes;

  // Whether a share of `units` could be had if nobody else had one.
  bool could_hold(uint64_t units) const;

  // Frees the chunks that nobody has a share of. Returns their bytes.
  size_t trim();

  Statistics statistics() const;

 private:
  struct Chunk {
    Chunk(at::Tensor memory, c10::Stream owner);
    ~Chunk();

    void order_behind_reads();

    const at::Tensor bytes;  // the cursor, then the memory
    const c10::Stream owner;
    const uint64_t capacity;
    uint64_t spent = 0;  // units: no encode submitted so far gets the cursor beyond
    size_t live = 0;     // shares that may point into it, and decodes that are being submitted
    bool read = false;   // since the cursor was set back
    c10::Event last_read;
  };

  std::shared_ptr<Chunk> find_room(uint64_t units);
  std::shared_ptr<Chunk> grow(uint64_t units, std::string& refusal);
  void set_back(Chunk& chunk);
  size_t reserved_bytes() const;

  const std::shared_ptr<DeviceStreams> streams_;
  const c10::Stream encode_stream_;
  size_t chunk_bytes_;
  mutable std::mutex mutex_;  // the GIL is not held: [Note: No lock while holding the GIL]
  size_t budget_bytes_;
  std::vector<std::shared_ptr<Chunk>> chunks_;
  size_t resets_ = 0;
  size_t refusals_ = 0;
};

}  // namespace memswap
