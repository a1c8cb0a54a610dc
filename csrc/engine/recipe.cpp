#include "recipe.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/Event.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <unordered_map>
#include <utility>

#include "storage/lend.h"
#include "work/ticket.h"
#include "work/without_gil.h"

namespace memswap {
namespace {

using Results = std::vector<at::Tensor>;
// What a call has made, until the last call has it that reads it.
struct MadeOnce {
  size_t readers = 0;  // calls that are still to be made
  bool made = false;
  Results results;
};
struct Made {
  std::unordered_map<const OperatorCall*, MadeOnce> calls;
  int64_t nbytes = 0;
  const MadeBytes& tell;
};
using Given = std::unordered_map<const Step::Input*, at::Tensor>;

// What has one name in the dispatcher and another one for people.
std::string short_name(const OperatorCall& call) {
  std::string name = call.rule().op.operator_name().name;
  name.erase(0, name.find("::") + 2);
  if (name == "_to_copy") {
    return "cast";
  }
  for (const char* prefix : {"native_", "_fused_", "_"}) {
    if (name.starts_with(prefix)) {
      return name.substr(std::char_traits<char>::length(prefix));
    }
  }
  return name;
}

void check_memory(const at::Tensor& tensor, const KnownTensor& expected) {
  if (!owns_memory(*tensor.storage().unsafeGetStorageImpl(), expected.view.end())) {
    throw TransferError(
        "memory of a tensor was taken away that a saved tensor was to be computed "
        "from again: " +
        expected.view.describe());
  }
}

// All sources, before anything runs: asking for them may need the interpreter.
void collect(const Step& step, bool in_passing, Given& given) {
  each_source(step, [&](const Step::Input& input, const KnownTensor& expected) {
    at::Tensor& tensor = given[&input];
    if (tensor.defined()) {
      return;
    }
    if (in_passing && expected.view.edited()) {
      throw TransferError("a tensor that a recipe reads was edited: " + expected.view.describe());
    }
    tensor = in_passing ? input.source->look() : input.source->tensor();
    check_memory(tensor, expected);
  });
}

// What another call made, as the call saw it.
at::Tensor seen_as(const KnownTensor& tensor, const Step& maker, const Results& results) {
  const OperatorCall::Output* const output = maker.call->output_in(tensor.key());
  if (output == nullptr) {
    throw TransferError("an operator that was to be run again has made something else");
  }
  return tensor.view.rebuild(StorageRef(results[output->position].storage()), false);
}

void count_readers(const Step& step, Made& made) {
  for (const Step::Input& input : step.inputs) {
    if (input.step && ++made.calls[input.step->call.get()].readers == 1) {
      count_readers(*input.step, made);
    }
  }
}

int64_t nbytes_of(const Results& results) {
  int64_t nbytes = 0;
  for (const at::Tensor& result : results) {
    nbytes += result.defined() ? static_cast<int64_t>(result.storage().nbytes()) : 0;
  }
  return nbytes;
}

// Makes a call, and first all whose results it reads: each once.
void run(const Step& step, const Given& given, Made& made) {
  const OperatorCall& call = *step.call;
  if (std::exchange(made.calls[&call].made, true)) {
    return;
  }
  for (const Step::Input& input : step.inputs) {
    if (input.step) {
      run(*input.step, given, made);
    }
  }
  std::vector<at::Tensor> inputs;
  inputs.reserve(step.inputs.size());
  for (size_t which = 0; which < step.inputs.size(); ++which) {
    const Step::Input& input = step.inputs[which];
    if (input.source) {
      inputs.push_back(given.at(&input));
      continue;
    }
    const MadeOnce& read = made.calls.at(input.step->call.get());
    inputs.push_back(seen_as(call.inputs()[which].tensor, *input.step, read.results));
  }
  std::vector<c10::IValue> stack = call.arguments_with(inputs);
  {
    const WithModes modes(call.modes());
    call.rule().op.callBoxed(&stack);
  }
  Results& results = made.calls.at(&call).results;
  for (const c10::IValue& result : stack) {
    results.push_back(result.toTensor());
  }
  made.nbytes += nbytes_of(results);
  if (made.tell) {
    made.tell(made.nbytes);
  }
  for (const Step::Input& input : step.inputs) {
    if (!input.step) {
      continue;
    }
    MadeOnce& read = made.calls.at(input.step->call.get());
    if (--read.readers == 0) {
      made.nbytes -= nbytes_of(read.results);
      read.results.clear();
    }
  }
}

void order_maker_after_this(const OperatorCall& call) {
  if (!call.stream()) {
    return;
  }
  const c10::impl::VirtualGuardImpl backend(call.stream()->device_type());
  const c10::Stream current = backend.getStream(call.stream()->device());
  if (current != *call.stream()) {
    c10::Event ran(current.device_type());
    ran.record(current);
    ran.block(*call.stream());
  }
}

void order_makers_after_this(const Step& step) {
  order_maker_after_this(*step.call);
  for (const Step::Input& input : step.inputs) {
    if (input.step) {
      order_makers_after_this(*input.step);
    }
  }
}

// See [Note: Run again].
struct AsItWas {
  const OperatorLog::Unobserved unobserved;
  const c10::AutoGradMode no_grad{false};
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_autocast_and_modes{
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace

std::string words_of(const Step& step) {
  std::string words = short_name(*step.call) + "(";
  for (size_t which = 0; which < step.inputs.size(); ++which) {
    const Step::Input& input = step.inputs[which];
    words += which == 0 ? "" : ", ";
    if (input.step) {
      words += words_of(*input.step);
    } else {
      const SavedView& view = step.call->inputs()[which].tensor.view;
      words += input.extra ? "kept" : view.of_leaf() ? "parameter" : "saved";
    }
  }
  return words + ")";
}

std::vector<ComputeModes> modes_of(const Step& step) {
  std::vector<ComputeModes> modes{step.call->modes()};
  for (const Step::Input& input : step.inputs) {
    if (input.step) {
      const std::vector<ComputeModes> inner = modes_of(*input.step);
      modes.insert(modes.end(), inner.begin(), inner.end());
    }
  }
  return modes;
}

std::vector<at::Tensor> run_again(const Step& step, bool in_passing, Lap* lap,
                                  const MadeBytes& made_bytes) {
  Given given;
  const auto used = c10::make_scope_exit([&] {
    for (const auto& [input, tensor] : given) {
      if (!in_passing && tensor.defined()) {
        input->source->used();
      }
    }
  });
  collect(step, in_passing, given);
  const WithoutGil without_gil;
  const AsItWas as_it_was;
  Made made{.calls = {}, .nbytes = 0, .tell = made_bytes};
  if (lap != nullptr) {
    lap->begin();
  }
  count_readers(step, made);
  run(step, given, made);
  if (lap != nullptr) {
    lap->end();
  }
  order_makers_after_this(step);
  return std::move(made.calls.at(step.call.get()).results);
}

at::Tensor bytes_of(const c10::Storage& storage) {
  const AsItWas as_it_was;
  at::Tensor bytes = at::empty({0}, at::TensorOptions(storage.device()).dtype(at::kByte));
  bytes.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(storage));
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return bytes;
}

at::Tensor copied(const c10::Storage& storage) {
  const AsItWas as_it_was;
  return bytes_of(storage).clone();
}

bool same_bytes(const c10::Storage& one, const c10::Storage& other) {
  const AsItWas as_it_was;
  return one.nbytes() == other.nbytes() && at::equal(bytes_of(one), bytes_of(other));
}

}  // namespace memswap
