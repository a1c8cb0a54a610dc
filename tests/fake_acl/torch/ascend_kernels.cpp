#include "ascend_kernels.h"

#include <mutex>
#include <vector>

#include "../../ascend_emulator/emulated_launch.h"
#include "../acl/launch.h"

namespace fake_acl {
namespace {

struct Kernels {
  std::mutex mutex;
  std::map<std::string, uint64_t> launches;
  std::string lost;
};

Kernels& kernels() {
  static Kernels* all = new Kernels();  // launched from threads that outlive main
  return *all;
}

int launch_on_stream(void* stream, const char* kernel, const memswap_emulated_span* spans,
                     size_t span_count, void (*run)(void*), void (*destroy)(void*), void* context) {
  Kernels& all = kernels();
  {
    const std::lock_guard lock(all.mutex);
    if (all.lost == kernel) {
      destroy(context);
      return 0;
    }
  }
  std::vector<fake_acl_span> touched;
  for (size_t i = 0; i < span_count; ++i)
    touched.push_back({spans[i].begin, spans[i].bytes, spans[i].write});
  const std::string name = std::string("memswap_ascend_") + kernel;
  const int error =
      fake_acl_launch(stream, name.c_str(), touched.data(), touched.size(), run, destroy, context);
  if (error == 0) {
    const std::lock_guard lock(all.mutex);
    ++all.launches[kernel];
  }
  return error;
}

}  // namespace

const memswap_codec* ascend_codec() {
  memswap_ascend_emulate(&launch_on_stream);
  return memswap_codec_ascend();
}

std::map<std::string, uint64_t> kernel_launches() {
  Kernels& all = kernels();
  const std::lock_guard lock(all.mutex);
  return all.launches;
}

void lose_launches_of(const std::string& kernel) {
  Kernels& all = kernels();
  const std::lock_guard lock(all.mutex);
  all.lost = kernel;
}

}  // namespace fake_acl
