// Running a kernel as a grid of blocks.
#pragma once

#include <algorithm>
#include <numeric>

#include "core.h"

namespace ascend_emulator {

// Device memory of this process.
inline GlobalMemory& memory() {
  static GlobalMemory global;
  return global;
}

// Blocks run one after another in a seeded order: what two of them do to the same byte of GM is an
// error whatever the order, so running them at once would show nothing more.
template <class Kernel>
void launch(uint32_t blocks, const Options& options, Kernel kernel) {
  if (blocks == 0) {
    violate("launch", "EMU_LAUNCH", "0 blocks");
  }
  std::vector<uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(options.seed + 0x51ed);
  std::shuffle(order.begin(), order.end(), random);
  memory().begin_launch();
  if (options.tally != nullptr) {
    options.tally->vector_repeats.push_back(0);
  }
  for (const uint32_t block : order) {
    Core core(memory(), options, static_cast<int>(block), static_cast<int>(blocks));
    struct Current {
      explicit Current(Core* core) { current_core() = core; }
      ~Current() { current_core() = nullptr; }
    } current(&core);
    kernel();
    core.finish();
  }
}

}  // namespace ascend_emulator

// EMU_LAUNCH(kernel, blocks, options, arguments...)
#define EMU_LAUNCH(kernel, blocks, options, ...) \
  ::ascend_emulator::launch(blocks, options, [&] { kernel(__VA_ARGS__); })
