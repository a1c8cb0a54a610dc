// What becomes of a tensor that autograd saves: known already, too small, or a new storage.
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "engine.h"
#include "recorder.h"

namespace memswap {

namespace {

constexpr int kNoGraphTask = -1;

// What the table says of a storage on a device, and by what it is swapped.
std::pair<PolicyTable::Action, std::shared_ptr<BlockSender>> look_up(const PolicyTable& table,
                                                                     c10::Device device) {
  using Action = PolicyTable::Action;
  if (table.action == Action::kKeep) {
    return {Action::kKeep, nullptr};
  }
  for (const PolicyTable::DeviceRow& row : table.devices) {
    if (row.device == device) {
      const Action action = table.by_device ? row.action : table.action;
      return {action == Action::kSwap ? action : Action::kAsk, row.sender};
    }
  }
  return {Action::kAsk, nullptr};
}

}  // namespace

Saved Engine::keep(const SavedView& look, std::string_view reason) {
  ledger.keep(reason, static_cast<int64_t>(look.storage_nbytes()));
  return {Saved::As::kKept, nullptr};
}

Saved Engine::stay(const SavedView& look, std::string_view reason) {
  ledger.keep(reason, static_cast<int64_t>(look.storage_nbytes()));
  return {Saved::As::kKept, Stay::make({shared_from_this(), &ledger}, look)};
}

EntryPtr Engine::make_entry(const at::Tensor& tensor, const SavedView& look,
                            StorageRefPtr& storage) {
  storage = std::make_shared<StorageRef>(tensor.storage());
  EntryPtr made = Entry::make(shared_from_this(), look, *storage);
  iteration->place(made);
  return made;
}

Saved Engine::swap(const at::Tensor& tensor, const SavedView& look, BlockSender& sender,
                   EntryPtr& entry) {
  StorageRefPtr storage;
  entry = make_entry(tensor, look, storage);
  if (!entry->swap(sender, storage)) {
    return {};
  }
  departing.add(entry.get());
  return {Saved::As::kMoved, entry};
}

const char* Engine::refused(const char* short_of, const std::string& why, const Entry& entry) {
  if (entry.iteration && short_of == std::string_view(BlockForm::kShortOf)) {
    entry.iteration->refuse(ledger.counters.away_bytes);
  }
  ledger.tell_once(short_of, "a storage of " + std::to_string(entry.nbytes()) + " bytes stays on " +
                                 entry.device().str() + ": " + why +
                                 ". Training goes on with less memory saved.");
  return short_of;
}

// Whether memory that no operator made may hold something else than in an earlier forward. A buffer
// that numpy fills for each batch counts no edits; what left took along the bytes of then, and a
// graph that nobody runs any more may keep them. (What shares tables and masks between its batches
// moves them once.)
bool Engine::refilled(const KnownPtr& known, const SavedView& look) const {
  if (shares_batches || look.computed() || !known->is_entry()) {
    return false;
  }
  const auto& entry = static_cast<const Entry&>(*known);
  return entry.away() && entry.iteration != iteration;
}

// One more save of a storage that is known.
Saved Engine::save_again(const Offer& offer, const KnownPtr& known) {
  ++ledger.counters.deduplicated_tensors;
  ledger.counters.deduplicated_bytes += static_cast<int64_t>(offer.look.nbytes());
  if (!known->is_entry()) {
    return {Saved::As::kKept, known};
  }
  const auto entry = std::static_pointer_cast<Entry>(known);
  if (entry->iteration && entry->iteration->recorder) {
    entry->iteration->recorder->again(*entry, offer.unit);
  }
  // It has left, or waits to: then the entry holds the storage.
  const bool leaves = entry->away() || entry->storage;
  return {leaves ? Saved::As::kMoved : Saved::As::kKept, known};
}

// A storage that the table swaps.
Saved Engine::swap_new(const Offer& offer, BlockSender& sender) {
  const auto nbytes = static_cast<int64_t>(offer.look.storage_nbytes());
  departing.notice_some();
  learn();
  ++offer.ordinal;
  if (const char* const why = iteration->admit(nbytes, false, offer.group)) {
    ledger.keep(why, nbytes);
    StorageRefPtr storage;
    return {Saved::As::kKept, make_entry(offer.tensor, offer.look, storage)};
  }
  EntryPtr entry;
  Saved sent = swap(offer.tensor, offer.look, sender, entry);
  if (sent.as == Saved::As::kMoved) {
    return sent;
  }
  ledger.keep(refused(BlockForm::kShortOf, sender.why_refused(), *entry), nbytes);
  return {Saved::As::kKept, entry};
}

Saved Engine::save(const Offer& offer) {
  const SavedView& look = offer.look;
  const Ledger::Found found = ledger.find(look);
  if (found.conflicts) {
    return keep(look, "edited in parts");
  }
  if (found.known && !refilled(found.known, look)) {
    return save_again(offer, found.known);
  }
  if (static_cast<int64_t>(look.storage_nbytes()) < policy.min_bytes) {
    return keep(look, "small");
  }
  if (look.edited_part()) {
    return stay(look, "edited in parts");
  }
  if (look.part_of_data()) {
    return keep(look, "part of data");
  }
  if (!offer.covered) {
    return keep(look, "policy");
  }
  if (torch::autograd::get_current_graph_task_id() != kNoGraphTask) {
    return keep(look, "saved in backward");
  }
  if (directed) {
    recomputed.sweep();
    return {};
  }
  if (offer.has_action) {
    return {};
  }
  const auto [action, sender] = look_up(policy, look.device());
  if (action == PolicyTable::Action::kKeep) {
    return stay(look, "policy");
  }
  // What is saved after backward began belongs to a new iteration, which the host begins.
  if (action == PolicyTable::Action::kSwap && !iteration->began_backward()) {
    return swap_new(offer, *sender);
  }
  return {};
}

}  // namespace memswap
