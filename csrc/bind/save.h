// What becomes of a tensor that autograd saves: known already, too small, or a new storage.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/block_form.h"
#include "saver.h"

namespace memswap {

// A policy as data: what is done with storages that nobody has to be asked about.
struct SaveTable {
  enum class Action : uint8_t { kAsk, kKeep, kSwap };

  struct DeviceRow {
    c10::Device device;
    Action action;                        // of a policy that names none
    std::shared_ptr<BlockSender> sender;  // nullptr: nothing was swapped there yet
  };

  int64_t min_bytes = 0;
  Action action = Action::kAsk;  // kAsk: Python decides, or a device's row
  bool by_device = false;        // the policy names no action
  std::vector<DeviceRow> devices;
};

// Where a tensor is saved: a visit's members.
struct SavePlace {
  PyObject* visit;
  PyObject* unit;
  PyObject* group;
  bool covered;     // the policy covers the unit
  bool has_action;  // the visit has an action of its own
  Py_ssize_t& ordinal;
};

// The handle of a tensor that stays, of whose storage nothing is known. The reason is counted.
pybind11::object keep(SaverObject* saver, PyObject* tensor, PyObject* view, const char* reason);

// The handle of a plain tensor.
pybind11::object save(SaverObject* saver, PyObject* tensor, PyObject* view, SavePlace place);

}  // namespace memswap
