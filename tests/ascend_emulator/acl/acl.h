// The few calls of the ACL runtime that kernels/ascend makes, answered by emulated_acl.cpp.
// Names and numbers are those of the public API; hidden, because a process may have another
// runtime.
#pragma once

#include <cstdint>

#define MEMSWAP_HIDDEN __attribute__((visibility("hidden")))

using aclError = int;
inline constexpr aclError ACL_SUCCESS = 0;
enum aclDeviceInfo { ACL_DEVICE_INFO_AI_CORE_NUM, ACL_DEVICE_INFO_VECTOR_CORE_NUM };

extern "C" {
MEMSWAP_HIDDEN aclError aclrtGetDevice(int32_t* device);
MEMSWAP_HIDDEN aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t* value);
}
