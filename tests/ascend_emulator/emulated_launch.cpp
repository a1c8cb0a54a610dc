// Launches as CANN provides them, on the emulator.
#include "emulated_launch.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "emulated_machine.h"

namespace ascend_emulator {

Machine& machine() {
  static Machine only;
  return only;
}

namespace {

// A launch on its way: what runs, and the memory that the kernel may touch.
struct Launch {
  std::string kernel;
  uint32_t blocks;
  Spans memory;
  std::function<void()> run;
};

void execute(const Launch& launch) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  struct Lent {
    ~Lent() { memory().take_back(); }
  } lent;
  for (const memswap_emulated_span& span : launch.memory) {
    memory().lend(const_cast<void*>(span.begin), span.bytes);
  }
  ascend_emulator::launch(launch.blocks, machine().options, launch.run);
}

void execute_or_die(void* context) {
  const Launch& launch = *static_cast<Launch*>(context);
  try {
    execute(launch);
  } catch (const std::exception& broken) {
    if (!machine().dies) {
      throw;
    }
    std::fprintf(stderr, "%s breaks a rule of the device: %s\n", launch.kernel.c_str(),
                 broken.what());
    std::abort();
  }
}

}  // namespace

uint32_t start(const char* kernel, uint32_t blocks, void* stream, const Spans& known, Spans memory,
               std::function<void()> run) {
  if (const int error = machine().fail(kernel); error != 0) {
    return static_cast<uint32_t>(error);
  }
  {
    static std::mutex recording;
    const std::lock_guard lock(recording);
    machine().launches.push_back({kernel, blocks});
  }
  auto launch = std::make_unique<Launch>(Launch{kernel, blocks, std::move(memory), std::move(run)});
  if (machine().stream == nullptr) {
    execute(*launch);
    return 0;
  }
  return static_cast<uint32_t>(machine().stream(
      stream, kernel, known.data(), known.size(), &execute_or_die,
      [](void* context) { delete static_cast<Launch*>(context); }, launch.release()));
}

}  // namespace ascend_emulator

extern "C" void memswap_ascend_emulate(memswap_emulated_stream on) {
  ascend_emulator::machine().stream = on;
}
