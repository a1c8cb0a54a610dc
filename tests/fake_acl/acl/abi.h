// What the ACL functions of this folder need to know of ACL's binary interface: handles are
// pointers, everything else is a number. Our own declarations, written from the public API
// reference; no header of CANN is used. torch_npu's wheel brings the callers, so a wrong one shows
// as a failing test.
#pragma once

#include <cstddef>
#include <cstdint>

using aclError = int;
using aclrtStream = void*;
using aclrtEvent = void*;
using aclrtContext = void*;

#define FAKE_ACL_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_acl {

inline constexpr aclError kSuccess = 0;
inline constexpr aclError kParameterInvalid = 107000;
inline constexpr aclError kContextNull = 107002;
inline constexpr aclError kNotSupported = 207000;
inline constexpr aclError kOutOfMemory = 207001;
inline constexpr aclError kInternal = 507000;
inline constexpr aclError kLostHeartbeat = 507010;

inline constexpr uint32_t kEventSync = 1;

// Answers of the queries. They do not agree on what 0 means.
inline constexpr int kRecordedNotReady = 0;
inline constexpr int kRecordedComplete = 1;
inline constexpr int kStreamComplete = 0;
inline constexpr int kStreamNotReady = 1;

enum MemcpyKind { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };

}  // namespace fake_acl
