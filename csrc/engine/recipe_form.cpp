#include "recipe_form.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "lane/device_streams.h"
#include "work/without_gil.h"

namespace memswap {
namespace {

// The end of a run on a stream, which owns the memory of what it made. Another stream that comes
// after it uses that memory as well, and the allocator hears of it.
class RunTicket final : public StreamTicket {
 public:
  explicit RunTicket(const c10::Storage& made)
      : device_(made.device()),
        made_(made.getWeakStorageImpl()),
        ran_(device_.type()),
        stream_(current()) {
    ran_.record(stream_);
  }

  void wait() override {
    const c10::Stream user = current();
    if (user == stream_) {
      return;
    }
    order_before(user);
    if (const auto made = made_.lock()) {
      c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(made->data_ptr(), user);
    }
  }
  void order_before(c10::Stream stream) override {
    if (stream.device_type() == device_.type()) {
      ran_.block(stream);
    } else {
      synchronize();
    }
  }
  bool done() override { return ran_.query(); }
  void synchronize() override {
    const WithoutGil without_gil;
    ran_.synchronize();
  }

 private:
  c10::Stream current() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  }

  const c10::Device device_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> made_;
  c10::Event ran_;
  const c10::Stream stream_;
};

TicketPtr end_of_run(const c10::Storage& made) {
  return made.device().is_cpu() ? nullptr : std::make_shared<RunTicket>(made);
}

}  // namespace

RecipeForm::RecipeForm(StepPtr step, const void* key, size_t nbytes, RecipeRuns runs,
                       Serialised serialised, MadeBytes made)
    : step_(std::move(step)),
      key_(key),
      nbytes_(nbytes),
      runs_(std::move(runs)),
      serialised_(std::move(serialised)),
      made_(std::move(made)) {}

void RecipeForm::join(std::shared_ptr<std::vector<std::weak_ptr<RecipeForm>>> siblings) {
  siblings_ = std::move(siblings);
  siblings_->push_back(weak_from_this());
}

void RecipeForm::listen(OperatorLog& log) {
  each_source(*step_, [&](const Step::Input&, const KnownTensor& tensor) {
    log.listen(tensor, weak_from_this());
  });
}

size_t RecipeForm::device_nbytes() const {
  return (settled_.storage ? nbytes_ : 0) + (ready_.storage ? nbytes_ : 0);
}

StorageRefPtr RecipeForm::result_of(const std::vector<at::Tensor>& results) const {
  const OperatorCall::Output* const output = step_->call->output_in(key_);
  if (output == nullptr) {
    throw TransferError("a saved tensor was not made by the operator that was to make it again");
  }
  const at::Tensor& result = results.at(output->position);
  if (result.storage().nbytes() != nbytes_) {
    throw TransferError("an operator that was run again has made " +
                        std::to_string(result.storage().nbytes()) + " bytes of " +
                        output->tensor.view.describe() + ", and " + std::to_string(nbytes_) +
                        " before");
  }
  return std::make_shared<StorageRef>(result.storage());
}

Returning RecipeForm::run(bool in_passing) {
  ++*runs_;
  const std::vector<at::Tensor> results = [&] {
    // After the run, whoever has what it made counts it.
    const auto over = c10::make_scope_exit([this] { made_(0); });
    return run_again(*step_, in_passing, nullptr, made_);
  }();
  Returning back{result_of(results), nullptr};
  back.arrival = end_of_run(back.storage->storage);
  if (siblings_) {
    for (const auto& one : *siblings_) {
      const auto sibling = one.lock();
      if (sibling && sibling.get() != this) {
        sibling->serve(results);
      }
    }
  }
  return back;
}

// Takes its own of what a sibling's run has made, if it has not got it yet.
void RecipeForm::serve(const std::vector<at::Tensor>& results) noexcept {
  if (ready_.storage || settled_.storage) {
    return;
  }
  try {
    ready_ = {result_of(results), nullptr};
    ready_.arrival = end_of_run(ready_.storage->storage);
  } catch (const std::exception&) {
    ready_ = {};  // its own demand will say what is wrong
  }
  note_change();
}

void RecipeForm::note_change() const {
  if (changed_) {
    changed_();
  }
}

Returning RecipeForm::bring(bool in_passing) {
  if (ready_.storage && in_passing) {
    return ready_;
  }
  if (ready_.storage) {
    Returning ready = std::exchange(ready_, {});
    note_change();
    return ready;
  }
  if (!settled_.storage) {
    return run(in_passing);
  }
  if (settled_.arrival) {
    settled_.arrival->wait();
  }
  const at::Tensor copy = copied(settled_.storage->storage);
  return {std::make_shared<StorageRef>(copy.storage()), end_of_run(copy.storage())};
}

void RecipeForm::before_edit() noexcept {
  try {
    serialised_([this] {
      if (!settled_.storage) {
        settled_ = ready_.storage ? std::exchange(ready_, {}) : run(true);
        note_change();
      }
    });
  } catch (const std::exception&) {
    // The source will say at the demand that it was edited.
  }
}

// --- the departure -----------------------------------------------------------------------------

CallTicket::CallTicket(OperatorCallPtr call, StorageRefPtr storage)
    : call_(std::move(call)), key_(storage->storage.unsafeGetStorageImpl()) {
  if (call_->ended()) {
    ended_ = true;
    failed_ = call_->output_in(key_) == nullptr;
  }
  if (!ended_ || failed_) {
    storage_ = std::move(storage);
  }
}

void CallTicket::call_ended() noexcept {
  StorageRefPtr dropped;
  const std::lock_guard lock(mutex_);
  ended_ = true;
  failed_ = call_->output_in(key_) == nullptr;
  if (!failed_) {
    dropped.swap(storage_);
  }
}

bool CallTicket::done() {
  const std::lock_guard lock(mutex_);
  return ended_;
}

bool CallTicket::failed() {
  const std::lock_guard lock(mutex_);
  return failed_;
}

std::shared_ptr<StorageRef> CallTicket::kept_storage() {
  const std::lock_guard lock(mutex_);
  return failed_ ? storage_ : nullptr;
}

void CallTicket::wait() {
  if (failed()) {
    throw TransferError("the operator that was to make a saved tensor again has not made it");
  }
}

}  // namespace memswap
