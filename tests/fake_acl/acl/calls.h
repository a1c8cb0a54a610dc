// Every call that reaches the fake passes here: it is counted, it may be made to fail, and after
// the loss of the device it fails in any case.
#pragma once

#include <exception>
#include <map>
#include <string>

#include "../../simdev/csrc/runtime/runtime.h"
#include "abi.h"

namespace fake_acl {

struct Failure {
  aclError code;
  std::string message;
};

// The error that this call must return, or success. Counts the call.
aclError enter(const char* call);
aclError fail(aclError code, const std::string& message);  // remembers the message, returns code

// Runs the body of an ACL call. Exceptions become the codes that a user of the real library sees.
template <class Body>
aclError call(const char* name, Body&& body) {
  if (const aclError code = enter(name)) return code;
  try {
    body();
    return kSuccess;
  } catch (const Failure& failure) {
    return fail(failure.code, failure.message);
  } catch (const simdev::OutOfMemory& error) {
    return fail(kOutOfMemory, error.what());
  } catch (const std::exception& error) {
    return fail(kInternal, error.what());
  }
}

// ---------------------------------------------------------------- for the tests
// After `skip` good calls of this name, the next `count` return `code` and do nothing.
void fail_calls(const std::string& call, uint64_t skip, uint64_t count, aclError code);
// From now on every call fails and nothing that was enqueued runs.
void lose_device();
bool device_lost();
void repair();  // forgets injected failures and the loss
std::map<std::string, uint64_t> call_counts();
std::map<std::string, uint64_t> failed_counts();
void reset_call_counts();

}  // namespace fake_acl
