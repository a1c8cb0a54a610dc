// Batch: what one block of a group saved, moved when it is told to.
//
// An engine whose schedule is batches holds what would leave, and its entry joins the batch that
// saves it. From then on the owner of the batch says when it leaves and when it returns.
//
// [Note: Groups hold nothing]
// Autograd's handles own entries and batches; a batch refers to its entries weakly. A graph that is
// consumed or dropped takes everything with it, whatever state its batch is in. Letting go of a
// storage means dropping the group's reference: nothing is resized, so a storage that a parameter,
// a layer's output, another group or the user still holds stays as it is, and its load costs
// nothing.
//
// [Note: When storages travel together]
// A copy costs the host a block, an event, a ticket and a launch, some 10 microseconds together,
// and the link another few, whatever its length; at 50 GB/s that is the time of half a megabyte. So
// storages of at most `BatchLimits::small_bytes` are gathered, on the stream that computes, into
// one storage of at most `bucket_bytes`, and that one is sent (bucket.h). Gathering reads and
// writes them once in device memory, at some fiftieth of what the link takes for them, and then
// they are free, before the link has begun. Nothing is scattered on the way back: the returned
// storages are parts of the memory that was fetched, which therefore lives as long as the last of
// them. (The threshold follows from these numbers; it was not measured on a GPU.)
//
// Larger storages gain nothing from it. They would be read and written once more, and the gathered
// copy would take memory beside them until it has left.
//
// [Note: Recipes in a batch]
// A storage that has a recipe leaves as one, when its batch does: until then its entry holds it
// like any other, and what the recipe reads is kept. A load brings back what the recipes of the
// batch read and no result of theirs: these are computed when backward demands them, and let go of
// afterwards. What made what is known within one batch; a batch that begins in another one's block,
// or on another thread, has that forgotten.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine.h"

namespace memswap {

// A call that a batch's phase does not allow, in words for the user.
struct BatchError : std::logic_error {
  using std::logic_error::logic_error;
};

// Any order of calls is legal in which nothing is waited for that was not launched and nothing is
// loaded that was not offloaded; each call may be repeated. Loading may follow at once, before the
// offload was waited for: what has not gone away yet then stays. After a load everything may be
// offloaded again, which copies nothing. Calls order the calling thread's current stream and are
// ordered behind it. They take the engine's lock.
class Batch : public std::enable_shared_from_this<Batch> {
 public:
  // How far it has come. What backward has read and let go of is offloaded again.
  enum class Phase : uint8_t { kCollected, kOffloading, kOffloaded, kLoading, kLoaded };

  // `name`: its group's, for messages. `iteration`: of what it saves.
  Batch(EnginePtr engine, std::string name, IterationPtr iteration)
      : name(std::move(name)), iteration(std::move(iteration)), engine_(std::move(engine)) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  Phase phase() const { return phase_; }
  bool launched() const { return phase_ != Phase::kCollected; }  // its offload was
  std::string described() const;
  // Whether any of its saved tensors may still be demanded.
  bool alive() const;
  // Of the storages that it can move.
  int64_t nbytes() const;

  // Starts sending the storages away. The forward may still use them. Throws BatchError.
  void launch_offload();
  // Orders the caller behind the send, and frees the memory of the storages that were sent. Throws
  // BatchError: nothing was launched.
  void wait_offload();
  // Starts bringing the storages back, each into memory of the calling thread's stream. Once a
  // backward pass has read some and let go of them, they may be loaded again for another.
  // `readings`: how many backward passes will read them before they are let go of again: 2 where
  // gradients of inputs and of weights are computed apart. What there is no memory for is left to
  // its demand, or to the next call. Throws BatchError: nothing was offloaded.
  void launch_load(int64_t readings = 1);
  // Orders the caller's stream behind the load, so that it may use the storages. Throws BatchError:
  // no load was launched; and LostBytes.
  void wait_load();
  // Nobody may call it any more. What is away still returns when backward demands it.
  void close() { closed_ = true; }

  // An entry was saved by the block of this batch. The caller holds the engine's lock.
  void join(const EntryPtr& entry);
  // A save of this batch is about to be demanded. Takes the lock, unlike `join`.
  void notice_demand(const EntryPtr& entry);

  const std::string name;
  const IterationPtr iteration;
  // Called, without the engine's lock, when a backward pass first demands one of its storages;
  // once, also if it raises.
  std::function<void()> on_demand;

 private:
  void send_all();
  void fetch_all(int64_t readings);
  std::vector<EntryPtr> living() const;
  bool first_in_backward(const Entry& entry);
  void check_open(const char* call) const;
  [[noreturn]] void refuse(const char* call, const char* found, const char* expected) const;

  const EnginePtr engine_;
  Phase phase_ = Phase::kCollected;
  std::vector<std::weak_ptr<Entry>> entries_;  // in the order of saving
  std::set<std::weak_ptr<Entry>, std::owner_less<>> joined_;
  std::optional<int> read_by_;  // the backward pass that demanded last
  bool lacks_memory_ = false;   // the last load left storages where they are
  bool closed_ = false;
};
using BatchPtr = std::shared_ptr<Batch>;

// A phase as messages name it.
const char* word_of(Batch::Phase phase);

}  // namespace memswap
