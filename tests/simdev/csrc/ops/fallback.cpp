// Every operator without a kernel of its own: the CPU kernel, run by the executor in stream order.
//
// [Note: fallback]
// The results' shapes come from the Meta kernel on the calling thread, so the results exist when
// the call returns and the work is asynchronous. Where the shapes depend on the data, or the Meta
// kernel raises, the operator runs blocking: in stream order, then the host waits for the current
// stream only. So even those expose a missing wait, and a real error surfaces with its own message.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>

#include <mutex>
#include <string_view>

#include "arguments.h"
#include "operator_info.h"
#include "ops.h"

namespace simdev {
namespace {

using c10::IValue;

struct OperatorCounts {
  std::mutex mutex;
  uint64_t asynchronous = 0;
  uint64_t blocking = 0;
  std::map<std::string, uint64_t> blocking_by_name;
};
OperatorCounts counts;

void flatten(const IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
  }
}

// Returns with every tensor replaced; other values, computed from shapes alone, stay as they are.
template <class Function>
IValue map_result(const IValue& value, Function&& function) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(function(tensor)) : IValue(function(at::Tensor()));
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    return list;
  }
  return value;
}

class AsyncOperator final : public Work {
 public:
  AsyncOperator(CapturedCall call, std::shared_ptr<const OperatorInfo> info,
                std::vector<RawTensor> results)
      : call_(std::move(call)), info_(std::move(info)), results_(std::move(results)) {}

  void run() override {
    const FreshThreadState fresh;
    const Stack returns = call_.run();
    if (results_.empty()) return;
    std::vector<at::Tensor> computed;
    for (size_t i = 0; i < info_->aliased_argument.size(); ++i)
      if (info_->aliased_argument[i] < 0) flatten(returns[i], computed);
    for (size_t i = 0; i < results_.size(); ++i) {
      if (!results_[i].defined() || !computed.at(i).defined()) continue;
      // What a CPU kernel leaves out (batch norm's statistics in eval mode) stays poison.
      if (computed[i].numel() == 0) continue;
      at::Tensor result = as_cpu(results_[i]);
      TORCH_CHECK(result.sizes() == computed[i].sizes(), "sim: ", info_->name,
                  ": the Meta kernel promised shape ", result.sizes(), ", the CPU kernel gave ",
                  computed[i].sizes());
      at::native::copy_(result, computed[i], false);
    }
  }

 private:
  CapturedCall call_;
  std::shared_ptr<const OperatorInfo> info_;
  std::vector<RawTensor> results_;
};

c10::Device device_of_call(const OperatorInfo& info, const IValue* arguments, size_t count) {
  std::optional<c10::Device> device;
  for_each_tensor(arguments, count, [&](size_t, int, const at::Tensor& tensor) {
    if (!on_device(tensor)) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(tensor.device() == *device, "sim: ", info.name,
                ": all tensors must be on one device, found ", *device, " and ", tensor.device());
  });
  for (size_t i = 0; i < count && !device; ++i)
    if (arguments[i].isDevice() && arguments[i].toDevice().type() == kDeviceType &&
        arguments[i].toDevice().has_index())
      device = arguments[i].toDevice();
  return device.value_or(c10::Device(kDeviceType, current_device()));
}

at::Tensor to_meta(const at::Tensor& tensor) {
  // A wrapped number on Meta trips an assertion where the Meta kernel is written in Python.
  if (tensor.device().is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  at::Tensor meta(
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  if (tensor.is_conj()) meta._set_conj(true);
  if (tensor.is_neg()) meta._set_neg(true);
  return meta;
}

// The CPU kernels keep a norm's statistics in the parameters' dtype, where the Meta kernels promise
// the accumulation dtype; the CPU's backward kernel accepts what the CPU's forward kernel returned.
void correct_norm_statistics(const OperatorInfo& info, const IValue* arguments, Stack& returns) {
  const std::string_view name = info.name;
  if (name != "aten::native_layer_norm" && name != "aten::native_group_norm" &&
      name != "aten::native_batch_norm")
    return;
  const at::Tensor& input = arguments[0].toTensor();
  const size_t weight_argument = name == "aten::native_layer_norm" ? 2 : 1;
  const IValue& weight = arguments[weight_argument];
  const bool weighted = weight.isTensor() && weight.toTensor().defined();
  const auto dtype = weighted ? weight.toTensor().scalar_type() : input.scalar_type();
  for (size_t i : {size_t{1}, size_t{2}}) {
    const at::Tensor& meta = returns[i].toTensor();
    returns[i] = at::Tensor(at::detail::empty_strided_meta(meta.sizes(), meta.strides(), dtype));
  }
}

std::shared_ptr<const MetaResult> run_meta(const c10::OperatorHandle& op, const OperatorInfo& info,
                                           const IValue* arguments, size_t count) {
  auto result = std::make_shared<MetaResult>();
  Stack stack =
      map_arguments(arguments, count, c10::Device(c10::DeviceType::Meta),
                    [](size_t, int, const at::Tensor& tensor) { return to_meta(tensor); });
  if (info.has_out)
    for (size_t i = 0; i < count; ++i)
      if (info.written[i] && stack[i].isTensor())
        result->out_arguments.emplace_back(i, stack[i].toTensor());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  correct_norm_statistics(info, arguments, stack);
  result->returns = std::move(stack);
  return result;
}

// Null where the operator has to run blocking.
std::shared_ptr<const MetaResult> shapes_of_results(const c10::OperatorHandle& op,
                                                    const OperatorInfo& info, const Stack& stack,
                                                    size_t base) {
  if (info.data_dependent) return nullptr;
  if (info.all_in_place && !info.has_out) {
    static const auto nothing_new = std::make_shared<const MetaResult>();
    return nothing_new;
  }
  const auto key = memo_key(op, info, stack, base);
  if (key)
    if (auto known = recall(*key)) return known;
  try {
    auto result = run_meta(op, info, stack.data() + base, stack.size() - base);
    if (key) memorise(*key, result);
    return result;
  } catch (const std::exception&) {
    return nullptr;  // [Note: fallback]
  }
}

Stack run_async(CapturedCall call, std::shared_ptr<const OperatorInfo> info, const Stack& stack,
                size_t base, const MetaResult& shapes, c10::Device device, Launch launch) {
  Stack returns;
  std::vector<RawTensor> results;
  const auto allocate = [&](const at::Tensor& meta) {
    if (!meta.defined()) {
      results.emplace_back();
      return at::Tensor();
    }
    at::Tensor result = empty_like_meta(meta, device);
    const RawTensor& raw = results.emplace_back(describe(result));
    launch.spans.push_back(raw.span(true));
    launch.bytes += raw.bytes();
    return result;
  };
  for (size_t i = 0; i < info->aliased_argument.size(); ++i) {
    const int argument = info->aliased_argument[i];
    returns.push_back(argument >= 0 ? stack[base + static_cast<size_t>(argument)]
                                    : map_result(shapes.returns[i], allocate));
  }
  enqueue(current_stream(), launch,
          std::make_unique<AsyncOperator>(std::move(call), std::move(info), std::move(results)));
  return returns;
}

Stack run_blocking(CapturedCall call, const OperatorInfo& info, const Stack& stack, size_t base,
                   c10::Device device, const Launch& launch) {
  auto computed = std::make_shared<Stack>();
  enqueue(current_stream(), launch, make_work([call = std::move(call), computed]() mutable {
            const FreshThreadState fresh;
            *computed = call.run();
          }));
  synchronize_stream(current_stream());
  Stack returns;
  const auto upload = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return at::Tensor();
    return copy_from(tensor, empty_like_meta(tensor, device), false);
  };
  for (size_t i = 0; i < info.aliased_argument.size(); ++i) {
    const int argument = info.aliased_argument[i];
    returns.push_back(argument >= 0 ? stack[base + static_cast<size_t>(argument)]
                                    : map_result((*computed)[i], upload));
  }
  return returns;
}

}  // namespace

std::tuple<uint64_t, uint64_t, std::map<std::string, uint64_t>> operator_count_table() {
  const std::lock_guard lock(counts.mutex);
  return {counts.asynchronous, counts.blocking, counts.blocking_by_name};
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto info = info_of(op);
  const size_t count = info->written.size(), base = stack->size() - count;
  const c10::Device device = device_of_call(*info, stack->data() + base, count);
  const c10::DeviceGuard guard(device);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // Before the launch: an operator that cannot run must raise where it was called.
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "sim: ", info->name, " has no CPU kernel to fall back to");

  const auto shapes = shapes_of_results(op, *info, *stack, base);
  if (shapes) {
    for (const auto& [argument, meta] : shapes->out_arguments) {
      const at::Tensor& out = (*stack)[base + argument].toTensor();
      if (out.sizes() != meta.sizes()) out.resize_(meta.sizes());
    }
  }
  Launch launch;
  launch.name = info->name;
  CapturedCall call(op, count);
  call.capture(*stack, info->written, launch);
  if (info->generator) {
    const uint64_t seed =
        next_random_seed(call.argument(*info->generator).toOptional<at::Generator>());
    call.replace_argument(*info->generator, at::Generator(at::detail::createCPUGenerator(seed)));
  }
  {
    const std::lock_guard lock(counts.mutex);
    if (shapes) {
      ++counts.asynchronous;
    } else {
      ++counts.blocking;
      ++counts.blocking_by_name[info->name];
    }
  }
  Stack returns =
      shapes ? run_async(std::move(call), info, *stack, base, *shapes, device, std::move(launch))
             : run_blocking(std::move(call), *info, *stack, base, device, launch);
  torch::jit::drop(*stack, count);
  for (IValue& value : returns) stack->push_back(std::move(value));
}

}  // namespace simdev
