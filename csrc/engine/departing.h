// Entries whose storages were sent, until these are gone. Owned by nobody here.
#pragma once

#include <cstddef>
#include <limits>

namespace memswap {

class Entry;

// A row of entries in the order in which they were appended. An entry is in one row at most.
class EntryRow {
 public:
  EntryRow() = default;
  EntryRow(const EntryRow&) = delete;
  EntryRow& operator=(const EntryRow&) = delete;
  ~EntryRow();

  Entry* front() const { return first_; }
  size_t size() const { return size_; }
  void append(Entry* entry);
  void remove(Entry* entry);

 private:
  Entry* first_ = nullptr;
  Entry* last_ = nullptr;
  size_t size_ = 0;
};

// An entry's place in a row.
struct RowPlace {
  EntryRow* row = nullptr;  // nullptr: it is in none
  Entry* before = nullptr;
  Entry* after = nullptr;
};

class Departing {
 public:
  static constexpr size_t kAll = std::numeric_limits<size_t>::max();

  // The storage of an entry was sent.
  void add(Entry* entry) { leaving_.append(entry); }

  // Accounts for storages that went away since the last look, oldest first. `looks` bounds how many
  // of those are looked at that were sent and are still held.
  void notice_gone(size_t looks = kAll);
  // What each save does: looks at a few.
  void notice_some() { notice_gone(3); }

  size_t size() const { return leaving_.size() + lingering_.size(); }

 private:
  EntryRow leaving_;    // whose sends may be under way, in the order of these
  EntryRow lingering_;  // sent, and held by somebody
};

}  // namespace memswap
