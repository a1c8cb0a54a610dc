// Entries whose storages were sent, until these are gone. Owned by nobody here.
#pragma once

#include <cstddef>
#include <limits>

namespace memswap {

class Entry;

// An intrusive list of entries, in the order in which they were appended. An entry is in one list
// at most, and leaves it when it dies.
class EntryList {
 public:
  EntryList() = default;
  EntryList(const EntryList&) = delete;
  EntryList& operator=(const EntryList&) = delete;
  ~EntryList();

  Entry* front() const { return first_; }
  size_t size() const { return size_; }
  void append(Entry* entry);
  void remove(Entry* entry);
  // Takes an entry out of the list that it is in, if it is in one.
  static void leave(Entry* entry);

 private:
  Entry* first_ = nullptr;
  Entry* last_ = nullptr;
  size_t size_ = 0;
};

// An entry's place in a list.
struct ListPlace {
  EntryList* list = nullptr;  // nullptr: it is in none
  Entry* before = nullptr;
  Entry* after = nullptr;
};

// [Note: What was sent lately goes first]
// Each save takes off the books what is gone, and can look at a few storages only. Most of what a
// forward holds it lets go of within an operator or two, and the rest for longer than a layer: a
// residual stream, or a weight's cast, of which autocast's cache has as many as there are weights.
// So the `kLately` that were sent last are looked at each time, and of the others some in turn.
class Departing {
 public:
  static constexpr size_t kAll = std::numeric_limits<size_t>::max();
  static constexpr size_t kLately = 8;
  static constexpr size_t kLooksOfASave = 3;

  // The storage of an entry was sent.
  void add(Entry* entry) { leaving_.append(entry); }

  // Accounts for storages that went away since the last look. `looks` bounds how many of those are
  // looked at that have been held by somebody for long.
  void notice_gone(size_t looks = kAll);
  // The same for each save.
  void notice_some() { notice_gone(kLooksOfASave); }

  size_t size() const { return leaving_.size() + lately_.size() + lingering_.size(); }

 private:
  static void look_at(EntryList& list, size_t looks);

  EntryList leaving_;    // whose sends may be under way, in the order in which they were added
  EntryList lately_;     // the last ones that were sent and are held by somebody, in that order
  EntryList lingering_;  // the others that are held
};

}  // namespace memswap
