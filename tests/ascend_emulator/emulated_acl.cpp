// The calls of acl/acl.h, answered as the tests set the machine up.
#include "acl/acl.h"
#include "emulated_machine.h"

extern "C" aclError aclrtGetDevice(int32_t* device) {
  *device = 0;
  return ascend_emulator::machine().fail("aclrtGetDevice");
}

extern "C" aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  *value = info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? ascend_emulator::machine().cores : 0;
  return ascend_emulator::machine().fail("aclGetDeviceCapability");
}
