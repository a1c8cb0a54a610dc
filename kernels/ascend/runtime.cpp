#include "runtime.h"

#include <acl/acl.h>

namespace memswap::ascend {

int vector_cores(uint32_t* cores) {
  int32_t device = 0;
  int64_t count = 0;
  aclError error = aclrtGetDevice(&device);
  if (error == ACL_SUCCESS) {
    error = aclGetDeviceCapability(static_cast<uint32_t>(device), ACL_DEVICE_INFO_VECTOR_CORE_NUM,
                                   &count);
  }
  *cores = count > 0 && count <= UINT32_MAX ? static_cast<uint32_t>(count) : 0;
  return static_cast<int>(error);
}

}  // namespace memswap::ascend
