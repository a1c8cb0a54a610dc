// Tickets and slabs that do what a test tells them.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pool/slab_source.h"
#include "work/ticket.h"

namespace memswap::testing {

// Done when the test says so. Counts how often it was asked.
class FakeTicket final : public Ticket {
 public:
  explicit FakeTicket(bool done = false) : done_(done) {}
  ~FakeTicket() override {
    if (at_end) {
      at_end();
    }
  }

  void wait() override {}
  bool done() override {
    ++asked;
    if (at_done) {
      at_done();
    }
    return done_;
  }
  void synchronize() override {
    ++synchronized;
    done_ = true;
  }
  void end() { done_ = true; }

  std::function<void()> at_end;
  std::function<void()> at_done;
  std::atomic<int> asked{0};
  std::atomic<int> synchronized{0};

 private:
  std::atomic<bool> done_;
};

class FakeSlab final : public Slab {
 public:
  using AtForget = std::function<void(size_t offset, size_t nbytes)>;

  FakeSlab(size_t size, AtForget at_forget) : bytes_(size), at_forget_(std::move(at_forget)) {}
  size_t size() const override { return bytes_.size(); }
  void* data() const override { return const_cast<std::byte*>(bytes_.data()); }
  void write(size_t offset, const void* source, size_t nbytes) override {
    std::memcpy(bytes_.data() + offset, source, nbytes);
  }
  void read(size_t offset, void* destination, size_t nbytes) override {
    std::memcpy(destination, bytes_.data() + offset, nbytes);
  }
  void forget(size_t offset, size_t nbytes) override {
    if (at_forget_) {
      at_forget_(offset, nbytes);
    }
  }

 private:
  std::vector<std::byte> bytes_;
  const AtForget at_forget_;
};

// A source of memory that can be told to fail and to take its time.
class FakeSlabs final : public SlabSource {
 public:
  SlabResult acquire(size_t nbytes) override {
    {
      const std::lock_guard lock(mutex_);
      asked_for.push_back(nbytes);
    }
    if (at_acquire) {
      at_acquire();
    }
    if (fail || nbytes > most) {
      throw std::runtime_error("no more memory can be pinned");
    }
    auto slab = std::make_unique<FakeSlab>(nbytes, at_forget);
    ++live;
    slab->attach(std::shared_ptr<void>(nullptr, [live = &live](void*) { --*live; }));
    return {std::move(slab), {}};
  }
  void trim() override { ++trimmed; }

  std::atomic<bool> fail{false};
  size_t most = ~size_t{0};  // bytes of the longest slab there is
  std::function<void()> at_acquire;
  FakeSlab::AtForget at_forget;  // of slabs that are acquired from then on
  std::vector<size_t> asked_for;
  std::atomic<int> live{0};
  std::atomic<int> trimmed{0};

 private:
  std::mutex mutex_;
};

}  // namespace memswap::testing
