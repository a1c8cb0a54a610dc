// The way of storages that leave as they are: into a block of a pool, by a lane.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "lane/lane.h"
#include "pool/pool.h"

namespace memswap {

// `native_*`: the same, where they are native. Otherwise they are called as Python's.
struct SwapWayObject {
  PyObject_HEAD PyObject* lane;  // has `send(storage, block)` and `fetch(block)`
  PyObject* blocks;              // has `allocate(nbytes)`
  std::shared_ptr<Lane> native_lane;
  std::shared_ptr<Pool> native_blocks;
};

// An object as such a way, borrowed; nullptr: it is another one.
SwapWayObject* swap_way(PyObject* object);

struct Sent {
  pybind11::object away, departure;  // empty: there was no room, and nothing was started
};
Sent send(SwapWayObject* way, PyObject* storage);

struct Brought {
  pybind11::object storage, arrival;
};
Brought bring(SwapWayObject* way, PyObject* block);

// What a `bring` of Python's has returned. Throws TypeError.
Brought brought_by(const pybind11::object& pair);

}  // namespace memswap
