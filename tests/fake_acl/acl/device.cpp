// The process's and the threads' relation to devices.
#include <array>
#include <atomic>
#include <cstring>

#include "calls.h"
#include "streams.h"

namespace fake_acl {
namespace {

// One, though the machine has two: a second would cost every test a second autograd thread.
constexpr int kDevices = 1;

thread_local int chosen_device = -1;
// One context per device; its address is the handle.
std::array<char, simdev::kDevices> contexts;
std::array<std::atomic<int64_t>, 64> options;

aclError get_option(int option, int64_t* value) {
  if (option < 0 || option >= static_cast<int>(options.size())) return kParameterInvalid;
  *value = options[static_cast<size_t>(option)];
  return kSuccess;
}
aclError set_option(int option, int64_t value) {
  if (option < 0 || option >= static_cast<int>(options.size())) return kParameterInvalid;
  options[static_cast<size_t>(option)] = value;
  return kSuccess;
}

}  // namespace

int current_device() {
  if (chosen_device < 0) throw Failure{kContextNull, "this thread has chosen no device"};
  return chosen_device;
}

}  // namespace fake_acl

using namespace fake_acl;

FAKE_ACL_EXPORT aclError aclInit(const char*) { return enter("aclInit"); }
FAKE_ACL_EXPORT aclError aclFinalize() { return kSuccess; }
FAKE_ACL_EXPORT const char* aclrtGetSocName() { return "Ascend910B1"; }

FAKE_ACL_EXPORT aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = kDevices;
  return kSuccess;
}

FAKE_ACL_EXPORT aclError aclrtSetDevice(int device) {
  return call("aclrtSetDevice", [&] {
    if (device < 0 || device >= kDevices) throw Failure{kParameterInvalid, "no such device"};
    chosen_device = device;
  });
}

FAKE_ACL_EXPORT aclError aclrtGetDevice(int* device) {
  return call("aclrtGetDevice", [&] { *device = current_device(); });
}

FAKE_ACL_EXPORT aclError aclrtResetDevice(int) { return kSuccess; }

FAKE_ACL_EXPORT aclError aclrtGetCurrentContext(aclrtContext* context) {
  return call("aclrtGetCurrentContext",
              [&] { *context = &contexts[static_cast<size_t>(current_device())]; });
}

FAKE_ACL_EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  return call("aclrtSetCurrentContext", [&] {
    const auto device = static_cast<const char*>(context) - contexts.data();
    if (device < 0 || device >= kDevices) throw Failure{kParameterInvalid, "no such context"};
    chosen_device = static_cast<int>(device);
  });
}

FAKE_ACL_EXPORT aclError aclrtGetPrimaryCtxState(int, uint32_t* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return kSuccess;
}

// Cores of an Atlas A2 (910B1): 24 cube, 48 vector.
FAKE_ACL_EXPORT aclError aclGetDeviceCapability(uint32_t, int what, int64_t* value) {
  return call("aclGetDeviceCapability", [&] { *value = what == 0 ? 24 : what == 1 ? 48 : 0; });
}
FAKE_ACL_EXPORT aclError aclrtGetDeviceInfo(uint32_t, int attribute, int64_t* value) {
  constexpr int kVectorCores = 201;
  *value = attribute == kVectorCores ? 48 : 24;
  return kSuccess;
}

FAKE_ACL_EXPORT aclError aclrtDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return kSuccess;
}
FAKE_ACL_EXPORT aclError aclrtDeviceGetBareTgid(int* pid) {
  *pid = 1;
  return kSuccess;
}

FAKE_ACL_EXPORT aclError aclrtGetSysParamOpt(int o, int64_t* v) { return get_option(o, v); }
FAKE_ACL_EXPORT aclError aclrtSetSysParamOpt(int o, int64_t v) { return set_option(o, v); }
FAKE_ACL_EXPORT aclError aclrtCtxGetSysParamOpt(int o, int64_t* v) { return get_option(o, v); }
FAKE_ACL_EXPORT aclError aclrtCtxSetSysParamOpt(int o, int64_t v) { return set_option(o, v); }
FAKE_ACL_EXPORT aclError aclrtSetDeviceSatMode(int) { return kSuccess; }
FAKE_ACL_EXPORT aclError aclrtGetDeviceSatMode(int* mode) {
  *mode = 1;
  return kSuccess;
}
FAKE_ACL_EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t) { return kSuccess; }
FAKE_ACL_EXPORT aclError aclrtSetOpWaitTimeout(uint32_t) { return kSuccess; }
FAKE_ACL_EXPORT aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return kSuccess; }
FAKE_ACL_EXPORT aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return kSuccess; }
FAKE_ACL_EXPORT aclError aclrtProcessReport(int) { return kSuccess; }
FAKE_ACL_EXPORT void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
