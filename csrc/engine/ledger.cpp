#include "ledger.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace memswap {

namespace {

// c10 has no name for the identity of a counter: it is the one pointer that a counter consists of.
const void* identity_of(const c10::VariableVersion& counter) {
  const void* identity = nullptr;
  static_assert(sizeof(counter) == sizeof(identity));
  std::memcpy(&identity, static_cast<const void*>(&counter), sizeof(identity));
  return identity;
}

}  // namespace

// [Note: Several counters on one storage]
// Views share their base's version counter, so a number tells whether the bytes are the same. But
// some tensors share a storage and count for themselves: the outputs of unsafe_chunk and
// unsafe_split (torch's recurrent cells on a CPU edit them one after another), `.data`, buffers
// that inductor reinterprets. Equal numbers say nothing there, unless neither was ever edited. An
// edited part stays, because its sister may be edited while the storage is on its way.

// [Note: Parts that nobody has saved yet]
// Memory may be filled part after part without an edit being counted: by numpy, a collective, a
// kernel of the user's own. Autograd reads a part in place, whenever it was filled, but a storage
// that left took along what was there then. So a part that nothing had saved by then is not taken
// for what left, unless the same node saves it, in one go with the others; it stays. This is asked
// of memory that no operator made (an empty tensor, an array): results of operators are complete
// when they are first saved.

void Ledger::remember(const SavedView& view, const KnownPtr& known) {
  known_.insert_or_assign(view.storage_key(),
                          Row{known, known.get(), view.counter(), view.version(), view.begin(),
                              view.end(), at::sequence_number::peek(), !known->is_entry()});
}

void Ledger::forget(const void* key, const Known* known) {
  fetched_.erase(key);
  const auto found = known_.find(key);
  if (found != known_.end() && found->second.address == known) {
    known_.erase(found);
  }
}

Ledger::Found Ledger::find(const SavedView& view) {
  const auto found = known_.find(view.storage_key());
  if (found == known_.end()) {
    return {};
  }
  Row& row = found->second;
  if (row.stays) {
    return {.known = row.known.lock()};  // whatever the content
  }
  if (identity_of(row.counter) != identity_of(view.counter())) {
    if (view.version() != 0 || row.version != 0 || row.counter.current_version() != 0) {
      return {.conflicts = true};
    }
  } else if (row.version != view.version()) {
    return {};
  }
  KnownPtr known = row.known.lock();
  if (!known) {  // it is dying
    return {};
  }
  if (!view.computed() && (view.begin() < row.begin || view.end() > row.end)) {
    if (row.node != at::sequence_number::peek()) {
      return {.conflicts = true};
    }
    row.begin = std::min(row.begin, view.begin());
    row.end = std::max(row.end, view.end());
  }
  return {.known = std::move(known)};
}

void Ledger::keep(std::string_view reason, int64_t nbytes) {
  auto found = kept_.find(reason);
  if (found == kept_.end()) {
    found = kept_.emplace(reason, Kept{}).first;
  }
  ++found->second.tensors;
  found->second.nbytes += nbytes;
}

void Ledger::tell_once(std::string_view reason, const std::string& message) {
  if (warn && told_.emplace(reason).second) {
    untold_.push_back(message);
    has_untold_ = true;
  }
}

std::optional<std::string> Ledger::take_untold() {
  std::optional<std::string> oldest;
  if (!untold_.empty()) {
    oldest = std::move(untold_.front());
    untold_.pop_front();
  }
  has_untold_ = !untold_.empty();
  return oldest;
}

void Ledger::reset() {
  counters.reset();
  kept_.clear();
}

Stay::Stay(std::shared_ptr<Ledger> ledger, const SavedView& view)
    : ledger_(std::move(ledger)),
      key_(view.storage_key()),
      nbytes_(static_cast<int64_t>(view.storage_nbytes())) {}

std::shared_ptr<Stay> Stay::make(std::shared_ptr<Ledger> ledger, const SavedView& view) {
  std::shared_ptr<Stay> made(new Stay(std::move(ledger), view));
  made->ledger_->counters.resident(made->nbytes_);
  made->ledger_->remember(view, made);
  return made;
}

Stay::~Stay() {
  ledger_->forget(key_, this);
  ledger_->counters.resident(-nbytes_);
}

}  // namespace memswap
