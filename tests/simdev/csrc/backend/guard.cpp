// Devices, streams and events as torch sees them.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/version.h>

#include <array>
#include <atomic>

#include "backend.h"

namespace simdev {
namespace {

thread_local c10::DeviceIndex tls_device = 0;
thread_local std::array<int, kDevices> tls_stream{};

std::array<std::atomic<bool>, kStreams> capturing{};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kDeviceType, tls_device}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < kDevices, "sim: there is no device ", device.index(), ", only ",
                kDevices, " of them");
    tls_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) tls_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return torch_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return torch_stream({index_of(device), 0});
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return torch_stream(next_pool_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const StreamId id = stream_id(stream);
    const c10::Stream old = torch_stream(current_stream(id.device));
    tls_stream.at(static_cast<size_t>(id.device)) = id.index;
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(slot_of(stream_id(stream))));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(stream_id(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream_id(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? tls_device : device);
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return capturing.at(static_cast<size_t>(slot_of(stream_id(stream))));
  }
#endif

  // An event is a heap-allocated RecordingPtr: c10::Event owns it through destroyEvent.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    auto recording = simdev::record(stream_id(stream));
    if (*event) {
      recording_of(*event) = std::move(recording);
    } else {
      *event = new RecordingPtr(std::move(recording));
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(stream_id(stream), recording_of(event));
  }
  bool queryEvent(void* event) const override { return !event || query(recording_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(recording_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<RecordingPtr*>(event);
  }
  // Virtual time, in milliseconds.
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return (recording_of(end)->virtual_us - recording_of(begin)->virtual_us) / 1e3;
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    // As in CUDA: memory that the allocator has not handed out itself is passed over.
    if (pointer.get_deleter() == c10::GetAllocator(kDeviceType)->raw_deleter()) {
      record_stream(pointer.get(), stream_id(stream));
    }
  }

 private:
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : tls_device;
  }
  static RecordingPtr& recording_of(void* event) { return *static_cast<RecordingPtr*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

void set_capturing(int device, int stream, bool captures) {
  capturing.at(static_cast<size_t>(slot_of({device, stream}))) = captures;
}

c10::DeviceIndex current_device() { return tls_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const c10::DeviceIndex old = tls_device;
  if (device >= 0) tls_device = device;
  return old;
}

StreamId current_stream(int device) { return {device, tls_stream.at(static_cast<size_t>(device))}; }

}  // namespace simdev
