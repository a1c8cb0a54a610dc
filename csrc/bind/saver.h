// A Saver of Python's, and its lock.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>

#include "entry.h"

namespace memswap {

struct SaveTable;

struct LockObject {
  PyObject_HEAD std::recursive_mutex mutex;
};

// What the hot path needs of a saver at hand. None of it says what is to be done with a storage.
struct SaverObject {
  PyObject_HEAD PyObject* ledger;  // a LedgerObject
  PyObject* lock;                  // a LockObject
  PyObject* departing;             // a DepartingObject
  PyObject* encoding;              // encodes whose reports have not arrived, a sequence
  // Python's; None: nothing.
  PyObject* passage;
  PyObject* director;
  PyObject* persistent;
  PyObject* backward;   // the passage whose backward runs, for the director
  char watched;         // the director hears of each mark, whatever a script says
  char looks_ahead;     // what comes next is brought back at once; otherwise `look_ahead` is called
  char shares_batches;  // its passages are batches of groups, which share storages: `moved` joins
  std::unique_ptr<SaveTable> table;
};

// The entry of what its passage admitted last, and the storage.
struct Made {
  pybind11::object entry;
  StorageRefPtr storage;
};
Made make_entry(SaverObject* saver, PyObject* tensor, PyObject* view);

// Takes in what encoders have reported by now.
void learn_reports(SaverObject* saver);

// An object as a saver, borrowed; nullptr: it is none.
SaverObject* saver_object(PyObject* object);

// Holds a saver's lock. Whoever has to wait for it does so without the GIL.
class Locked {
 public:
  explicit Locked(PyObject* lock);
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { reinterpret_cast<LockObject*>(lock_.ptr())->mutex.unlock(); }

 private:
  const pybind11::object lock_;
};

// The storage of an entry, ordered before what the caller does next.
StorageRefPtr demand(SaverObject* saver, PyObject* entry);

// A storage that stayed is demanded: what comes next may have to come back.
void demand_kept(SaverObject* saver, PyObject* entry);

}  // namespace memswap
