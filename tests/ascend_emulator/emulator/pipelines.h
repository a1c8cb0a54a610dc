// The pipes of one core: what is ordered, and execution in any order that the kernel's own
// synchronisation permits.
//
// Note [two proofs of order]
// Every operation is checked when it is issued: for each byte it touches, earlier accesses by any
// pipe that conflict must be known, by flags, queues or barriers, to have ended. That is exact and
// does not depend on luck. Besides, operations of V, MTE2 and MTE3 wait in a queue and run late, in
// a seeded order among the pipes: a kernel whose hazard the first proof did not know would give
// wrong bytes under some seed.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "footprint.h"
#include "violation.h"

enum pipe_t { PIPE_S = 0, PIPE_V = 1, PIPE_MTE2 = 2, PIPE_MTE3 = 3, PIPE_ALL = 4 };

namespace AscendC {
// Pairs of pipes that a vector core can order.
enum class HardEvent : uint8_t {
  S_V,
  V_S,
  S_MTE2,
  MTE2_S,
  S_MTE3,
  MTE3_S,
  V_MTE2,
  MTE2_V,
  V_MTE3,
  MTE3_V,
  MTE2_MTE3,
  MTE3_MTE2,
  // Of cube cores; a vector core has no such pipes.
  MTE1_M,
  M_MTE1,
  M_V,
  V_M
};
}  // namespace AscendC

namespace ascend_emulator {

inline constexpr int kPipes = 4;
inline constexpr int kEvents = 12;  // legal HardEvents come first in the enumeration
inline constexpr int kEventIds = 8;
inline constexpr int kUserEventIds = 6;  // 6 and 7 are reserved for the system
inline constexpr const char* kPipeNames[] = {"S", "V", "MTE2", "MTE3", "ALL"};
inline constexpr const char* kEventNames[] = {"S_V",    "V_S",    "S_MTE2",    "MTE2_S",
                                              "S_MTE3", "MTE3_S", "V_MTE2",    "MTE2_V",
                                              "V_MTE3", "MTE3_V", "MTE2_MTE3", "MTE3_MTE2"};
inline constexpr std::pair<pipe_t, pipe_t> kEventPipes[] = {
    {PIPE_S, PIPE_V},    {PIPE_V, PIPE_S},    {PIPE_S, PIPE_MTE2},    {PIPE_MTE2, PIPE_S},
    {PIPE_S, PIPE_MTE3}, {PIPE_MTE3, PIPE_S}, {PIPE_V, PIPE_MTE2},    {PIPE_MTE2, PIPE_V},
    {PIPE_V, PIPE_MTE3}, {PIPE_MTE3, PIPE_V}, {PIPE_MTE2, PIPE_MTE3}, {PIPE_MTE3, PIPE_MTE2}};

enum class Order : uint8_t { kEager, kLazy, kRandom };  // when queued operations run

class Pipelines {
 public:
  Pipelines(Order order, uint64_t seed, bool report_hazards, uint64_t unified_bytes)
      : order_(order),
        random_(seed),
        report_hazards_(report_hazards),
        unified_(unified_bytes / kBlockBytes) {}

  // PIPE_S runs at once; the others some time before something ordered behind them.
  void issue(pipe_t pipe, const std::string& name, const std::vector<Access>& accesses,
             std::function<void()> run) {
    ++issued_[pipe];
    names_[pipe].push_back(name);
    if (pipe == PIPE_S) {
      known_[PIPE_S][PIPE_S] = issued_[PIPE_S] - 1;
    }
    for (const Access& access : accesses) {
      check(pipe, name, access);
    }
    for (const Access& access : accesses) {
      record(pipe, access);
    }
    if (pipe == PIPE_S) {
      run();
      return;
    }
    queues_[pipe].push_back({std::move(run), -1, 0, false});
    step();
  }

  void set_flag(int event, int id) {
    const pipe_t from = kEventPipes[event].first;
    Clock clock = known_[from];
    clock[from] = issued_[from];
    flags_[event][id] = clock;
    if (from == PIPE_S) {
      ++arrived_[event][id];
    } else {
      queues_[from].push_back({nullptr, event, id, true});
      step();
    }
  }

  void wait_flag(int event, int id) {
    const pipe_t to = kEventPipes[event].second;
    for (int pipe = 0; pipe < kPipes; ++pipe) {
      known_[to][pipe] = std::max(known_[to][pipe], flags_[event][id][pipe]);
    }
    if (to == PIPE_S) {
      run_until("WaitFlag", [&] { return arrived_[event][id] > 0; });
      --arrived_[event][id];
    } else {
      queues_[to].push_back({nullptr, event, id, false});
      step();
    }
  }

  void barrier(pipe_t pipe) {
    if (pipe != PIPE_ALL) {
      known_[pipe][pipe] = issued_[pipe];
      return;
    }
    drain();
    for (Clock& clock : known_) {
      clock = issued_;
    }
  }

  // Waits, as the scalar unit, for everything that V was given; orders nothing.
  void run_vector() {
    run_until("reading a count of the vector unit", [&] { return queues_[PIPE_V].empty(); });
  }

  void drain() {
    run_until("the end of the kernel", [&] {
      return queues_[PIPE_V].empty() && queues_[PIPE_MTE2].empty() && queues_[PIPE_MTE3].empty();
    });
  }

 private:
  using Clock = std::array<uint32_t, kPipes>;  // per pipe, operations that have ended
  struct Queued {
    std::function<void()> run;  // null: a flag
    int event;
    int id;
    bool set;
  };
  struct Entry {
    uint32_t bytes;
    uint32_t sequence;
    pipe_t pipe;
    bool write;
    Atomic atomic;
  };

  std::vector<Entry>& entries(Space space, uint64_t block) {
    return space == Space::kUnified ? unified_[block] : global_[block];
  }

  void check(pipe_t pipe, const std::string& name, const Access& access) {
    if (!report_hazards_) {
      return;
    }
    for (const Touch& touch : access.footprint.touches) {
      for (const Entry& entry : entries(access.space, touch.block)) {
        if ((entry.bytes & touch.bytes) == 0 || !(entry.write || access.write) ||
            (entry.atomic != Atomic::kNone && entry.atomic == access.atomic) ||
            entry.sequence <= known_[pipe][entry.pipe]) {
          continue;
        }
        const char* kind = !access.write ? "reads what was written"
                           : entry.write ? "overwrites what was written"
                                         : "overwrites what was read";
        const bool same = entry.pipe == pipe;
        const std::string& other = names_[entry.pipe][entry.sequence - 1];
        violate("hazard", name, "on pipe ", kPipeNames[pipe], " ", kind, " by ", other, " on pipe ",
                kPipeNames[entry.pipe], " (operation ", entry.sequence,
                " of that pipe, known to have ended: ", known_[pipe][entry.pipe], ") at ",
                access.space == Space::kUnified ? "UB" : "GM", " address ",
                touch.block * kBlockBytes + first_byte(entry.bytes & touch.bytes), "; missing ",
                same ? "PipeBarrier<PIPE_" : "SetFlag/WaitFlag<", kPipeNames[entry.pipe],
                same ? "" : "_", same ? "" : kPipeNames[pipe], ">");
      }
    }
  }

  void record(pipe_t pipe, const Access& access) {
    for (const Touch& touch : access.footprint.touches) {
      std::vector<Entry>& list = entries(access.space, touch.block);
      // What this access covers is ordered before it, and so before all that will be ordered
      // behind it.
      for (size_t i = 0; i < list.size();) {
        const bool covered = (list[i].bytes & ~touch.bytes) == 0;
        if (covered && (access.write || (list[i].pipe == pipe && !list[i].write))) {
          list[i] = list.back();
          list.pop_back();
        } else {
          ++i;
        }
      }
      list.push_back({touch.bytes, issued_[pipe], pipe, access.write, access.atomic});
    }
  }

  static int first_byte(uint32_t bytes) {
    int i = 0;
    while ((bytes >> i & 1) == 0) {
      ++i;
    }
    return i;
  }

  bool runnable(int pipe) const {
    if (queues_[pipe].empty()) {
      return false;
    }
    const Queued& head = queues_[pipe].front();
    return head.run || head.set || arrived_[head.event][head.id] > 0;
  }

  bool run_one() {
    int candidates[kPipes];
    int count = 0;
    for (int pipe = PIPE_V; pipe < kPipes; ++pipe) {
      if (runnable(pipe)) {
        candidates[count++] = pipe;
      }
    }
    if (count == 0) {
      return false;
    }
    const int pipe = candidates[random_() % static_cast<unsigned>(count)];
    Queued head = std::move(queues_[pipe].front());
    queues_[pipe].pop_front();
    if (head.run) {
      head.run();
    } else {
      arrived_[head.event][head.id] += head.set ? 1 : -1;
    }
    return true;
  }

  template <class Condition>
  void run_until(const char* why, Condition done) {
    while (!done()) {
      if (!run_one()) {
        violate("event", why, "waits for a flag that is never set: the core would hang");
      }
    }
  }

  void step() {
    if (order_ == Order::kLazy) {
      return;
    }
    if (order_ == Order::kEager) {
      while (run_one()) {
      }
      return;
    }
    for (unsigned left = random_() % 4; left > 0 && run_one(); --left) {
    }
  }

  Order order_;
  std::mt19937_64 random_;
  bool report_hazards_;
  std::vector<std::vector<Entry>> unified_;
  std::unordered_map<uint64_t, std::vector<Entry>> global_;
  Clock issued_{};
  std::array<Clock, kPipes> known_{};
  std::array<std::vector<std::string>, kPipes> names_;
  std::array<std::deque<Queued>, kPipes> queues_;
  Clock flags_[kEvents][kEventIds]{};
  int arrived_[kEvents][kEventIds]{};
};

}  // namespace ascend_emulator
