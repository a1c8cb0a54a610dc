// Copies, ordered as CUDA orders them.
//
// [Note: copies]
// pinned, non_blocking            asynchronous; the pinned block is recorded on the stream, so that
//                                 the host allocator does not reuse it too early: found by the
//                                 storage's context, or where the tensor begins where the block
//                                 does. (Of a part in its middle, by from_blob, nobody hears.)
// pageable to device, non_blocking  staged before the call returns, then asynchronous
// device to pageable              the host waits, whatever was asked for
// device to another device        on the source's stream, which first waits for the destination's;
//                                 the destination's then waits for the copy
// Host memory that the program hands over is read by the executor when the task runs: writing to a
// pinned buffer after an asynchronous copy was launched is a race here as it is on a GPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "ops.h"

namespace simdev {
namespace {

// The task of every copy between tensors; the executor converts dtype and layout as it goes.
class CopyWork final : public Work {
 public:
  CopyWork(RawTensor source, RawTensor destination, at::Tensor staged)
      : source_(std::move(source)),
        destination_(std::move(destination)),
        staged_(std::move(staged)) {}
  void run() override {
    const FreshThreadState fresh;
    at::Tensor destination = as_cpu(destination_);
    at::native::copy_(destination, as_cpu(source_), false);
  }

 private:
  RawTensor source_, destination_;
  at::Tensor staged_;  // host memory of our own, where the source was pageable
};

void launch_copy(const char* name, Engine engine, RawTensor source, RawTensor destination,
                 bool source_on_device, bool destination_on_device,
                 const at::Tensor& staged = at::Tensor()) {
  Launch launch;
  launch.name = name;
  launch.engine = engine;
  launch.spans = {source.span(false, source_on_device),
                  destination.span(true, destination_on_device)};
  launch.bytes = engine == Engine::kCompute ? source.bytes() + destination.bytes()
                                            : std::max(source.bytes(), destination.bytes());
  const StreamId stream = current_stream();
  enqueue(stream, launch,
          std::make_unique<CopyWork>(std::move(source), std::move(destination), staged));
}

// With the two addresses that CUDA's copies name.
void record_pinned_use(const at::Tensor& host) {
  at::getHostAllocator(kDeviceType)
      ->record_event(host.mutable_data_ptr(), host.storage().data_ptr().get_context(),
                     torch_stream(current_stream()));
}

void copy_device_to_device(const at::Tensor& source, const at::Tensor& destination) {
  const int from = source.device().index(), to = destination.device().index();
  const c10::DeviceGuard guard(source.device());
  if (from != to) order_after(current_stream(from), current_stream(to));
  launch_copy("copy_d2d", Engine::kCompute, describe(source), describe(destination), true, true);
  if (from != to) order_after(current_stream(to), current_stream(from));
}

void copy_host_to_device(const at::Tensor& source, const at::Tensor& destination,
                         bool non_blocking) {
  const c10::DeviceGuard guard(destination.device());
  const bool pinned = is_pinned(source.storage().data());
  at::Tensor staged;
  if (non_blocking && !pinned) staged = source.clone();
  launch_copy("copy_h2d", Engine::kHostToDevice, describe(staged.defined() ? staged : source),
              describe(destination), false, true, staged);
  if (!non_blocking) {
    synchronize_stream(current_stream());
  } else if (pinned) {
    record_pinned_use(source);
  }
}

void copy_device_to_host(const at::Tensor& source, const at::Tensor& destination,
                         bool non_blocking) {
  const c10::DeviceGuard guard(source.device());
  const bool pinned = is_pinned(destination.storage().data());
  launch_copy("copy_d2h", Engine::kDeviceToHost, describe(source), describe(destination), true,
              false);
  if (non_blocking && pinned) {
    record_pinned_use(destination);
  } else {
    synchronize_stream(current_stream());
  }
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const at::Tensor host(at::detail::empty_cpu({}, self.scalar_type()));
  copy_from(self.view(at::IntArrayRef()), host, false);  // item() takes any shape of one element
  return at::_local_scalar_dense(host);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// The task resolves the conjugate and negative bits itself. Torch's fallbacks for them would copy
// first, by this very operator, and never end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) return destination;
  if (on_device(source) && on_device(destination)) {
    copy_device_to_device(source, destination);
  } else if (on_device(destination)) {
    copy_host_to_device(source, destination, non_blocking);
  } else {
    copy_device_to_host(source, destination, non_blocking);
  }
  return destination;
}

void copy_bytes(void* destination, const void* source, size_t bytes) {
  const auto range = [bytes](const void* begin, bool write) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    return Span{address, address + bytes, write, true};
  };
  Launch launch;
  launch.name = "memcpy";
  launch.spans = {range(source, false), range(destination, true)};
  launch.bytes = 2 * static_cast<double>(bytes);
  enqueue(current_stream(), launch, make_work([=] { std::memcpy(destination, source, bytes); }));
}

}  // namespace simdev
