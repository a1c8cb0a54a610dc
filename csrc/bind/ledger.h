// A Ledger of Python's.
#pragma once

#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "engine/residence.h"
#include "storage/saved_view.h"
#include "work/ticket.h"

namespace memswap {

struct LedgerObject {
  struct Known {
    PyObject* holder;  // borrowed: it takes itself off the list when it dies
    c10::VariableVersion counter;
    uint32_t version;
    bool stays;
    size_t begin, end;  // what was saved of it: the first byte, and the one behind the last
    uint64_t node;      // by which node
  };

  struct Kept {
    int64_t tensors = 0;
    int64_t nbytes = 0;
  };

  PyObject_HEAD Ledger ledger;
  std::unordered_map<const void*, Known> known;                    // by the address of the storage
  std::unique_ptr<std::map<std::string, Kept, std::less<>>> kept;  // by the reason
};

// An object as a ledger, borrowed. nullptr with TypeError set: it is none.
LedgerObject* ledger_object(PyObject* object);

// From here on `holder` stands for the storage that a view looks at, with the content that it has
// now; until `forget`, which it calls before another storage can have that address. One that
// `stays` stands for it whatever the content: each save of it keeps its own tensor.
void remember(LedgerObject* ledger, const SavedView& look, PyObject* holder, bool stays);
void forget(LedgerObject* ledger, const void* key, const PyObject* holder);

// Which entry or stay has the very storage and content that a view was captured from; None; or
// False: what is known of the storage is another counter's, or left before anybody saved this part
// of it.
pybind11::object find(LedgerObject* ledger, const SavedView& look);

// A tensor stays, for a reason.
void count_kept(LedgerObject* ledger, std::string_view reason, int64_t nbytes);
void count_kept(LedgerObject* ledger, PyObject* reason, int64_t nbytes);

// Waits for a ticket; for as long as the host is blocked, that counts.
void wait_on_ledger(LedgerObject* ledger, Ticket& ticket);

}  // namespace memswap
