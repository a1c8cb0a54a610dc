// The machine that emulated launches run on, as the tests set it up.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "emulated_launch.h"
#include "emulator/launch.h"

namespace ascend_emulator {

struct Machine {
  memswap_emulated_stream stream = nullptr;
  uint32_t cores = 40;
  Options options;

  // Kernels that were launched, and on how many blocks.
  std::vector<std::pair<std::string, uint32_t>> launches;

  // A call whose name ends so fails with this error, after `successes` that do not.
  std::string failing;
  int error = 0;
  int successes = 0;

  int fail(const std::string& call) {
    const bool named = !failing.empty() && call.size() >= failing.size() &&
                       call.compare(call.size() - failing.size(), failing.size(), failing) == 0;
    return named && successes-- <= 0 ? error : 0;
  }
};

Machine& machine();

}  // namespace ascend_emulator
