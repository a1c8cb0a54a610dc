// Which storages an engine knows, and what it counts.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

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

  Found find(const SavedView& view);
  bool knows(const void* key) const { return known_.contains(key); }
  size_t known_storages() const { return known_.size(); }
  int64_t resident_bytes() const { return counters.resident_bytes; }

  // A tensor stays, for a reason.
  void keep(std::string_view reason, int64_t nbytes);
  const KeptByReason& kept() const { return kept_; }

  // Something costs memory but not correctness: the user is warned, once for each reason.
  // [Note: Warnings come last] Who warns runs the user's filters, which may make an exception of
  // it. So a message waits until `tell`, which each call that the user or autograd makes ends with:
  // what the call does is done by then, and the exception loses nothing.
  void tell_once(std::string_view reason, const std::string& message);
  void tell() {
    if (!untold_.empty()) {
      warn_untold();
    }
  }

  // Counts anew. What is resident and away stays known.
  void reset();

  Counters counters;
  std::function<void(const std::string&)> warn;  // what `tell` does; empty: nobody is told

 private:
  struct Row {
    std::weak_ptr<Known> known;
    const Known* address;
    c10::VariableVersion counter;
    uint32_t version;
    size_t begin, end;  // what was saved of it: the first byte, and the one behind the last
    uint64_t node;      // by which node
    bool stays;
  };

  void warn_untold();

  std::unordered_map<const void*, Row> known_;  // by the address of the storage
  KeptByReason kept_;
  std::set<std::string, std::less<>> told_;  // reasons, of messages that may wait yet
  std::deque<std::string> untold_;           // messages
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
