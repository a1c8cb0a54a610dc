#include "launch.h"

#include <cstring>
#include <vector>

#include "runtime.h"

namespace {

using simdev::Engine;
using simdev::Launch;
using simdev::Span;

thread_local std::string last_error;

template <class Function>
int guarded(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

simdev::StreamId stream_of_handle(void* handle) {
  return simdev::stream_of(static_cast<int>(reinterpret_cast<intptr_t>(handle)));
}

Span span_of(const void* begin, size_t bytes, bool write) {
  const auto address = reinterpret_cast<uintptr_t>(begin);
  return {address, address + bytes, write, false};
}

}  // namespace

extern "C" {

int simdev_launch(void* stream, const char* name, const simdev_span* spans, size_t span_count,
                  void (*run)(void*), void (*destroy)(void*), void* context) {
  std::shared_ptr<void> owned(context, [destroy](void* p) {
    if (destroy) destroy(p);
  });
  return guarded([&] {
    Launch launch;
    launch.name = simdev::intern(name);
    for (size_t i = 0; i < span_count; ++i) {
      Span span = span_of(spans[i].begin, spans[i].bytes, spans[i].write != 0);
      span.device = true;
      launch.spans.push_back(span);
      launch.bytes += static_cast<double>(spans[i].bytes);
    }
    simdev::enqueue(stream_of_handle(stream), launch,
                    simdev::make_work([run, owned = std::move(owned)] { run(owned.get()); }));
  });
}

int simdev_memcpy_async(void* destination, const void* source, size_t bytes, void* stream) {
  return guarded([&] {
    const bool from_device = simdev::device_of(source) >= 0;
    const bool to_device = simdev::device_of(destination) >= 0;
    Launch launch;
    launch.name = !from_device ? "memcpy_h2d" : !to_device ? "memcpy_d2h" : "memcpy_d2d";
    launch.engine = !from_device ? Engine::kHostToDevice
                    : !to_device ? Engine::kDeviceToHost
                                 : Engine::kCompute;
    launch.spans = {span_of(source, bytes, false), span_of(destination, bytes, true)};
    launch.bytes = static_cast<double>(bytes) * (from_device && to_device ? 2 : 1);
    const auto id = stream_of_handle(stream);
    if (!from_device && !simdev::is_pinned(source)) {
      const auto* first = static_cast<const char*>(source);
      simdev::enqueue(
          id, launch,
          simdev::make_work([destination, staged = std::vector<char>(first, first + bytes)] {
            std::memcpy(destination, staged.data(), staged.size());
          }));
    } else {
      simdev::enqueue(id, launch,
                      simdev::make_work([=] { std::memcpy(destination, source, bytes); }));
    }
    if (!to_device && !simdev::is_pinned(destination)) simdev::synchronize_stream(id);
  });
}

int simdev_memset_async(void* destination, int value, size_t bytes, void* stream) {
  return guarded([&] {
    Launch launch;
    launch.name = "memset";
    launch.spans = {span_of(destination, bytes, true)};
    launch.bytes = static_cast<double>(bytes);
    simdev::enqueue(stream_of_handle(stream), launch,
                    simdev::make_work([=] { std::memset(destination, value, bytes); }));
  });
}

const char* simdev_last_error(void) { return last_error.c_str(); }

}  // extern "C"
