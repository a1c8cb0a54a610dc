#include "fake_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "work/without_gil.h"

namespace memswap::testing {

std::function<void()> in_event_call;
bool events_have_ended = false;
bool graph_is_captured = false;
double elapsed_ms = 0;

namespace {

constexpr auto kForEver = std::chrono::seconds(20);  // on a busy machine too

// Not a std::timed_mutex: its calls are unknown to ThreadSanitizer.
class Lock {
 public:
  void lock() {
    std::unique_lock guard(mutex_);
    given_.wait(guard, [&] { return !taken_; });
    taken_ = true;
  }
  bool try_lock_for(std::chrono::seconds time) {
    std::unique_lock guard(mutex_);
    if (!given_.wait_for(guard, time, [&] { return !taken_; })) {
      return false;
    }
    return taken_ = true;
  }
  void unlock() {
    const std::lock_guard guard(mutex_);
    taken_ = false;
    given_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable given_;
  bool taken_ = false;
};

Lock global_lock;
thread_local bool lock_is_here = false;

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kFakeDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kFakeDevice; }
  c10::Device getDevice() const override { return kFakeDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++last_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  bool isStreamCapturing(const c10::Stream&) const override { return graph_is_captured; }
#endif

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = &last_stream;  // any address: it is never read
  }
  void block(void*, const c10::Stream&) const override { call(); }
  bool queryEvent(void*) const override {
    call();
    return events_have_ended;
  }
  void synchronizeEvent(void*) const override { call(); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    TORCH_CHECK(elapsed_ms != kNoClock, "the device has no clock");
    return elapsed_ms;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kFakeDevice, id);
  }
  static void call() {
    if (in_event_call) {
      in_event_call();
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

class FakeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* bytes = std::malloc(nbytes);
    return {bytes, bytes, &std::free, kFakeDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  static FakeAllocator allocator;
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor copy_from(const at::Tensor&, const at::Tensor& to, bool) { return to; }

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(self.storage_offset()));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return view;
}

at::Tensor& zero_(at::Tensor& self) {
  std::memset(self.mutable_data_ptr(), 0, self.nbytes());
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("_copy_from", copy_from);
  library.impl("as_strided", as_strided);
  library.impl("zero_", zero_);
}

}  // namespace

at::Tensor fake_bytes(int64_t nbytes) {
  return at::empty({nbytes}, at::TensorOptions(kFakeDevice).dtype(at::kByte));
}

void GlobalLock::install() {
  set_gil_hooks({
      .release_if_held = []() -> void* {
        if (!lock_is_here) {
          return nullptr;
        }
        lock_is_here = false;
        global_lock.unlock();
        return &global_lock;
      },
      .take_back =
          [](void*) {
            global_lock.lock();
            lock_is_here = true;
          },
      .take = []() -> void* {
        if (lock_is_here) {
          return nullptr;
        }
        global_lock.lock();
        lock_is_here = true;
        return &global_lock;
      },
      .release =
          [](void*) {
            lock_is_here = false;
            global_lock.unlock();
          },
  });
}

GlobalLock::GlobalLock() {
  global_lock.lock();
  lock_is_here = true;
}

GlobalLock::~GlobalLock() {
  lock_is_here = false;
  global_lock.unlock();
}

bool GlobalLock::held_here() { return lock_is_here; }

bool GlobalLock::can_be_taken() {
  if (!global_lock.try_lock_for(kForEver)) {
    return false;
  }
  global_lock.unlock();
  return true;
}

}  // namespace memswap::testing
