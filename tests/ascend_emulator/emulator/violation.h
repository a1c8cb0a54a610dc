// What the emulator raises when a kernel breaks a rule of the machine.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ascend_emulator {

// The message reads "[rule] call: what was found and what the rule allows".
class Violation : public std::runtime_error {
 public:
  Violation(const std::string& rule, const std::string& call, const std::string& what)
      : std::runtime_error("[" + rule + "] " + call + ": " + what), rule_(rule) {}
  const std::string& rule() const { return rule_; }

 private:
  std::string rule_;
};

template <class... Parts>
[[noreturn]] void violate(const char* rule, const std::string& call, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Violation(rule, call, text.str());
}

}  // namespace ascend_emulator
