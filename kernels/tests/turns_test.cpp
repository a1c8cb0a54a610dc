// Turns are taken in their order, and no thread that sleeps is forgotten.
#include "turns.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace memswap::cpu {
namespace {

// Threads take numbers as an encode's take chunks; each waits for its turn, counts, and passes on.
// With `pause` each holds its turn so long that the others sleep.
void take_turns(uint32_t threads, uint32_t turns, std::chrono::microseconds pause) {
  Turns order;
  std::atomic<uint32_t> next{0};
  uint32_t taken = 0;  // by who has the turn
  std::atomic<uint32_t> wrong{0};
  std::vector<std::thread> workers;
  for (uint32_t i = 0; i < threads; ++i) {
    workers.emplace_back([&] {
      for (uint32_t turn; (turn = next.fetch_add(1)) < turns;) {
        order.wait_for(turn);
        wrong += taken != turn ? 1 : 0;
        ++taken;
        if (pause.count() != 0) {
          std::this_thread::sleep_for(pause);
        }
        order.pass_to(turn + 1);
      }
    });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  EXPECT_EQ(taken, turns);
  EXPECT_EQ(wrong, 0u);
}

TEST(Turns, AreTakenInTheirOrder) {
  take_turns(1, 1000, {});
  take_turns(2, 200000, {});
  take_turns(7, 50000, {});
}

TEST(Turns, WakeThreadsThatSleep) {
  take_turns(2, 500, std::chrono::microseconds(200));
  take_turns(7, 500, std::chrono::microseconds(200));
}

}  // namespace
}  // namespace memswap::cpu
