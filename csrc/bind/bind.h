// What every file of the bindings needs. Contracts stand in the headers of what is bound, types in
// python/memswap/_C.pyi.
#pragma once

#include <c10/core/Stream.h>
#include <pybind11/functional.h>
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "engine/action.h"
#include "storage/storage.h"

namespace memswap {

namespace py = pybind11;
using namespace py::literals;
using without_gil = py::call_guard<py::gil_scoped_release>;

// A module of Python's that is asked for a name.
inline py::object from(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

// A storage, for who cannot go on without one. Throws TypeError for None.
inline const StorageRefPtr& some(const StorageRefPtr& storage) {
  if (!storage) {
    throw py::type_error("expected a StorageRef, found None");
  }
  return storage;
}

// What torch.Stream(stream_id=..., device_index=..., device_type=...) takes.
inline std::tuple<int64_t, int64_t, int64_t> packed(c10::Stream stream) {
  const auto parts = stream.pack3();
  return {parts.stream_id, parts.device_index, static_cast<int64_t>(parts.device_type)};
}

// A getter of a lane's stream.
template <class Of, c10::Stream (Of::*stream)() const>
std::tuple<int64_t, int64_t, int64_t> packed_stream(const Of& lane) {
  return packed((lane.*stream)());
}

inline uintptr_t as_int(const void* address) { return reinterpret_cast<uintptr_t>(address); }

}  // namespace memswap

// A memswap.Action.
template <>
struct pybind11::detail::type_caster<memswap::Action> {
  PYBIND11_TYPE_CASTER(memswap::Action, const_name("memswap.Action"));

  static constexpr const char* kNames[] = {"KEEP", "ENCODE", "SWAP", "ENCODE_SWAP", "RECOMPUTE"};

  bool load(handle source, bool) {
    for (uint8_t number = 0; number < std::size(kNames); ++number) {
      if (source.is(member(kNames[number]))) {
        value = static_cast<memswap::Action>(number);
        return true;
      }
    }
    return false;
  }

  static handle cast(memswap::Action action, return_value_policy, handle) {
    return member(kNames[static_cast<size_t>(action)]).release();
  }

 private:
  static object member(const char* name) {
    return memswap::from("memswap.engine.action", "Action").attr(name);
  }
};
