// Host: what an engine asks of those who set it up. None of it is called where a plan is followed.
#pragma once

#include <cstddef>
#include <string_view>

#include "entry.h"

namespace memswap {

class Host {
 public:
  Host() = default;
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  virtual ~Host() = default;

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
  void again(const EntryPtr&, std::string_view) override {}
  void demanding(const EntryPtr&) override {}
  void demanded(const EntryPtr&) override {}
  void no_room() override {}
  void unfit() override {}
};

}  // namespace memswap
