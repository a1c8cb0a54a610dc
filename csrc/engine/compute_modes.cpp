#include "compute_modes.h"

#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#include <array>
#include <cstddef>

namespace memswap {
namespace {

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
                     .default_dtype = c10::get_default_dtype_as_scalartype()};
  for (size_t which = 0; which < kPrecisions.size(); ++which) {
    const auto [backend, op] = kPrecisions[which];
    modes.float32_precisions[which] = context.float32Precision(backend, op);
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
