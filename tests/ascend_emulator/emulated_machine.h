// The machine that emulated launches run on, as the tests set it up.
#pragma once

#include <functional>
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
  bool dies = true;  // of a broken rule on a stream, where nobody is to catch what is thrown

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

// What the compiler was told that a kernel's buffers take of UB (kUnifiedBytes), where it has most:
// an encoder, and a decoder for frames of a layout when it has nothing to report.
uint32_t encoder_unified_bytes(const std::string& kernel);
uint32_t decoder_unified_bytes(const std::string& kernel, uint32_t layout);

// Device memory of a launch. What a kernel may touch, and the part of it that is known to be
// touched.
using Spans = std::vector<memswap_emulated_span>;

inline void add(Spans& spans, const void* begin, uint64_t bytes, int write) {
  if (begin != nullptr && bytes != 0) {
    spans.push_back({begin, bytes, write});
  }
}

// Launches `run` as a kernel; returns 0 or the runtime's error.
uint32_t start(const char* kernel, uint32_t blocks, void* stream, const Spans& known, Spans memory,
               std::function<void()> run);

}  // namespace ascend_emulator
