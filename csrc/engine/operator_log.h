// Which operator made which storage, for as long as a hook scope is open.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "compute_modes.h"
#include "operator_rules.h"
#include "storage/saved_view.h"

namespace memswap {

// A tensor that an operator was given or made: which one it is, without its memory. While this
// exists, the address of its storage names no other one.
struct KnownTensor {
  static std::optional<KnownTensor> of(const at::Tensor& tensor);

  const void* key() const { return view.storage_key(); }

  // The tensor, if somebody still holds its storage; else an undefined one.
  at::Tensor lock() const;

  SavedView view;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
};

// One call of a repeatable operator. Its arguments are complete at once, what it made when it has
// ended; from then on nothing of it changes. Holds no memory of tensors, but for the numbers that
// Python's arithmetic wraps into tensors, and copies of what a lookup was told to look up ([Note:
// Indices are copied] in operator_log.cpp).
class OperatorCall {
 public:
  // Somebody who waits for the end, on the thread that makes the call.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void call_ended() noexcept = 0;
  };

  struct Input {
    KnownTensor tensor;
    size_t position;             // of the argument
    std::optional<size_t> item;  // of a list of tensors
  };

  struct Output {
    KnownTensor tensor;
    size_t position;  // of the result
  };

  // Nothing: an argument is a tensor that a storage alone does not describe.
  static std::shared_ptr<OperatorCall> begin(OperatorRulePtr rule,
                                             c10::ArrayRef<const c10::IValue> arguments,
                                             uint64_t time);

  const OperatorRule& rule() const { return *rule_; }
  uint64_t time() const { return time_; }  // among the calls and edits of one log
  const std::vector<Input>& inputs() const { return inputs_; }
  bool reads(const void* key) const;
  const ComputeModes& modes() const { return modes_; }
  // On which the call was made; nothing: in host memory.
  const std::optional<c10::Stream>& stream() const { return stream_; }

  bool ended() const { return ended_; }
  const std::vector<Output>& outputs() const { return outputs_; }
  // What it made of this storage; nullptr: it has not ended, or made something else.
  const Output* output_in(const void* key) const;

  // The arguments for one more call, with `tensors` for its inputs, one for one.
  std::vector<c10::IValue> arguments_with(const std::vector<at::Tensor>& tensors) const;

  // Tells `watcher` when the call has ended. Only while it has not.
  void add_watcher(std::weak_ptr<Watcher> watcher) { watchers_.push_back(std::move(watcher)); }
  void end(const std::vector<c10::IValue>& results) noexcept;

 private:
  OperatorCall(OperatorRulePtr rule, uint64_t time) : rule_(std::move(rule)), time_(time) {}
  bool take(const at::Tensor& tensor, size_t position, std::optional<size_t> item);

  const OperatorRulePtr rule_;
  const uint64_t time_;
  const ComputeModes modes_ = ComputeModes::current();
  std::vector<c10::IValue> arguments_;  // tensors left out
  std::vector<Input> inputs_;
  std::optional<c10::Stream> stream_;
  std::vector<Output> outputs_;
  std::vector<std::weak_ptr<Watcher>> watchers_;
  bool ended_ = false;
};
using OperatorCallPtr = std::shared_ptr<OperatorCall>;

// Somebody who needs the bytes of storages as they are.
class EditListener {
 public:
  virtual ~EditListener() = default;
  // A storage is about to be edited, by an operator that the calling thread has begun.
  virtual void before_edit() noexcept = 0;
};

// [Note: Who made a storage]
// Dispatcher calls nest: linear under autocast calls linear with casts, which calls addmm. The
// innermost call of a repeatable operator is the maker: what that calls (an empty, a copy into it)
// is its own business and is not looked at. An operator that autocast has a rule for is left alone
// as long as autocast is on: what it calls then, with its arguments cast, is the maker; and so is
// every operator under a TorchDispatchMode, which may call others in its place. Views have the
// storage of what they are views of, so no call makes them.
//
// A kernel may copy its input and write into the copy by its own means: neither what it calls below
// autograd nor what an operator calls that is not torch's own is the maker of anything.
//
// An operator that edits may first copy what it edits, for autograd (mul_ saves a clone of its
// input): until it has ended, what it writes counts as edited.
//
// An input may be gone before anybody asks for what was made of it: what a block adds to its input
// is dead when the next block saves the sum. Who is going to want it tells the log beforehand
// (`hold`), by the moments of an iteration that went the same way; the log then holds its storage
// from the call on, until it is told to let go, for `kHeldFor` moments at most.
//
// A call's results are known when it has ended. An operator that saves its own result (tanh, a
// softmax) packs before: `running` is what makes it.

// One manager's log. Observes the operators of the threads that have entered it, by a callback that
// each thread has for as long as it is inside some log; of nested logs the innermost one learns who
// made what, and all of them of edits. Thread-safe.
class OperatorLog : public std::enable_shared_from_this<OperatorLog> {
 public:
  explicit OperatorLog(OperatorRules rules) : rules_(std::move(rules)) {}
  OperatorLog(const OperatorLog&) = delete;
  OperatorLog& operator=(const OperatorLog&) = delete;

  // The calling thread enters and leaves; it may be inside several times.
  void enter();
  void leave() noexcept;
  // Whether the calling thread is inside.
  bool inside() const;

  // Who made a storage that is at the version it was made with; nullptr: nobody knows.
  OperatorCallPtr maker(const KnownTensor& tensor) const;
  OperatorCallPtr maker(const void* key, uint32_t version) const;

  // Whether an input's storage was edited since the call, by whatever counter that was counted, or
  // an operator that the calling thread is in is about to ([Note: Who made a storage]).
  bool edited_since(const OperatorCall& call, const KnownTensor& input) const;

  // The repeatable call that the calling thread is in, for this log; nullptr: in none.
  OperatorCallPtr running() const;

  // `listener` hears of edits of that storage that begin inside this log.
  void listen(const KnownTensor& tensor, std::weak_ptr<EditListener> listener);

  // A tensor is about to be edited: who listens hears of it. Operators inside the log need not say
  // so.
  void before_edit(const at::Tensor& tensor);

  // Forgets who made what. Who listens goes on listening. Moments are counted anew.
  void clear();

  // An input that a call of some moment is to hold, if it is such a call.
  struct Hold {
    bool operator==(const Hold&) const = default;

    std::string op;
    size_t input;  // which of OperatorCall::inputs
    size_t nbytes;
  };
  using Holds = std::unordered_map<uint64_t, std::vector<Hold>>;  // by the moment
  // From here on.
  void hold(Holds holds);
  // Whoever wanted what was held for a call has it, or never will.
  void let_go(const OperatorCall& call);
  // Of a call since the last `clear`.
  uint64_t moment_of(const OperatorCall& call) const { return call.time() - cleared_at_; }
  size_t size() const;

  // Whether anybody but logs hears of the calling thread's operators, such as a profiler.
  static bool others_listen();

  // The calling thread's operators are nobody's business for as long as this lives.
  class Unobserved {
   public:
    Unobserved();
    Unobserved(const Unobserved&) = delete;
    Unobserved& operator=(const Unobserved&) = delete;
    ~Unobserved();

   private:
    bool before_;
  };

 private:
  struct Made {
    OperatorCallPtr call;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being used again
    uint32_t version;
  };
  struct Listener {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<EditListener> listener;
  };
  struct Edited {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    uint64_t time;
  };
  struct Held {
    const OperatorCall* call;
    uint64_t time;
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  };
  struct Context;
  struct Editing;
  static constexpr uint64_t kHeldFor = 64;

  static std::unique_ptr<at::ObserverContext> call_begins(const at::RecordFunction& call);
  static void call_ends(const at::RecordFunction& call, at::ObserverContext* context);

  OperatorRulePtr rule_of(const at::RecordFunction& call);
  uint64_t tick();
  void remember(const OperatorCallPtr& call);
  void hold_inputs(const OperatorCall& call);

  mutable std::mutex mutex_;
  OperatorRules rules_;
  std::unordered_map<const void*, Made> made_;
  std::unordered_multimap<const void*, Listener> listeners_;
  std::unordered_map<const void*, Edited> edited_;
  uint64_t time_ = 0;
  uint64_t cleared_at_ = 0;
  Holds holds_;
  std::deque<Held> held_;  // the oldest first
  size_t sweep_listeners_at_ = 64;
};
using OperatorLogPtr = std::shared_ptr<OperatorLog>;

}  // namespace memswap
