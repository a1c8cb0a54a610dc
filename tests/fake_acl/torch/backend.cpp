// What simdev's operators ask of their backend, answered by torch_npu.
#include "../../simdev/csrc/backend/backend.h"

#include <ATen/ops/empty_strided.h>
#include <torch_npu/csrc/aten/NPUGeneratorImpl.h>
#include <torch_npu/csrc/core/npu/NPUFunctions.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include "../../simdev/csrc/ops/ops.h"
#include "../acl/launch.h"
#include "allocator_trace.h"

namespace simdev {
namespace {

// A launch on its way through torch_npu's task queue to the fake. torch_npu may copy it.
struct Kernel {
  const char* name;
  std::vector<fake_acl_span> spans;
  WorkPtr work;
};

int launch(aclrtStream stream, const std::shared_ptr<Kernel>& kernel) {
  return fake_acl_launch(
      stream, kernel->name, kernel->spans.data(), kernel->spans.size(),
      [](void* context) { static_cast<Work*>(context)->run(); },
      [](void* context) { delete static_cast<Work*>(context); }, kernel->work.release());
}

}  // namespace

c10::DeviceIndex current_device() { return c10_npu::current_device(); }

// The machine's number of a stream is not torch_npu's. Nobody here needs it: launches go to the
// current stream.
StreamId current_stream(int device) { return {device, 0}; }

// [Note: launches go through the task queue]
// As torch_npu's own operators do: a kernel that went to the stream directly would overtake copies
// and events that the host has issued before it.
void enqueue(StreamId stream, const Launch& launch_, WorkPtr work) {
  fake_acl::rethrow_kept_error();
  auto kernel = std::make_shared<Kernel>();
  kernel->name = launch_.name;
  for (const Span& span : launch_.spans)
    if (span.begin < span.end)
      kernel->spans.push_back(
          {reinterpret_cast<const void*>(span.begin), span.end - span.begin, span.write});
  kernel->work = std::move(work);
  const aclrtStream native =
      c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(stream.device)).stream(false);
  at_npu::native::OpCommand::RunOpApiV2(
      launch_.name, [native, kernel]() -> int { return launch(native, kernel); });
}

void synchronize_stream(StreamId stream) {
  c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(stream.device)).synchronize();
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype,
                         c10::Device device) {
  return at::empty_strided(sizes, strides, at::TensorOptions(device).dtype(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  destination.copy_(source, non_blocking);
  return destination;
}

// [Note: random numbers], with torch_npu's generator as the counter.
uint64_t next_random_seed(const std::optional<at::Generator>& generator) {
  const at::Generator& chosen =
      generator && generator->defined()
          ? *generator
          : at::globalContext().defaultGenerator(c10::Device(kDeviceType, current_device()));
  auto* npu = static_cast<at_npu::NPUGeneratorImpl*>(chosen.unsafeGetGeneratorImpl());
  const std::lock_guard lock(npu->mutex_);
  const auto [seed, offset] = npu->philox_engine_inputs(4);
  return seed ^ (offset * 0x9E3779B97F4A7C15ULL);
}

}  // namespace simdev
