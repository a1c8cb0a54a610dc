#include "compute_modes.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>

namespace memswap {
namespace {

// The bit of a processor's control register by which results that are denormal become zero.
#if defined(__x86_64__)
constexpr uint32_t kFlushToZero = 1U << 15;
#elif defined(__aarch64__)
constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
#endif

struct Precision {
  at::Float32Backend backend;
  at::Float32Op op;
};
constexpr std::array kPrecisions = {
    Precision{at::Float32Backend::CUDA, at::Float32Op::MATMUL},
    Precision{at::Float32Backend::CUDA, at::Float32Op::CONV},
    Precision{at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
    Precision{at::Float32Backend::MKLDNN, at::Float32Op::CONV},
};

// By these torch chooses between its own kernels and a library's, whose bits differ: a CPU's gelu
// and norms are oneDNN's or not, a GPU's batch norm cuDNN's or not, attention one of four.
struct Switch {
  bool (at::Context::*get)() const;
  void (at::Context::*set)(bool);
};
constexpr std::array kSwitches = {
    Switch{&at::Context::userEnabledMkldnn, &at::Context::setUserEnabledMkldnn},
    Switch{&at::Context::deterministicMkldnn, &at::Context::setDeterministicMkldnn},
    Switch{&at::Context::userEnabledCuDNN, &at::Context::setUserEnabledCuDNN},
    Switch{&at::Context::deterministicCuDNN, &at::Context::setDeterministicCuDNN},
    Switch{&at::Context::benchmarkCuDNN, &at::Context::setBenchmarkCuDNN},
    Switch{&at::Context::userEnabledFlashSDP, &at::Context::setSDPUseFlash},
    Switch{&at::Context::userEnabledMemEfficientSDP, &at::Context::setSDPUseMemEfficient},
    Switch{&at::Context::userEnabledMathSDP, &at::Context::setSDPUseMath},
    Switch{&at::Context::userEnabledCuDNNSDP, &at::Context::setSDPUseCuDNN},
};
static_assert(kSwitches.size() == std::tuple_size_v<decltype(ComputeModes::switches)>);

// Torch sets the calling thread's mode and tells nobody what it is: the processor knows.
bool denormals_are_flushed() {
#if defined(__x86_64__)
  return (__builtin_ia32_stmxcsr() & kFlushToZero) != 0;
#elif defined(__aarch64__)
  uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return (control & kFlushToZero) != 0;
#else
  return false;  // where torch cannot set it either
#endif
}

void change(const ComputeModes& from, const ComputeModes& to) {
  at::Context& context = at::globalContext();
  if (from.threads != to.threads) {
    at::set_num_threads(to.threads);
  }
  if (from.deterministic != to.deterministic ||
      from.deterministic_warns != to.deterministic_warns) {
    context.setDeterministicAlgorithms(to.deterministic, to.deterministic_warns);
  }
  for (size_t which = 0; which < kPrecisions.size(); ++which) {
    if (from.float32_precisions[which] != to.float32_precisions[which]) {
      const auto [backend, op] = kPrecisions[which];
      context.setFloat32Precision(backend, op, to.float32_precisions[which]);
    }
  }
  for (size_t which = 0; which < kSwitches.size(); ++which) {
    if (from.switches[which] != to.switches[which]) {
      (context.*kSwitches[which].set)(to.switches[which]);
    }
  }
  if (from.flushes_denormals != to.flushes_denormals) {
    at::Context::setFlushDenormal(to.flushes_denormals);
  }
  if (from.default_dtype != to.default_dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(to.default_dtype));
  }
}

}  // namespace

ComputeModes ComputeModes::current() {
  const at::Context& context = at::globalContext();
  ComputeModes modes{.threads = at::get_num_threads(),
                     .deterministic = context.deterministicAlgorithms(),
                     .deterministic_warns = context.deterministicAlgorithmsWarnOnly(),
                     .flushes_denormals = denormals_are_flushed(),
                     .default_dtype = c10::get_default_dtype_as_scalartype()};
  for (size_t which = 0; which < kPrecisions.size(); ++which) {
    const auto [backend, op] = kPrecisions[which];
    modes.float32_precisions[which] = context.float32Precision(backend, op);
  }
  for (size_t which = 0; which < kSwitches.size(); ++which) {
    modes.switches[which] = (context.*kSwitches[which].get)();
  }
  return modes;
}

WithModes::WithModes(const ComputeModes& modes)
    : before_(ComputeModes::current()), changed_(before_ != modes) {
  if (changed_) {
    change(before_, modes);
  }
}

WithModes::~WithModes() {
  if (changed_) {
    change(ComputeModes::current(), before_);
  }
}

}  // namespace memswap
