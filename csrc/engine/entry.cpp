#include "entry.h"

#include <ATen/Tensor.h>
#include <c10/util/Exception.h>

#include <sstream>
#include <utility>

#include "engine.h"
#include "iteration.h"

namespace memswap {

namespace {

// Nobody will wait for its ticket any more. One that holds a storage lets go of it, in order.
void abandon(const TicketPtr& ticket) {
  if (ticket) {
    ticket->abandon();
  }
}

std::string described(const at::Tensor& tensor) {
  if (const std::optional<SavedView> view = SavedView::capture(tensor)) {
    return view->describe();
  }
  std::ostringstream out;
  out << tensor.toString() << ' ';
  if (tensor.is_nested() && tensor.layout() == c10::kStrided) {  // it has a size for each row
    const at::Tensor sizes = tensor._nested_tensor_size();
    for (int64_t row = 0; row < sizes.size(0); ++row) {
      const at::Tensor of_row = sizes[row].contiguous();
      out << (row == 0 ? "[" : ", ")
          << at::IntArrayRef(of_row.const_data_ptr<int64_t>(), static_cast<size_t>(sizes.size(1)));
    }
    out << ']';
  } else {
    out << tensor.sym_sizes();
  }
  out << " on " << tensor.device();
  return out.str();
}

}  // namespace

Entry::Entry(EnginePtr engine, const SavedView& view, const StorageRef& ref, bool for_recipe)
    : engine_(std::move(engine)), device_(view.device()), for_recipe_(for_recipe), identity_(ref) {}

EntryPtr Entry::make(EnginePtr engine, const SavedView& view, const StorageRef& storage,
                     bool for_recipe) {
  EntryPtr made(new Entry(std::move(engine), view, storage, for_recipe));
  Ledger& ledger = made->engine_->ledger;
  made->residence_.emplace(ledger.counters, static_cast<int64_t>(view.storage_nbytes()));
  ledger.remember(view, made);
  return made;
}

// First of all nobody finds it any more: a ticket may let other threads run, and none of them may
// take hold of an entry that is dying.
Entry::~Entry() {
  forget_in_ledger();
  EntryList::leave(this);
  residence_.reset();
  abandon(departure_);
  abandon(arrival_);
  departure_.reset();
  arrival_.reset();
  storage_.reset();
  away_.reset();
}

std::string Entry::described() const {
  return "<entry of " + std::to_string(nbytes()) + " bytes, " + word_of(state()) + ", " +
         std::to_string(handles_) + " save(s)>";
}

void Entry::require(bool legal_step, State to) const {
  if (!legal_step) {
    throw EntryStateError(described() + " cannot go from " + word_of(state()) + " to " +
                          word_of(to) +
                          "; this is a bug in memswap, please report it with this traceback");
  }
}

void Entry::move(State to) { require(residence_->move(to), to); }

void Entry::place_in(IterationPtr iteration, size_t index) {
  iteration_ = std::move(iteration);
  index_ = index;
}

// From here on another storage may have this address.
void Entry::forget_in_ledger() { engine_->ledger.forget(identity_->key(), this); }

void Entry::count_away() {
  if (away_) {
    residence_->count_away(static_cast<int64_t>(away_->device_nbytes()),
                           static_cast<int64_t>(away_->pool_nbytes()));
  }
}

void Entry::release_frame() {
  if (const AwayFormPtr away = away_) {
    away->wait_sent();
    count_away();
  }
}

void Entry::hold(StorageRefPtr storage, Order order) {
  hold(std::move(storage));
  order_ = std::move(order);
}

int Entry::depth() const {
  const auto* const recipe = order_ ? std::get_if<Leaving>(&*order_) : nullptr;
  const AwayFormPtr& away = recipe != nullptr ? recipe->away : away_;
  return away ? away->depth() : 0;
}

void Entry::leave(Leaving leaving) {
  require(residence_->leave(), State::kLeaving);
  departure_ = std::move(leaving.departure);
  away_ = std::move(leaving.away);
  if (away_->recomputes()) {
    ++counters().recipe_storages;
    counters().recipe_bytes += nbytes();
    away_->on_change([self = weak_from_this()] {
      if (const EntryPtr entry = self.lock()) {
        entry->count_away();
      }
    });
  }
  count_away();
  storage_.reset();
}

// A send has failed: its ticket gives the storage back, and the user hears why, once.
void Entry::take_back(Ticket& departure) {
  if (state() != State::kResident) {
    move(State::kResident);
  }
  residence_->count_resident(true);
  storage_ = departure.kept_storage();
  Ledger& ledger = engine_->ledger;
  ledger.keep(away_->short_of(), nbytes());
  drop_away();
  try {
    departure.synchronize();
  } catch (const TransferError& error) {
    ledger.tell_once("transfer", std::string("a storage stays where it is: ") + error.what());
  }
}

bool Entry::notice_sent() {
  const TicketPtr departure = departure_;
  if (!departure || !departure->done()) {
    return false;
  }
  if (away_ && departure->failed()) {
    take_back(*departure);
  }
  return true;
}

// Whether the bytes of a storage that is gone are elsewhere for sure. If they could not be sent,
// the ticket gives the storage back.
bool Entry::sent_safely(bool wait) {
  if (wait) {
    const TicketPtr departure = departure_;
    try {
      departure->wait();
      return true;
    } catch (const TransferError&) {
      // noticed below
    }
  }
  return notice_sent() && away_ != nullptr;
}

bool Entry::notice_gone(bool wait) {
  const bool left = state() == State::kLeaving || state() == State::kAway;
  if (!left || !identity_->expired() || (away_->frees_first() && !sent_safely(wait))) {
    return false;
  }
  if (state() == State::kLeaving) {
    require(residence_->go(), State::kAway);
    if (iteration_) {
      iteration_->at_peak.let_go(index_);
    }
  }
  return true;
}

bool Entry::lingers() { return state() == State::kLeaving && !notice_gone(false); }

int64_t Entry::returning_nbytes() {
  if (!away_ || storage_ || !notice_gone(false)) {
    return 0;
  }
  return nbytes() + static_cast<int64_t>(away_->returning_nbytes());
}

// It came back as this, behind that ticket.
void Entry::take(Returning back) {
  require(residence_->come_back(), State::kReturning);
  arrival_ = std::move(back.arrival);
  forget_in_ledger();
  identity_.emplace(*back.storage);
  engine_->ledger.note_fetched(identity_->key());
  storage_ = std::move(back.storage);
  fetched_ = true;
  readings_left_ = handles_;
  count_away();  // a frame may have come back too
}

// Starts bringing the bytes back into a storage of memswap's own.
void Entry::fetch() {
  const AwayFormPtr away = away_;
  if (!away) {
    throw std::logic_error("a storage that is not away cannot be fetched");
  }
  take(away->bring());
}

// The same ahead of a demand, as far as there is memory.
Ahead Entry::try_fetch() {
  try {
    fetch();
    engine_->ledger.note_room();
    return Ahead::kFetches;
  } catch (const c10::OutOfMemoryError&) {
    engine_->ledger.note_full();
    return Ahead::kNoMemory;
  } catch (const TransferError&) {
    return Ahead::kNothing;  // its demand says what is wrong
  }
}

Ahead Entry::fetch_ahead() {
  if (!away_ || storage_ || !away_->can_fetch_ahead() || !notice_gone(false)) {
    return Ahead::kNothing;
  }
  return engine_->ledger.passes_look() ? Ahead::kNoMemory : try_fetch();
}

// Holds the storage, if anybody does. Whether there was one.
bool Entry::hold_if_alive() {
  auto held = identity_->lock();
  if (!held) {
    return false;
  }
  storage_ = std::move(held);
  readings_left_ = handles_;
  engine_->planning.hold_again(identity_->key());
  residence_->count_resident(true);
  return true;
}

// Whoever uses the storage holds it from here on, and the entry does not: it is away, or leaving
// again where its send may be under way. One that could not be sent stays. See [Note: In use].
void Entry::drop_storage() {
  const bool sent = fetched_ || notice_sent();
  if (!away_) {  // the send has failed: the storage stays
    return;
  }
  const StorageRefPtr dropped = std::exchange(storage_, nullptr);
  move(sent ? State::kAway : State::kLeaving);
  if (!sent) {
    engine_->departing.add(this);
    return;
  }
  residence_->count_resident(false);
  if (dropped.use_count() > 1 || dropped->storage.use_count() > 1) {
    engine_->planning.count_in_use(*this);
  }
}

void Entry::drop_away() {
  const AwayFormPtr dropped = std::exchange(away_, nullptr);
  residence_->count_away(0, 0);
}

Ahead Entry::load(int64_t readings) {
  notice_sent();  // a send that failed gives the storage back
  if (!away_ || storage_) {
    return Ahead::kNothing;
  }
  Ahead came = Ahead::kNothing;
  if (hold_if_alive()) {
    move(State::kResident);
  } else if (away_->recomputes() || !notice_gone(true)) {
    return Ahead::kNothing;  // or it could not be sent, and was given back
  } else if (came = try_fetch(); came == Ahead::kNoMemory) {
    return came;
  }
  readings_left_ += handles_ * (readings - 1);
  return came;
}

void Entry::let_go() {
  if (!storage_ || !away_) {
    return;
  }
  if (state() == State::kReturning) {  // nobody has it yet but its ticket
    move(State::kResident);
    abandon(arrival_);
  }
  drop_storage();
}

void Entry::use() {
  ++handles_;
  ++readings_left_;
}

void Entry::used() {
  --handles_;
  if (--readings_left_ <= 0) {
    let_go();
  }
}

bool Entry::held_by_handles_only() const {
  const StorageRefPtr held = identity_->lock();
  // Beside the handles, only `held` itself holds it.
  return held && static_cast<int64_t>(held->storage.use_count()) - 1 <= keeps_;
}

bool Entry::lost_memory() const {
  return storage_ && static_cast<int64_t>(storage_->storage.nbytes()) != nbytes();
}

StorageRefPtr Entry::bring() {
  const bool was_sent = state() == State::kLeaving && notice_sent();
  if (!storage_) {
    if (hold_if_alive()) {
      if (was_sent && iteration_) {  // leaving freed nothing
        iteration_->note_never_freed(index_);
      }
    } else if (notice_gone(true)) {
      const bool waits = !away_->recomputes();
      fetch();
      counters().stalls += waits ? 1 : 0;
    } else if (!storage_) {  // a send that failed gives the storage back
      throw std::logic_error("a storage is neither here nor away");
    }
  }
  StorageRefPtr found = storage_;
  if (state() != State::kResident) {
    move(State::kResident);
  }
  if (--readings_left_ <= 0 && away_) {
    drop_storage();  // every save has seen the bytes: whoever uses them holds them
  }
  return found;
}

EntryPtr as_entry(KnownPtr known) {
  return known && known->is_entry() ? std::static_pointer_cast<Entry>(std::move(known)) : nullptr;
}

// --- one save of it ------------------------------------------------------------------------------

SavedTensor SavedTensor::moved(EntryPtr entry, SavedView&& view) {
  entry->add_handle();
  return {std::move(entry), std::move(view)};
}

SavedTensor SavedTensor::kept(at::Tensor tensor, uint32_t version, KnownPtr known) {
  if (const EntryPtr entry = as_entry(known)) {
    entry->add_keep();
  }
  return {std::move(tensor), version, std::move(known)};
}

EntryPtr SavedTensor::entry() const { return as_entry(known_); }

void SavedTensor::tell() const {
  if (const EntryPtr of = entry()) {
    of->engine()->tell();
  }
}

at::Tensor SavedTensor::unpack(Caller caller) const {
  const EntryPtr of = entry();
  if (stays()) {
    const auto version = static_cast<uint32_t>(tensor_._version());
    if (version != version_) {
      throw EditedInPlace(described(tensor_), version, version_);
    }
    if (of) {
      of->engine()->demand_kept_by(caller, of);
    }
    return tensor_;
  }
  const SavedView& view = *view_;
  if (view.edited()) {
    throw EditedInPlace(view.describe(), view.current_version(), view.version());
  }
  const StorageRefPtr storage = of->engine()->demand_by(caller, of);
  if (of->fetched() && storage->version.current_version() != 0) {
    throw EditedInPlace(view.describe(), view.version() + 1, view.version());
  }
  return view.rebuild(*storage, !of->fetched());
}

EditedInPlace::EditedInPlace(const std::string& tensor, uint32_t version, uint32_t expected_version)
    : std::runtime_error(
          "one of the variables needed for gradient computation has been modified by an inplace "
          "operation: [" +
          tensor + "] is at version " + std::to_string(version) + "; expected version " +
          std::to_string(expected_version) +
          " instead. Hint: edit a copy, or edit before the operator that saves the tensor; "
          "torch.autograd.set_detect_anomaly(True) finds that operator."),
      version(version),
      expected_version(expected_version) {}

at::Tensor without_graph(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.is_leaf() ? tensor : tensor.detach();
}

}  // namespace memswap
