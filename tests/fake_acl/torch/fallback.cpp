// simdev's fallback, without its registration: torch_npu has registered a fallback of its own, and
// operators.cpp registers this one operator by operator.
#include <torch/library.h>

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(library, key, m) [[maybe_unused]] void not_registered(torch::Library& m)

#include "../../simdev/csrc/ops/fallback.cpp"
