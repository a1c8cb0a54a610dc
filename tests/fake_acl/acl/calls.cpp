#include "calls.h"

#include <atomic>
#include <mutex>
#include <set>

namespace fake_acl {
namespace {

struct Planned {
  uint64_t skip = 0;
  uint64_t count = 0;
  aclError code = kSuccess;
};

struct Calls {
  std::mutex mutex;
  std::map<std::string, uint64_t> counts, failed;
  std::map<std::string, Planned> planned;
};

Calls& calls() {
  static Calls* all = new Calls();  // torch_npu's threads still call while the process ends
  return *all;
}

std::atomic<bool> lost{false};
thread_local std::string last_message;

// The host's own bookkeeping goes on when the device does not answer any more.
bool reaches_device(const std::string& call) {
  static const std::set<std::string> bookkeeping = {
      "aclInit",          "aclrtSetDevice",         "aclrtGetDevice",
      "aclrtFreeHost",    "aclrtGetCurrentContext", "aclrtSetCurrentContext",
      "aclrtCreateEvent", "aclrtDestroyEvent",      "aclrtStreamGetId",
  };
  return !bookkeeping.contains(call);
}

}  // namespace

aclError fail(aclError code, const std::string& message) {
  last_message = "fake ACL: " + message;
  return code;
}

aclError enter(const char* call) {
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  ++all.counts[call];
  if (lost && reaches_device(call)) {
    ++all.failed[call];
    return fail(kLostHeartbeat, std::string(call) + ": the device is lost");
  }
  const auto found = all.planned.find(call);
  if (found == all.planned.end()) return kSuccess;
  Planned& plan = found->second;
  if (plan.skip > 0) {
    --plan.skip;
    return kSuccess;
  }
  if (plan.count == 0) return kSuccess;
  --plan.count;
  ++all.failed[call];
  return fail(plan.code, std::string(call) + ": injected failure");
}

void fail_calls(const std::string& call, uint64_t skip, uint64_t count, aclError code) {
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  all.planned[call] = {skip, count, code};
}

void lose_device() { lost = true; }
bool device_lost() { return lost; }

void repair() {
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  all.planned.clear();
  lost = false;
}

std::map<std::string, uint64_t> call_counts() {
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  return all.counts;
}

std::map<std::string, uint64_t> failed_counts() {
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  return all.failed;
}

void reset_call_counts() {
  Calls& all = calls();
  const std::lock_guard lock(all.mutex);
  all.counts.clear();
  all.failed.clear();
}

}  // namespace fake_acl

FAKE_ACL_EXPORT const char* aclGetRecentErrMsg() { return fake_acl::last_message.c_str(); }
FAKE_ACL_EXPORT aclError aclrtGetLastError(int) { return fake_acl::kSuccess; }
FAKE_ACL_EXPORT aclError aclrtPeekAtLastError(int) { return fake_acl::kSuccess; }
