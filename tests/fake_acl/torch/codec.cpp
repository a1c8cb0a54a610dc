// simdev's codec in stream order (tests/simdev/csrc/codec), launched through the driver.
#include <vector>

#include "../../simdev/csrc/runtime/launch.h"
#include "../acl/abi.h"
#include "../acl/launch.h"

FAKE_ACL_EXPORT const char* aclGetRecentErrMsg();

extern "C" int simdev_launch(void* stream, const char* name, const simdev_span* spans,
                             size_t span_count, void (*run)(void*), void (*destroy)(void*),
                             void* context) {
  std::vector<fake_acl_span> touched;
  for (size_t i = 0; i < span_count; ++i)
    touched.push_back({spans[i].begin, spans[i].bytes, spans[i].write});
  return fake_acl_launch(stream, name, touched.data(), touched.size(), run, destroy, context);
}

extern "C" const char* simdev_last_error() { return aclGetRecentErrMsg(); }
