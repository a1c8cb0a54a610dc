// Operators for a torch_npu that has no kernels.
//
// [Note: which operators are replaced]
// Whatever moves, allocates or describes bytes stays torch_npu's own, because that is what the
// tests are about: empty, copies between host and device, resizing, storages, views, streams. Every
// other operator that torch_npu registers would call a kernel of CANN; it gets simdev's fallback,
// which runs the CPU's kernel in stream order, or is made of others where torch knows how, so that
// it is the same with and without gradients. Where torch_npu has its own idea of an operator's
// gradient, torch's takes its place, for it is made of operators that we have.
#include "operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_set>

#include "../../simdev/csrc/ops/ops.h"

namespace fake_acl {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

const std::unordered_set<std::string_view>& kept() {
  static const std::unordered_set<std::string_view> names = {
      "aten::_copy_from_and_resize",
      "aten::_local_scalar_dense",
      "aten::_pin_memory",
      "aten::_reshape_alias",
      "aten::_to_copy",
      "aten::as_strided",
      "aten::contiguous",
      "aten::copy_",
      "aten::empty",
      "aten::empty_like",
      "aten::empty_strided",
      "aten::empty_with_format",
      "aten::is_pinned",
      "aten::is_set_to",
      "aten::new_empty_strided",
      "aten::record_stream",
      "aten::resize_",
      "aten::resize_as_",
      "aten::set_",
      "aten::unfold",
      "aten::view",
      "aten::view_as_complex",
      "aten::view_as_real",
  };
  return names;
}

// Metadata only: nothing runs on the device.
bool makes_view(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view)) return true;
  const c10::FunctionSchema& schema = op.schema();
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

// Torch's own gradient of an operator, whatever the backend registered.
void torchs_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  op.getComputedKernelForDispatchKey(DispatchKey::AutogradCPU).callBoxed(op, keys, stack);
}

// An operator that is made of others.
void decomposed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  op.getComputedKernelForDispatchKey(DispatchKey::CPU).callBoxed(op, keys, stack);
}

void run_fallback(const char* name, Stack& stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  simdev::fallback(op, c10::DispatchKeySet(DispatchKey::PrivateUse1), &stack);
}

// ---------------------------------------------------------------- copies
bool is_npu(const at::Tensor& tensor) { return tensor.device().type() == simdev::kDeviceType; }

// Whether torch_npu moves this as plain bytes, by aclrtMemcpyAsync.
bool is_plain_transfer(const at::Tensor& self, const at::Tensor& source) {
  return is_npu(self) != is_npu(source) && self.scalar_type() == source.scalar_type() &&
         self.sizes() == source.sizes() && self.is_contiguous() && source.is_contiguous() &&
         self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
}

// torch_npu's own copy_, which register_operators replaces. Never destroyed.
struct OriginalCopy {
  c10::OperatorHandle op;
  c10::SafeKernelFunction kernel;
};
OriginalCopy* original_copy = nullptr;

void transfer(const at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Stack stack{self, source, non_blocking};
  original_copy->kernel.callBoxed(original_copy->op, c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                  &stack);
}

at::Tensor copied_on_device(const at::Tensor& source, const at::Tensor& destination) {
  // simdev's fallback of copy_ runs the CPU's copy_, which converts, broadcasts and restrides.
  Stack stack{destination, source, true};
  run_fallback("aten::copy_", stack);
  return destination;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (is_npu(self) && is_npu(source)) {
    TORCH_CHECK_NOT_IMPLEMENTED(self.device() == source.device(),
                                "fake ACL: copies between devices");
    copied_on_device(source, self);
    return self;
  }
  if (is_plain_transfer(self, source)) {
    transfer(self, source, non_blocking);
    return self;
  }
  // The conversion is done on the device; only whole, contiguous tensors of one dtype travel.
  if (is_npu(self)) {
    const at::Tensor host = source.resolve_conj().resolve_neg().contiguous();
    at::Tensor there = at::empty(host.sizes(), host.options().device(self.device()));
    copied_on_device(there.copy_(host, non_blocking), self);
    return self;
  }
  at::Tensor there = at::empty(self.sizes(), self.options().device(source.device()));
  copied_on_device(source, there);
  if (self.is_contiguous()) {
    transfer(self, there, non_blocking);
    return self;
  }
  at::Tensor host = at::empty(self.sizes(), self.options());
  host.copy_(there, false);
  return self.copy_(host);
}

at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype,
                   std::optional<at::Layout>, std::optional<at::Device> device,
                   std::optional<bool> pin, bool non_blocking,
                   std::optional<at::MemoryFormat> format) {
  const auto options = self.options()
                           .dtype(dtype.value_or(self.scalar_type()))
                           .device(device.value_or(self.device()))
                           .pinned_memory(pin);
  return at::empty_like(self, options, format.value_or(at::MemoryFormat::Preserve))
      .copy_(self, non_blocking);
}

template <class Function>
torch::CppFunction unboxed(Function* function) {
  return torch::CppFunction(function);
}

}  // namespace

// Ours replace kernels that are there, and torch would warn of each.
void register_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__,
                                __LINE__);
  static torch::Library autograd(torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1,
                                 __FILE__, __LINE__);
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);

  auto& dispatcher = c10::Dispatcher::singleton();
  const auto copy_op = dispatcher.findSchemaOrThrow("aten::copy_", "");
  original_copy =
      new OriginalCopy{copy_op, copy_op.getComputedKernelForDispatchKey(DispatchKey::PrivateUse1)};
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (std::string_view(name.name).substr(0, 6) != "aten::") continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    const std::string full = c10::toString(name);
    if (op->hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1) &&
        op->hasComputedKernelForDispatchKey(DispatchKey::AutogradCPU))
      autograd.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&torchs_gradient>());
    if (kept().contains(name.name) || makes_view(*op) ||
        !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
        !op->hasComputedKernelForDispatchKey(DispatchKey::CPU))
      continue;
    if (op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
        !op->hasKernelForDispatchKey(DispatchKey::CPU))
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&decomposed>());
    else
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&simdev::fallback>());
  }
  library.impl("copy_", unboxed(&copy));
  library.impl("_to_copy", unboxed(&to_copy));
  library.impl("native_dropout", unboxed(&simdev::native_dropout));
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&simdev::convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&simdev::convolution_backward>());
}

}  // namespace fake_acl
