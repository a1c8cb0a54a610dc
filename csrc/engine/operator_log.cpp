#include "operator_log.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "storage/storage.h"

namespace memswap {
namespace {

// A log that a thread is inside of.
struct Inside {
  OperatorLogPtr log;
  int times;
};

// What one thread is inside of, the innermost log last. Its callback is there while this is not
// empty.
struct ThreadLogs {
  std::vector<Inside> logs;
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  std::vector<const void*> editing;  // storages that operators write which have not ended
  OperatorCallPtr running;
  OperatorLog* running_in = nullptr;
  int sealed = 0;  // operators around, what is called in which makes nothing
  bool unobserved = false;
};
thread_local ThreadLogs thread_logs;

// Whether autocast changes what an operator does, for any device. What autocast does on another
// device alone is no business of it: a CPU's has no rule for the norms that CUDA's has.
bool is_autocast(const OperatorRule& rule) {
  return !(rule.autocast - c10::impl::tls_local_dispatch_key_set().excluded_).empty();
}

// Torch's kernels run below autograd, and so does what they call.
bool is_below_autograd() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has(
      c10::DispatchKey::AutogradFunctionality);
}

template <class Take>
void for_each_tensor(const c10::IValue& argument, const Take& take) {
  if (argument.isTensor()) {
    const at::Tensor& tensor = argument.toTensor();
    if (tensor.defined() && tensor.has_storage()) {
      take(tensor);
    }
  } else if (argument.isList()) {
    for (const c10::IValue& item : argument.toListRef()) {
      for_each_tensor(item, take);
    }
  }
}

// [Note: Indices are copied]
// Which rows a lookup reads is a batch of the user's, which nobody has computed and which numpy may
// fill anew without anybody counting it. Such a tensor is no source. But it is short, so the call
// has a copy of its own, made before the lookup has read it. In host memory alone: elsewhere a copy
// would have to be ordered.
constexpr size_t kMostIndices = 64 << 10;

std::optional<at::Tensor> copied_indices(const at::Tensor& indices) {
  if (!indices.device().is_cpu() || indices.nbytes() > kMostIndices ||
      !SavedView::capture(indices)) {
    return std::nullopt;
  }
  const OperatorLog::Unobserved unobserved;
  const at::AutoDispatchBelowADInplaceOrView below;
  return indices.clone();
}

// A number of Python's that was wrapped into a tensor for an operator: nobody else has it.
bool is_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

}  // namespace

std::optional<KnownTensor> KnownTensor::of(const at::Tensor& tensor) {
  std::optional<SavedView> view = SavedView::capture(tensor);
  if (!view) {
    return std::nullopt;
  }
  return KnownTensor{std::move(*view), tensor.storage().getWeakStorageImpl()};
}

at::Tensor KnownTensor::lock() const {
  auto held = storage.lock();
  if (!held) {
    return {};
  }
  return view.rebuild(StorageRef(c10::Storage(std::move(held)), view.counter()), true);
}

// --- one call ----------------------------------------------------------------------------------

bool OperatorCall::take(const at::Tensor& tensor, size_t position, std::optional<size_t> item) {
  std::optional<KnownTensor> known = KnownTensor::of(tensor);
  if (!known) {
    return false;
  }
  const c10::Device device = tensor.device();
  if (!stream_ && !device.is_cpu()) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }
  inputs_.push_back({std::move(*known), position, item});
  return true;
}

OperatorCallPtr OperatorCall::begin(OperatorRulePtr rule,
                                    c10::ArrayRef<const c10::IValue> arguments, uint64_t time) {
  OperatorCallPtr call(new OperatorCall(std::move(rule), time));
  const std::optional<size_t> indices = call->rule().indices;
  call->arguments_.reserve(arguments.size());
  for (size_t position = 0; position < arguments.size(); ++position) {
    const c10::IValue& argument = arguments[position];
    if (argument.isTensor()) {
      const at::Tensor& tensor = argument.toTensor();
      if (indices == position && tensor.defined()) {
        if (std::optional<at::Tensor> copy = copied_indices(tensor)) {
          call->arguments_.emplace_back(std::move(*copy));
          continue;
        }
      }
      if (tensor.defined() && !is_number(tensor)) {
        if (!call->take(tensor, position, std::nullopt)) {
          return nullptr;
        }
        call->arguments_.emplace_back();
        continue;
      }
    } else if (argument.isTensorList()) {
      const c10::List<at::Tensor> tensors = argument.toTensorList();
      for (size_t item = 0; item < tensors.size(); ++item) {
        if (!call->take(tensors.get(item), position, item)) {
          return nullptr;
        }
      }
      call->arguments_.emplace_back();
      continue;
    } else if (argument.isList() || argument.isObject() || argument.isGenericDict()) {
      // A list of numbers is a copy of its own; of anything else nobody knows what it holds.
      if (!argument.isIntList() && !argument.isDoubleList() && !argument.isBoolList()) {
        return nullptr;
      }
    }
    call->arguments_.push_back(argument);
  }
  return call;
}

std::vector<c10::IValue> OperatorCall::arguments_with(
    const std::vector<at::Tensor>& tensors) const {
  std::vector<c10::IValue> arguments = arguments_;
  for (size_t which = 0; which < inputs_.size(); ++which) {
    const Input& input = inputs_[which];
    if (!input.item) {
      arguments[input.position] = tensors[which];
      continue;
    }
    if (*input.item == 0) {
      arguments[input.position] = c10::List<at::Tensor>();
    }
    arguments[input.position].toTensorList().push_back(tensors[which]);
  }
  return arguments;
}

bool OperatorCall::reads(const void* key) const {
  return std::any_of(inputs_.begin(), inputs_.end(),
                     [&](const Input& input) { return input.tensor.key() == key; });
}

const OperatorCall::Output* OperatorCall::output_in(const void* key) const {
  const auto found = std::find_if(outputs_.begin(), outputs_.end(),
                                  [&](const Output& output) { return output.tensor.key() == key; });
  return found == outputs_.end() ? nullptr : &*found;
}

void OperatorCall::end(const std::vector<c10::IValue>& results) noexcept {
  try {
    for (size_t position = 0; position < results.size(); ++position) {
      if (!results[position].isTensor() || !results[position].toTensor().defined()) {
        continue;
      }
      std::optional<KnownTensor> known = KnownTensor::of(results[position].toTensor());
      // What an operator returns of its arguments (`contiguous` of what is contiguous), and what
      // two of its results share, it has not made.
      const bool shared = !known || output_in(known->key()) != nullptr || reads(known->key());
      if (!shared) {
        outputs_.push_back({std::move(*known), position});
      }
    }
  } catch (const std::exception&) {
    outputs_.clear();  // without memory for the books: as if nothing was known
  }
  ended_ = true;
  for (const auto& watcher : std::exchange(watchers_, {})) {
    if (const auto alive = watcher.lock()) {
      alive->call_ended();
    }
  }
}

// --- the callback ------------------------------------------------------------------------------

struct OperatorLog::Context final : at::ObserverContext {
  Context(OperatorLogPtr of, OperatorCallPtr made) : log(std::move(of)), call(std::move(made)) {}
  const OperatorLogPtr log;
  const OperatorCallPtr call;
};

// An operator that edits, or is sealed, or both.
struct OperatorLog::Editing final : at::ObserverContext {
  explicit Editing(bool is_sealed) : sealed(is_sealed ? 1 : 0) { thread_logs.sealed += sealed; }
  ~Editing() override {
    thread_logs.editing.resize(std::min(before, thread_logs.editing.size()));
    thread_logs.sealed -= sealed;
  }
  const size_t before = thread_logs.editing.size();
  const int sealed;
};

std::unique_ptr<at::ObserverContext> OperatorLog::call_begins(const at::RecordFunction& call) {
  ThreadLogs& thread = thread_logs;
  if (thread.unobserved || thread.running || thread.logs.empty()) {
    return nullptr;
  }
  const OperatorLogPtr& log = thread.logs.back().log;
  const OperatorRulePtr rule = log->rule_of(call);
  if (!rule || (rule->kind == OperatorKind::kOther && !rule->sealed)) {
    return nullptr;
  }
  if (rule->kind != OperatorKind::kRepeatable) {
    auto editing = std::make_unique<Editing>(rule->sealed);
    for (const size_t position : rule->written) {
      for_each_tensor(call.inputs()[position], [&](const at::Tensor& tensor) {
        for (const Inside& inside : thread.logs) {
          inside.log->before_edit(tensor);
        }
        thread.editing.push_back(tensor.storage().unsafeGetStorageImpl());
      });
    }
    return editing;
  }
  if (thread.sealed > 0 || is_below_autograd() || is_autocast(*rule) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/true)) {
    return nullptr;
  }
  OperatorCallPtr made = OperatorCall::begin(rule, call.inputs(), log->tick());
  if (!made) {
    return nullptr;
  }
  log->hold_inputs(*made);
  thread.running = made;
  thread.running_in = log.get();
  return std::make_unique<Context>(log, std::move(made));
}

void OperatorLog::call_ends(const at::RecordFunction& call, at::ObserverContext* context) {
  const auto* const repeatable = dynamic_cast<const Context*>(context);
  if (repeatable == nullptr) {
    return;
  }
  const Context& ended = *repeatable;
  thread_logs.running = nullptr;
  thread_logs.running_in = nullptr;
  ended.call->end(call.outputs());
  ended.log->remember(ended.call);
}

// --- the log -----------------------------------------------------------------------------------

void OperatorLog::enter() {
  ThreadLogs& thread = thread_logs;
  if (!thread.logs.empty() && thread.logs.back().log.get() == this) {
    ++thread.logs.back().times;
    return;
  }
  if (thread.logs.empty()) {
    thread.callback = at::addThreadLocalCallback(at::RecordFunctionCallback(call_begins, call_ends)
                                                     .needsInputs(true)
                                                     .needsOutputs(true)
                                                     .scopes({at::RecordScope::FUNCTION}));
  }
  thread.logs.push_back({shared_from_this(), 1});
}

void OperatorLog::leave() noexcept {
  ThreadLogs& thread = thread_logs;
  const auto found = std::find_if(thread.logs.rbegin(), thread.logs.rend(),
                                  [&](const Inside& one) { return one.log.get() == this; });
  if (found == thread.logs.rend() || --found->times > 0) {
    return;
  }
  const OperatorLogPtr alive = found->log;
  thread.logs.erase(std::next(found).base());
  if (thread.logs.empty()) {
    at::removeCallback(std::exchange(thread.callback, at::INVALID_CALLBACK_HANDLE));
  }
}

bool OperatorLog::others_listen() {
  const size_t own = thread_logs.logs.empty() ? 0 : 1;
  return at::hasGlobalCallbacks() ||
         at::get_record_function_tls_().sorted_tls_callbacks_.size() > own;
}

bool OperatorLog::inside() const {
  const auto& logs = thread_logs.logs;
  return std::any_of(logs.begin(), logs.end(),
                     [&](const Inside& one) { return one.log.get() == this; });
}

OperatorCallPtr OperatorLog::running() const {
  return thread_logs.running_in == this ? thread_logs.running : nullptr;
}

OperatorRulePtr OperatorLog::rule_of(const at::RecordFunction& call) {
  const std::lock_guard lock(mutex_);
  return rules_.of(call);
}

OperatorCallPtr OperatorLog::maker(const void* key, uint32_t version) const {
  const std::lock_guard lock(mutex_);
  const auto found = made_.find(key);
  return found == made_.end() || found->second.version != version ? nullptr : found->second.call;
}

uint64_t OperatorLog::tick() {
  const std::lock_guard lock(mutex_);
  return ++time_;
}

bool OperatorLog::edited_since(const OperatorCall& call, const KnownTensor& input) const {
  const auto& editing = thread_logs.editing;
  if (input.view.edited() ||
      std::find(editing.begin(), editing.end(), input.key()) != editing.end()) {
    return true;
  }
  const std::lock_guard lock(mutex_);
  const auto found = edited_.find(input.key());
  return found != edited_.end() && found->second.time > call.time();
}

OperatorCallPtr OperatorLog::maker(const KnownTensor& tensor) const {
  return tensor.view.edited() ? nullptr : maker(tensor.key(), tensor.view.version());
}

void OperatorLog::remember(const OperatorCallPtr& call) {
  const std::lock_guard lock(mutex_);
  for (const OperatorCall::Output& output : call->outputs()) {
    made_.insert_or_assign(output.tensor.key(),
                           Made{call, output.tensor.storage, output.tensor.view.version()});
  }
}

void OperatorLog::before_edit(const at::Tensor& tensor) {
  const void* const key = tensor.storage().unsafeGetStorageImpl();
  std::vector<std::shared_ptr<EditListener>> listening;
  {
    const std::lock_guard lock(mutex_);
    made_.erase(key);
    edited_.insert_or_assign(key, Edited{tensor.storage().getWeakStorageImpl(), ++time_});
    const auto [first, last] = listeners_.equal_range(key);
    for (auto one = first; one != last; ++one) {
      if (auto alive = one->second.listener.lock()) {
        listening.push_back(std::move(alive));
      }
    }
    listeners_.erase(first, last);
  }
  for (const auto& listener : listening) {
    listener->before_edit();
  }
}

void OperatorLog::listen(const KnownTensor& tensor, std::weak_ptr<EditListener> listener) {
  const std::lock_guard lock(mutex_);
  if (listeners_.size() >= sweep_listeners_at_) {
    std::erase_if(listeners_, [](const auto& one) { return one.second.listener.expired(); });
    sweep_listeners_at_ = std::max<size_t>(64, 2 * listeners_.size());
  }
  listeners_.emplace(tensor.key(), Listener{tensor.storage, std::move(listener)});
}

void OperatorLog::clear() {
  std::unordered_map<const void*, Made> dropped;
  std::deque<Held> held;
  const std::lock_guard lock(mutex_);
  dropped.swap(made_);
  held.swap(held_);
  edited_.clear();
  cleared_at_ = time_;
}

void OperatorLog::hold(Holds holds) {
  const std::lock_guard lock(mutex_);
  holds_ = std::move(holds);
}

void OperatorLog::hold_inputs(const OperatorCall& call) {
  std::vector<Held> late;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  while (!held_.empty() && held_.front().time + kHeldFor < call.time()) {
    late.push_back(std::move(held_.front()));
    held_.pop_front();
  }
  const auto found = holds_.find(moment_of(call));
  if (found == holds_.end()) {
    return;
  }
  Held held{&call, call.time(), {}};
  for (const Hold& hold : found->second) {
    if (hold.op == call.rule().op.operator_name().name && hold.input < call.inputs().size()) {
      const KnownTensor& input = call.inputs()[hold.input].tensor;
      auto storage = input.storage.lock();
      if (storage && input.view.storage_nbytes() == hold.nbytes) {
        held.storages.push_back(std::move(storage));
      }
    }
  }
  if (!held.storages.empty()) {
    held_.push_back(std::move(held));
  }
}

void OperatorLog::let_go(const OperatorCall& call) {
  std::vector<Held> dropped;
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(held_.begin(), held_.end(), [&](const Held& one) { return one.call == &call; });
  if (found != held_.end()) {
    dropped.push_back(std::move(*found));
    held_.erase(found);
  }
}

size_t OperatorLog::size() const {
  const std::lock_guard lock(mutex_);
  return made_.size();
}

OperatorLog::Unobserved::Unobserved() : before_(std::exchange(thread_logs.unobserved, true)) {}
OperatorLog::Unobserved::~Unobserved() { thread_logs.unobserved = before_; }

}  // namespace memswap
