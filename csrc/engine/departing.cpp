#include "departing.h"

#include <algorithm>
#include <memory>

#include "entry.h"

namespace memswap {

namespace {

// The first of a row, held for as long as the caller asks it; what is dying leaves by itself.
EntryPtr first_of(EntryRow& row) {
  while (row.front() != nullptr) {
    if (EntryPtr entry = row.front()->weak_from_this().lock()) {
      return entry;
    }
    row.remove(row.front());
  }
  return nullptr;
}

// The usual answer, for which nobody else runs.
bool is_held(const Entry& entry) {
  return entry.state() == State::kLeaving && !entry.identity().expired();
}

}  // namespace

EntryRow::~EntryRow() {
  while (first_ != nullptr) {
    remove(first_);
  }
}

void EntryRow::append(Entry* entry) {
  entry->leave_row();
  RowPlace& place = entry->place_in_row;
  place = {this, last_, nullptr};
  (last_ == nullptr ? first_ : last_->place_in_row.after) = entry;
  last_ = entry;
  ++size_;
}

void EntryRow::remove(Entry* entry) {
  RowPlace& place = entry->place_in_row;
  (place.before == nullptr ? first_ : place.before->place_in_row.after) = place.after;
  (place.after == nullptr ? last_ : place.after->place_in_row.before) = place.before;
  place = {};
  --size_;
}

// To ask an entry may warn the user and let other threads run: what that leaves of the rows is
// looked at anew each time. Who is held still goes to the end of the row.
void Departing::look_at(EntryRow& row, size_t looks) {
  for (looks = std::min(looks, row.size()); looks > 0; --looks) {
    if (row.front() != nullptr && is_held(*row.front())) {
      row.append(row.front());
      continue;
    }
    const EntryPtr entry = first_of(row);
    if (!entry) {
      break;
    }
    row.remove(entry.get());
    if (entry->lingers() && entry->place_in_row.row == nullptr) {
      row.append(entry.get());
    }
  }
}

void Departing::notice_gone(size_t looks) {
  look_at(lingering_, looks);
  look_at(lately_, kAll);
  while (const EntryPtr entry = first_of(leaving_)) {
    const bool waits = entry->lingers();
    if (waits && !entry->sent()) {
      return;
    }
    // A send that has failed gives the storage back.
    const bool stays = waits && entry->lingers();
    if (entry->place_in_row.row == &leaving_) {
      leaving_.remove(entry.get());
      if (stays) {
        lately_.append(entry.get());
      }
      while (lately_.size() > kLately) {
        lingering_.append(lately_.front());
      }
    }
  }
}

}  // namespace memswap
