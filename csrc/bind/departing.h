// What was sent, in the order of the sends, until it is gone.
#pragma once

#include <pybind11/pybind11.h>

#include "entry.h"

namespace memswap {

// Entries in a row, linked by themselves: nothing is owned, and one that dies leaves at once.
class EntryRow {
 public:
  EntryRow() = default;
  EntryRow(const EntryRow&) = delete;
  EntryRow& operator=(const EntryRow&) = delete;
  ~EntryRow();

  EntryObject* front() const { return first_; }
  Py_ssize_t size() const { return size_; }

  // Behind all others; an entry that is in a row leaves that one first.
  void append(EntryObject* entry);
  void remove(EntryObject* entry);  // that is in this row

 private:
  EntryObject* first_ = nullptr;
  EntryObject* last_ = nullptr;
  Py_ssize_t size_ = 0;
};

// A Departing of Python's, and an entry that was sent.
pybind11::object new_departing();
void add_departing(PyObject* departing, EntryObject* entry);

// What each save does: accounts for storages that went away. Of those that were sent and are still
// held it looks at a few, so that it pays.
void notice_some(PyObject* departing);

// An entry is in no row any more. Runs nothing of Python's.
void depart_no_more(EntryObject* entry);

}  // namespace memswap
