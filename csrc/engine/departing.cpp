#include "departing.h"

#include <algorithm>
#include <memory>

#include "entry.h"

namespace memswap {

namespace {

// The first of a list, held for as long as the caller asks it; what is dying leaves by itself.
EntryPtr first_of(EntryList& list) {
  while (list.front() != nullptr) {
    if (EntryPtr entry = list.front()->weak_from_this().lock()) {
      return entry;
    }
    list.remove(list.front());
  }
  return nullptr;
}

// The usual answer, for which nobody else runs.
bool is_held(const Entry& entry) {
  return entry.state() == State::kLeaving && !entry.identity().expired();
}

}  // namespace

EntryList::~EntryList() {
  while (first_ != nullptr) {
    remove(first_);
  }
}

void EntryList::append(Entry* entry) {
  leave(entry);
  ListPlace& place = entry->place_in_list_;
  place = {this, last_, nullptr};
  (last_ == nullptr ? first_ : last_->place_in_list_.after) = entry;
  last_ = entry;
  ++size_;
}

void EntryList::remove(Entry* entry) {
  ListPlace& place = entry->place_in_list_;
  (place.before == nullptr ? first_ : place.before->place_in_list_.after) = place.after;
  (place.after == nullptr ? last_ : place.after->place_in_list_.before) = place.before;
  place = {};
  --size_;
}

void EntryList::leave(Entry* entry) {
  if (EntryList* const list = entry->place_in_list_.list) {
    list->remove(entry);
  }
}

// To ask an entry may let other threads run: what that leaves of the lists is looked at anew each
// time. An entry whose storage is held still goes to the end of the list.
void Departing::look_at(EntryList& list, size_t looks) {
  for (looks = std::min(looks, list.size()); looks > 0; --looks) {
    if (list.front() != nullptr && is_held(*list.front())) {
      list.append(list.front());
      continue;
    }
    const EntryPtr entry = first_of(list);
    if (!entry) {
      break;
    }
    list.remove(entry.get());
    if (entry->lingers() && entry->place_in_list().list == nullptr) {
      list.append(entry.get());
    }
  }
}

void Departing::notice_gone(size_t looks) {
  look_at(lingering_, looks);
  look_at(lately_, kAll);
  while (const EntryPtr entry = first_of(leaving_)) {
    const bool waits = entry->lingers();
    if (waits && !entry->notice_sent()) {
      return;
    }
    // A send that has failed gives the storage back.
    const bool stays = waits && entry->lingers();
    if (entry->place_in_list().list == &leaving_) {
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
