#include "engine.h"

#include "windows.h"

namespace memswap {

Engine::Engine(std::optional<int64_t> window_bytes, Schedule schedule)
    : schedule(schedule),
      windows(schedule == Schedule::kWindows ? std::make_unique<Windows>(*this) : nullptr),
      timeline(window_bytes),
      iteration(timeline.begin()) {}

Engine::~Engine() = default;

}  // namespace memswap
