// Host: what an engine asks of those who set it up. None of it is called where a plan is followed.
#pragma once

#include <cstddef>
#include <string_view>

#include "entry.h"
#include "transfers.h"

namespace memswap {

class Host {
 public:
  Host() = default;
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  virtual ~Host() = default;

  // --- where codec work waits for windows (`Schedule::kWindows`) ---

  // A storage is to be encoded: let it wait.
  virtual void defer(const EntryPtr& entry, const StorageRefPtr& storage, const LeaveOrder& order,
                     const Expectation& expectation) = 0;
  // What is demanded next is wanted: bring it back in time.
  virtual void look_ahead(const IterationPtr& iteration, size_t index) = 0;

  // The room of an entry that waits is needed: send it now. Nothing is waited for here.
  virtual void hurry(const EntryPtr& entry) = 0;

  // --- the director's (`Engine::directed`) ---

  // A unit saves a storage that was saved before.
  virtual void again(const EntryPtr& entry, std::string_view unit) = 0;
  // Backward asks for a storage; backward has it, in stream order.
  virtual void demanding(const EntryPtr& entry) = 0;
  virtual void demanded(const EntryPtr& entry) = 0;
  // A storage was to leave, and its pool is full; or it did not become a frame of the bytes that
  // the plan has for it.
  virtual void no_room() = 0;
  virtual void unfit() = 0;
};

// Nobody is asked.
class NoHost final : public Host {
 public:
  void defer(const EntryPtr&, const StorageRefPtr&, const LeaveOrder&,
             const Expectation&) override {}
  void look_ahead(const IterationPtr&, size_t) override {}
  void hurry(const EntryPtr&) override {}
  void again(const EntryPtr&, std::string_view) override {}
  void demanding(const EntryPtr&) override {}
  void demanded(const EntryPtr&) override {}
  void no_room() override {}
  void unfit() override {}
};

}  // namespace memswap
