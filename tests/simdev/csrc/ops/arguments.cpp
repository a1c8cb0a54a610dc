#include "arguments.h"

namespace simdev {

void CapturedCall::capture(const Stack& stack, const std::vector<bool>& written, Launch& launch) {
  const auto capture_tensor = [&](size_t argument, int element, const at::Tensor& tensor) {
    // The number of a Python scalar: nobody else holds it, and a copy would lose its flag.
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && !on_device(tensor)) return tensor;
    if (!on_device(tensor)) return tensor.clone();
    const RawTensor& raw = slots_.emplace_back(argument, element, describe(tensor)).raw;
    const bool write = written[argument];
    launch.spans.push_back(raw.span(write));
    launch.bytes += raw.bytes() * (write ? 2 : 1);
    return at::Tensor();
  };
  const c10::IValue* arguments = stack.data() + (stack.size() - argument_count_);
  arguments_ =
      map_arguments(arguments, argument_count_, c10::Device(c10::DeviceType::CPU), capture_tensor);
}

Stack CapturedCall::run() {
  for (const Slot& slot : slots_) {
    c10::IValue& value = arguments_[slot.argument];
    if (slot.element < 0) {
      value = as_cpu(slot.raw);
    } else if (value.isTensorList()) {
      value.toTensorList().set(static_cast<size_t>(slot.element), as_cpu(slot.raw));
    } else {
      value.toOptionalTensorList().set(static_cast<size_t>(slot.element),
                                       std::optional<at::Tensor>(as_cpu(slot.raw)));
    }
  }
  Stack stack = std::move(arguments_);
  op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack;
}

}  // namespace simdev
