// Which operators may be run again in place of what they made, and why.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace memswap {

enum class OperatorKind : uint8_t {
  kOther,       // nothing is known of it; the operators that it calls are looked at
  kEdits,       // writes some of its arguments
  kRepeatable,  // the same arguments give the same bits, cheaply
};

// What is known of one operator.
struct OperatorRule {
  c10::OperatorHandle op;
  OperatorKind kind;
  std::string reason;             // why it is repeatable, or why it never is
  c10::DispatchKeySet autocast;   // of the devices under whose autocast what it calls is the maker
  bool sealed = false;            // what it calls is its own business, and makes nothing
  std::vector<size_t> written;    // of an operator that edits: the positions of those arguments
  std::optional<size_t> indices;  // of a lookup: the argument that says which rows
};
using OperatorRulePtr = std::shared_ptr<const OperatorRule>;

// The table. An operator is repeatable if it is pointwise, or a norm, a softmax, a copy, a cast, a
// concatenation, a lookup or a short reduction by name (kNamed in operator_rules.cpp), or if the
// user has named it. Whoever names it: an operator that draws random numbers, writes or returns
// its arguments, or has outputs whose sizes depend on data never is.
//
// Calls are serialised by the owner.
class OperatorRules {
 public:
  // `more`: operators of the user's, as "namespace::name". Throws std::invalid_argument for what is
  // not of that form.
  explicit OperatorRules(const std::vector<std::string>& more = {});

  // The rule of the operator that is being called; nullptr: it is not one of the dispatcher's.
  const OperatorRulePtr& of(const at::RecordFunction& call);

  OperatorRule rule_of(const c10::OperatorHandle& op) const;

 private:
  struct Known {
    std::string name;
    std::string overload;
    OperatorRulePtr rule;
  };

  std::unordered_map<std::string, std::string> named_;  // name -> reason
  std::unordered_map<const char*, Known> known_;        // by the address of a schema's name
};

}  // namespace memswap
