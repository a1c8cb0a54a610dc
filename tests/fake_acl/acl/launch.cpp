#include "launch.h"

#include <cstring>
#include <memory>

#include "calls.h"
#include "streams.h"

using namespace fake_acl;

namespace {

constexpr int kPoison = 0xFF;  // NaN in every floating-point format

template <class Run>
void launch(const char* name, aclrtStream stream, const fake_acl_span* spans, size_t span_count,
            Run run) {
  simdev::Launch launch;
  launch.name = simdev::intern(name);
  for (size_t i = 0; i < span_count; ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(spans[i].begin);
    launch.spans.push_back({begin, begin + spans[i].bytes, spans[i].write != 0, true});
    launch.bytes += static_cast<double>(spans[i].bytes);
  }
  simdev::enqueue(stream_id(stream), launch, simdev::make_work([run = std::move(run)] {
                    if (!device_lost()) run();
                  }));
}

}  // namespace

FAKE_ACL_EXPORT int fake_acl_launch(void* stream, const char* name, const fake_acl_span* spans,
                                    size_t span_count, void (*run)(void*), void (*destroy)(void*),
                                    void* context) {
  std::shared_ptr<void> owned(context, [destroy](void* p) {
    if (destroy) destroy(p);
  });
  return call("launch", [&] {
    launch(name, stream, spans, span_count, [run, owned = std::move(owned)] { run(owned.get()); });
  });
}

FAKE_ACL_EXPORT void fake_acl_change_owner(void* stream, void* begin, size_t bytes, int poison) {
  const fake_acl_span span{begin, bytes, 1};
  try {
    launch(poison ? "free" : "allocate", stream, &span, 1, [=] {
      if (poison) std::memset(begin, kPoison, bytes);
    });
  } catch (const std::exception&) {
    // What the race detector throws is in its reports as well.
  }
}

// A function of the host, in stream order. What it touches is not known, so the detector sees none.
FAKE_ACL_EXPORT aclError aclrtLaunchHostFunc(aclrtStream stream, void (*function)(void*),
                                             void* context) {
  return call("aclrtLaunchHostFunc",
              [&] { launch("host function", stream, nullptr, 0, [=] { function(context); }); });
}
