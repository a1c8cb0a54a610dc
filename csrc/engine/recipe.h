// A recipe: an operator, its arguments, and where those come from.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "clock.h"
#include "operator_log.h"

namespace memswap {

// What a recipe reads: a tensor that the engine keeps for it, wherever its bytes are. Whoever asks
// has the engine's lock, and keeps it.
class Source {
 public:
  virtual ~Source() = default;

  // The tensor, there before what the caller does next on its current stream. Throws what autograd
  // would throw of a saved tensor: that it was edited.
  virtual at::Tensor tensor() = 0;

  // The same for a look in passing: nothing is demanded, and what was away stays so. Throws
  // TransferError where the tensor is not as it was, or not there.
  virtual at::Tensor look() = 0;

  // The recipe that asked for `tensor` has run, or has failed.
  virtual void used() {}
};
using SourcePtr = std::shared_ptr<Source>;

// One operator of a recipe. Each input of its call is a source, or the result of another step.
struct Step {
  struct Input {
    SourcePtr source;
    std::shared_ptr<Step> step;  // where `source` is nullptr
    bool extra = false;          // a source that nothing but the recipe keeps
  };

  OperatorCallPtr call;
  std::vector<Input> inputs;
  int depth = 1;  // calls in a row, those of its sources that are recipes themselves included
};
using StepPtr = std::shared_ptr<const Step>;

// Calls `test(input, tensor)` with each source of a recipe, those of its further steps included, in
// the order in which it reads them, and with the tensor that the source is, until one says false.
// Whether all said true.
template <class AnyStep, class Test>
bool all_sources(AnyStep& step, const Test& test) {
  for (size_t which = 0; which < step.inputs.size(); ++which) {
    auto& input = step.inputs[which];
    if (input.step ? !all_sources(*input.step, test)
                   : !test(input, step.call->inputs()[which].tensor)) {
      return false;
    }
  }
  return true;
}

// The same for something that is done with each of them.
template <class AnyStep, class Visit>
void each_source(AnyStep& step, const Visit& visit) {
  all_sources(step, [&](auto& input, const KnownTensor& tensor) {
    visit(input, tensor);
    return true;
  });
}

// What a recipe does, in words: "silu(saved)", "mul(cast(parameter), saved)". Equal words at one
// place of a program mean equal recipes.
std::string words_of(const Step& step);
// The settings of torch under which its calls ran, in the order of `words_of`.
std::vector<ComputeModes> modes_of(const Step& step);

// [Note: Run again]
// A call is made again as it was made: below autograd and autocast, whose work its arguments are;
// unseen by dispatch modes; with the settings of then (compute_modes.h). It runs on the calling
// thread's current stream, like everything that is made for a backward step: its inputs are there
// in the order of that stream, and its results are allocated on it. Where that is another stream
// than the call was made on, the latter comes after it: whoever frees an input frees it in the
// order of the stream that it was used on.

// Hears how many bytes there are of what a recipe makes, each time that they become more.
using MadeBytes = std::function<void(int64_t)>;

// Runs the steps of a recipe: each call once, whatever needs it, and what it has made is let go of
// once all have read it. The results of the last call, one for each result of its operator.
// `in_passing`: sources are looked at (Source::look). Throws c10::OutOfMemoryError, what a source
// throws, and TransferError where an input's memory was taken away. `lap`: of the operators alone,
// without what their sources take to be there. `made_bytes` hears it while all sources are
// there.
std::vector<at::Tensor> run_again(const Step& step, bool in_passing = false, Lap* lap = nullptr,
                                  const MadeBytes& made_bytes = {});

// The bytes of a storage, as a tensor on its device; a copy of them; and whether those of two are
// the same, for which the host waits.
at::Tensor bytes_of(const c10::Storage& storage);
at::Tensor copied(const c10::Storage& storage);
bool same_bytes(const c10::Storage& one, const c10::Storage& other);

}  // namespace memswap
