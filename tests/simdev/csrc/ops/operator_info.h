// What the fallback must know of an operator, found once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops.h"

namespace simdev {

// What an operator's Meta kernel answered for one kind of arguments.
struct MetaResult {
  std::vector<c10::IValue> returns;
  std::vector<std::pair<size_t, at::Tensor>> out_arguments;  // out=, as the kernel resized them
};

struct OperatorInfo {
  const char* name = "";
  std::optional<size_t> generator;  // the argument of that name
  bool data_dependent = false;      // the results' shapes are not known before it has run
  bool pointwise = false;           // the results' shapes do not depend on any scalar's value
  bool all_in_place = true;         // every return is a written argument
  bool has_out = false;
  std::vector<bool> written;          // per argument
  std::vector<int> aliased_argument;  // per return: the written argument that it is, or -1
};

// Valid until the operator is deregistered.
std::shared_ptr<const OperatorInfo> info_of(const c10::OperatorHandle& op);

// [Note: meta memo]
// Many Meta kernels are Python decompositions that take 100 to 700 us, so their answers are kept,
// by operator and by everything about the arguments that the shapes may depend on. A number's value
// is part of that except for pointwise operators, whose numbers change with every step (a learning
// rate's bias correction). The memo is bounded, and emptied when an operator is deregistered, since
// another may take its address.
std::optional<std::string> memo_key(const c10::OperatorHandle& op, const OperatorInfo& info,
                                    const Stack& stack, size_t base);
std::shared_ptr<const MetaResult> recall(const std::string& key);
void memorise(const std::string& key, std::shared_ptr<const MetaResult> result);

}  // namespace simdev
