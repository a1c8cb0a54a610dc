// Which storages an engine knows, and what it counts.
#pragma once

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "counters.h"
#include "storage/saved_view.h"

namespace memswap {

// An object that stands for a storage: an Entry (entry.h), or a Stay. Owned by handles.
class Known {
 public:
  Known() = default;
  Known(const Known&) = delete;
  Known& operator=(const Known&) = delete;
  virtual ~Known() = default;

  // Whether it is an Entry, whose storage may leave.
  virtual bool is_entry() const { return false; }
};
using KnownPtr = std::shared_ptr<Known>;

// [Note: Warnings come last]
// To warn is to run the user's code: filters, which may make an exception of the warning, and
// handlers, which may ask memswap something. So a message waits until what the calling thread is
// doing is done and no lock is held (Engine::tell): a save or a demand of autograd's, a batch's
// call, what asks for statistics or a plan. An exception loses nothing then.

// The engine's lock serialises the calls.
class Ledger {
 public:
  struct Kept {
    int64_t tensors = 0;
    int64_t nbytes = 0;
  };
  using KeptByReason = std::map<std::string, Kept, std::less<>>;

  struct Found {
    KnownPtr known;  // nullptr: nobody stands for this storage with this content
    // The storage is known with another content, or left before anybody saved this part of it: the
    // tensor has to stay.
    bool conflicts = false;
  };

  Ledger() = default;
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // From here on `known` stands for the storage that a view looks at, with the content that it has
  // now; until `forget`, which it calls before another storage can have that address. A Stay stands
  // for it whatever the content: each save of it keeps its own tensor.
  void remember(const SavedView& view, const KnownPtr& known);
  void forget(const void* key, const Known* known);

  // The storage that an entry has back is memswap's own: it is counted, and a save of it is a new
  // one. Until `forget`.
  void note_fetched(const void* key) { fetched_.insert(key); }

  Found find(const SavedView& view);
  bool knows(const void* key) const { return known_.contains(key); }
  // Whether the bytes of a storage are counted already, by who stands for it.
  bool counts(const void* key) const { return knows(key) || fetched_.contains(key); }
  size_t known_storages() const { return known_.size(); }
  int64_t resident_bytes() const { return counters.resident_bytes; }

  // A tensor stays, for a reason.
  void keep(std::string_view reason, int64_t nbytes);
  const KeptByReason& kept() const { return kept_; }

  // Something costs memory but not correctness: the user is to be warned, once for each reason
  // ([Note: Warnings come last]).
  void tell_once(std::string_view reason, const std::string& message);
  // Whether there are messages that wait. Needs no lock.
  bool has_untold() const { return has_untold_.load(std::memory_order_relaxed); }
  // The oldest of them, which waits no more.
  std::optional<std::string> take_untold();

  // A device had no memory for what was to come back ahead of its demand, or had it. To ask in vain
  // is dear: torch's allocator gives all that it has cached back to the driver. So after the first
  // time the next look ahead asks again, and after each further one twice as many, up to
  // `kMostLooks`, pass without asking.
  void note_full() {
    looks_ = std::exchange(next_looks_, std::min(2 * next_looks_ + 1, kMostLooks));
  }
  void note_room() { looks_ = next_looks_ = 0; }
  // Whether a look ahead passes without asking.
  bool passes_look() { return looks_ > 0 && looks_-- > 0; }

  // Counts anew. What is resident and away stays known.
  void reset();

  Counters counters;
  std::function<void(const std::string&)> warn;  // empty: nobody is to be told

 private:
  static constexpr int kMostLooks = 7;

  struct Row {
    std::weak_ptr<Known> known;
    const Known* address;
    c10::VariableVersion counter;
    uint32_t version;
    size_t begin, end;  // what was saved of it: the first byte, and the one behind the last
    uint64_t node;      // by which node
    bool stays;
  };

  std::unordered_map<const void*, Row> known_;  // by the address of the storage
  std::unordered_set<const void*> fetched_;     // of storages that entries have back
  KeptByReason kept_;
  std::set<std::string, std::less<>> told_;  // reasons, of messages that may wait yet
  std::deque<std::string> untold_;           // messages
  std::atomic<bool> has_untold_{false};
  int looks_ = 0, next_looks_ = 0;
};

// A storage that stays for good: known, and counted once, however often it is saved.
class Stay final : public Known {
 public:
  static std::shared_ptr<Stay> make(std::shared_ptr<Ledger> ledger, const SavedView& view);
  ~Stay() override;

 private:
  Stay(std::shared_ptr<Ledger> ledger, const SavedView& view);

  const std::shared_ptr<Ledger> ledger_;
  const void* const key_;
  const int64_t nbytes_;
};

}  // namespace memswap
