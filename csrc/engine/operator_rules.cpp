#include "operator_rules.h"

#include <ATen/core/enum_tag.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace memswap {
namespace {

struct Named {
  const char* name;
  const char* reason;
};

// Beside what torch tags as pointwise. Each reads its inputs about once, and each was run again
// over the operator database with the same bits (tests/unit/test_opinfo.py: on a CPU, in float64,
// and in float32 and bfloat16 by the slow tests).
constexpr std::array kNamed = {
    Named{"aten::_to_copy", "a cast"},
    Named{"aten::clone", "a copy"},
    Named{"aten::repeat", "a copy"},
    Named{"aten::cat", "a concatenation"},
    Named{"aten::stack", "a concatenation"},
    Named{"aten::constant_pad_nd", "a copy"},
    Named{"aten::tril", "a mask"},
    Named{"aten::triu", "a mask"},
    Named{"aten::roll", "a copy"},
    Named{"aten::flip", "a copy"},
    Named{"aten::embedding", "a lookup"},
    Named{"aten::native_layer_norm", "a norm"},
    Named{"aten::native_group_norm", "a norm"},
    Named{"aten::_fused_rms_norm", "a norm"},
    Named{"aten::_softmax", "a softmax"},
    Named{"aten::_safe_softmax", "a softmax"},
    Named{"aten::_log_softmax", "a softmax"},
    Named{"aten::glu", "pointwise over two halves"},
    Named{"aten::mean", "a short reduction"},
    Named{"aten::sum", "a short reduction"},
    Named{"aten::var_mean", "a short reduction"},
    Named{"aten::linalg_vector_norm", "a short reduction"},
};

constexpr std::array kAutocast = {
    c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
    c10::DispatchKey::AutocastXPU, c10::DispatchKey::AutocastHPU,
    c10::DispatchKey::AutocastMPS, c10::DispatchKey::AutocastPrivateUse1,
};

bool takes_generator(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    c10::TypePtr type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (type->kind() == c10::TypeKind::GeneratorType) {
      return true;
    }
  }
  return false;
}

// Whether an operator works together with other processes, by torch's own names for it: the library
// of collectives that it belongs to, or the group that it is given.
bool communicates(const c10::FunctionSchema& schema) {
  for (const char* const library : {"c10d::", "_c10d_", "symm_mem::"}) {
    if (schema.name().starts_with(library)) {
      return true;
    }
  }
  return std::ranges::any_of(schema.arguments(), [](const c10::Argument& argument) {
    return argument.name() == "group_name" || argument.name() == "process_group";
  });
}

// Why an operator is never run again in place of its outputs; empty: nothing speaks against it.
std::string obstacle(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (communicates(schema)) {
    return "communicates with other processes";
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded) || takes_generator(schema)) {
    return "draws random numbers";
  }
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    return "the host reads its result";
  }
  if (schema.returns().empty()) {
    return "returns nothing";
  }
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info() != nullptr) {
      return "returns a view";
    }
    if (result.type()->kind() != c10::TypeKind::TensorType) {
      return "returns something other than tensors";
    }
  }
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    return "is made of other operators";
  }
  return {};
}

// [Note: Collectives write what their schemas do not say]
// c10d's operators fill tensors that they are given, count no edit of them and declare none. Those
// arguments that are not named as inputs are taken for written; nothing but sends and barriers has
// none.
bool is_collective(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("c10d::") && schema.name().ends_with('_');
}

bool is_written(const c10::Argument& argument, bool collective) {
  if (const c10::AliasInfo* const alias = argument.alias_info()) {
    return alias->isWrite();
  }
  return collective && argument.type()->annotation_str().find("Tensor") != std::string::npos &&
         !argument.name().starts_with("input");
}

std::vector<size_t> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<size_t> written;
  const bool collective = is_collective(schema);
  for (size_t position = 0; position < schema.arguments().size(); ++position) {
    if (is_written(schema.arguments()[position], collective)) {
      written.push_back(position);
    }
  }
  return written;
}

// Whether an operator's kernel may write what another operator has made for it, without a call that
// anybody sees. Torch's own kernels run below autograd, where nothing is noted; what is composite
// has no kernel.
bool is_sealed(const c10::OperatorHandle& op) {
  return !op.schema().name().starts_with("aten::") &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

}  // namespace

OperatorRules::OperatorRules(const std::vector<std::string>& more) {
  for (const auto& [name, reason] : kNamed) {
    named_.emplace(name, reason);
  }
  for (const std::string& name : more) {
    const size_t colons = name.find("::");
    if (colons == std::string::npos || colons == 0 || colons + 2 == name.size() ||
        name.find('.') != std::string::npos) {
      throw std::invalid_argument(
          "operators are named as namespace::name, without an overload; "
          "found " +
          name);
    }
    named_.emplace(name, "named by the user");
  }
}

OperatorRule OperatorRules::rule_of(const c10::OperatorHandle& op) const {
  OperatorRule rule{.op = op, .kind = OperatorKind::kOther, .reason = {}, .written = {}};
  rule.written = written_arguments(op.schema());
  rule.sealed = is_sealed(op);
  if (!rule.written.empty()) {
    rule.kind = OperatorKind::kEdits;
    rule.reason = "writes its arguments";
    return rule;
  }
  const auto named = named_.find(op.operator_name().name);
  const bool pointwise = op.hasTag(at::Tag::pointwise);
  if (!pointwise && named == named_.end()) {
    rule.reason = "is not in the table";
    return rule;
  }
  rule.reason = obstacle(op);
  if (rule.reason.empty()) {
    rule.kind = OperatorKind::kRepeatable;
    if (op.operator_name().name == "aten::embedding") {
      rule.indices = op.schema().argumentIndexWithName("indices");
    }
    rule.reason = named == named_.end() ? "pointwise" : named->second;
    for (const c10::DispatchKey key : kAutocast) {
      if (op.hasKernelForDispatchKey(key)) {
        rule.autocast = rule.autocast.add(key);
      }
    }
  }
  return rule;
}

// The address of a schema's name stands for the operator: to copy the name of each call would take
// longer than all the rest. An operator that was taken out of the dispatcher may leave its address
// to another one, so the names are compared as well.
const OperatorRulePtr& OperatorRules::of(const at::RecordFunction& call) {
  Known& known = known_[call.name()];
  if (known.rule && std::strcmp(known.name.c_str(), call.name()) == 0 &&
      std::strcmp(known.overload.c_str(), call.overload_name()) == 0) {
    return known.rule;
  }
  known = {call.name(), call.overload_name(), nullptr};
  if (const auto name = call.operator_name()) {
    if (const auto op = c10::Dispatcher::singleton().findOp(*name)) {
      known.rule = std::make_shared<const OperatorRule>(rule_of(*op));
    }
  }
  return known.rule;
}

}  // namespace memswap
