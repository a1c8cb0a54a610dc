// Walking and mapping the arguments of a boxed call.
#pragma once

#include <vector>

#include "ops.h"

namespace simdev {

// Calls function(argument, element, tensor) for each defined tensor of the call; element is -1 for
// an argument that is a tensor itself.
template <class Function>
void for_each_tensor(const c10::IValue* arguments, size_t count, Function&& function) {
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = arguments[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) function(i, -1, value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      int element = 0;
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && item.toTensor().defined()) function(i, element, item.toTensor());
        ++element;
      }
    }
  }
}

// A copy of the call's arguments with every defined tensor replaced by
// function(argument, element, tensor) and every device by `device`.
template <class Function>
Stack map_arguments(const c10::IValue* arguments, size_t count, c10::Device device,
                    Function&& function) {
  Stack mapped;
  mapped.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = arguments[i];
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      mapped.emplace_back(tensor.defined() ? function(i, -1, tensor) : tensor);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      int element = 0;
      for (const c10::IValue& item : value.toListRef()) {
        const at::Tensor& tensor = item.toTensor();
        list.push_back(tensor.defined() ? function(i, element, tensor) : tensor);
        ++element;
      }
      mapped.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      int element = 0;
      for (const c10::IValue& item : value.toListRef()) {
        std::optional<at::Tensor> tensor;
        if (item.isTensor() && item.toTensor().defined())
          tensor = function(i, element, item.toTensor());
        list.push_back(std::move(tensor));
        ++element;
      }
      mapped.emplace_back(std::move(list));
    } else if (value.isDevice()) {
      mapped.emplace_back(device);
    } else {
      mapped.push_back(value);
    }
  }
  return mapped;
}

// A device tensor among the arguments, and where to put it back when the task runs.
struct Slot {
  size_t argument;
  int element;
  RawTensor raw;
};

// An operator's call, detached from the tensors it was made with ([Note: captures]). Host operands
// are copied, since a kernel reads its host arguments at launch.
class CapturedCall {
 public:
  CapturedCall(const c10::OperatorHandle& op, size_t argument_count)
      : op_(op), argument_count_(argument_count) {}
  // Fills the launch's spans and bytes as well.
  void capture(const Stack& stack, const std::vector<bool>& written, Launch& launch);
  void replace_argument(size_t argument, c10::IValue value) {
    arguments_[argument] = std::move(value);
  }
  const c10::IValue& argument(size_t index) const { return arguments_[index]; }
  Stack run();  // once, on the executor: the CPU kernel's results

 private:
  c10::OperatorHandle op_;
  size_t argument_count_;
  Stack arguments_;
  std::vector<Slot> slots_;
};

}  // namespace simdev
