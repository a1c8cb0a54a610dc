// Host: what an engine asks of those who set it up. None of it is called where a plan is followed.
#pragma once

#include <cstddef>

#include "entry.h"

namespace memswap {

class Host {
 public:
  Host() = default;
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  virtual ~Host() = default;

  // Encoders may have reported (`Engine::awaits_reports`): take that in.
  virtual void learn() = 0;

  // What is demanded next is wanted (unless `Engine::looks_ahead`): bring it back in time.
  virtual void look_ahead(const IterationPtr& iteration, size_t index) = 0;

  // The room of an entry that waits is needed: send it now. Nothing is waited for here.
  virtual void hurry(const EntryPtr& entry) = 0;
};

// Nobody is asked.
class NoHost final : public Host {
 public:
  void learn() override {}
  void look_ahead(const IterationPtr&, size_t) override {}
  void hurry(const EntryPtr&) override {}
};

}  // namespace memswap
