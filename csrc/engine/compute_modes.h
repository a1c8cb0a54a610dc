// The settings of torch that an operator's bits may depend on.
#pragma once

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>

#include <array>

namespace memswap {

// As they are for the calling thread. (Autocast is none of them: what is run again is what autocast
// had made of a call.)
struct ComputeModes {
  static ComputeModes current();
  bool operator==(const ComputeModes&) const = default;

  int threads = 1;
  bool deterministic = false;
  bool deterministic_warns = false;
  // TF32 and its like, for products and convolutions on a GPU, and the same on a processor.
  std::array<at::Float32Precision, 4> float32_precisions{};
  // Which library's kernels are chosen: `switches` of compute_modes.cpp.
  std::array<bool, 9> switches{};
  bool flushes_denormals = false;
  c10::ScalarType default_dtype = c10::ScalarType::Float;
};

// For the lifetime of the object these are the settings. Where they are so already, which is the
// rule, nothing happens.
class WithModes {
 public:
  explicit WithModes(const ComputeModes& modes);
  WithModes(const WithModes&) = delete;
  WithModes& operator=(const WithModes&) = delete;
  ~WithModes();

 private:
  const ComputeModes before_;
  const bool changed_;
};

}  // namespace memswap
