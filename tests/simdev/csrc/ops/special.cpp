// Operators that the fallback alone would get wrong.
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/fill.h>

#include "ops.h"

namespace simdev {
namespace {

void call_fallback(const char* name, Stack& stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  fallback(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
}

}  // namespace

// The dispatcher sends an out-of-tree backend's convolutions to the "overrideable" operators, which
// have no CPU kernel.
void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  constexpr size_t kArguments = 9;
  Stack call(stack->end() - kArguments, stack->end());
  torch::jit::drop(*stack, kArguments);
  call_fallback("aten::convolution", call);
  stack->insert(stack->end(), call.begin(), call.end());
}

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  constexpr size_t kArguments = 10, kBiasSizes = 3;
  Stack call(stack->end() - kArguments, stack->end());
  torch::jit::drop(*stack, kArguments);
  const int64_t channels = call[0].toTensor().size(1);
  call.insert(call.begin() + kBiasSizes, c10::IValue(std::vector<int64_t>{channels}));
  call_fallback("aten::convolution_backward", call);
  stack->insert(stack->end(), call.begin(), call.end());
}

// native_dropout has no generator argument, so the CPU kernel would draw from the executor's
// generator ([Note: random numbers]).
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (p == 0 || !train.value_or(true))
    return {input.clone(), at::empty_like(input, mask_options).fill_(true)};
  at::Tensor mask = at::empty_like(input, mask_options).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}

}  // namespace simdev
