// What every file of the bindings needs. Contracts stand in the headers of what is bound, types in
// python/memswap/_C.pyi.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "codec/frame_plan.h"
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

inline uintptr_t as_int(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// An object with these attributes.
template <class... Attributes>
py::object with_attributes(Attributes&&... attributes) {
  return from("types", "SimpleNamespace")(std::forward<Attributes>(attributes)...);
}

// A caster of structs that Python only reads: `fields_of` makes what it gets.
template <class Struct>
struct FieldsCaster {
  static constexpr auto name = py::detail::const_name("object");

  static py::handle cast(const Struct& given, py::return_value_policy, py::handle) {
    return fields_of(given).release();
  }
};

// A caster of structs that are tuples in Python, of all members.
template <class Struct, auto... members>
struct TupleCaster {
  template <auto member>
  using Member = std::decay_t<decltype(std::declval<Struct&>().*member)>;

  PYBIND11_TYPE_CASTER(Struct,
                       py::detail::const_name("tuple[") +
                           py::detail::concat(py::detail::make_caster<Member<members>>::name...) +
                           py::detail::const_name("]"));

  bool load(py::handle source, bool convert) {
    return load_from(source, convert, sizeof...(members));
  }

  static py::handle cast(const Struct& given, py::return_value_policy, py::handle) {
    return py::make_tuple(given.*members...).release();
  }

 protected:
  // Of at least so many; those that are left out keep their defaults.
  bool load_from(py::handle source, bool convert, size_t least) {
    if (!py::isinstance<py::tuple>(source)) {
      return false;
    }
    const auto given = py::reinterpret_borrow<py::tuple>(source);
    size_t place = 0;
    return given.size() >= least && given.size() <= sizeof...(members) &&
           (load_member<members>(given, place++, convert) && ...);
  }

 private:
  template <auto member>
  bool load_member(const py::tuple& given, size_t place, bool convert) {
    py::detail::make_caster<Member<member>> caster;
    if (place < given.size()) {
      if (!caster.load(given[place], convert)) {
        return false;
      }
      value.*member = py::detail::cast_op<Member<member>>(std::move(caster));
    }
    return true;
  }
};

}  // namespace memswap

// (dtype, shape, var_capacity, profile, center), the dtype alone or with what follows it.
template <>
struct pybind11::detail::type_caster<memswap::FrameOptions>
    : memswap::TupleCaster<memswap::FrameOptions, &memswap::FrameOptions::dtype,
                           &memswap::FrameOptions::shape, &memswap::FrameOptions::var_capacity,
                           &memswap::FrameOptions::profile, &memswap::FrameOptions::center> {
  bool load(handle source, bool convert) { return load_from(source, convert, 1); }
};

// A memswap.Action.
template <>
struct pybind11::detail::type_caster<memswap::Action> {
  PYBIND11_TYPE_CASTER(memswap::Action, const_name("memswap.Action"));

  bool load(handle source, bool) {
    const object number = in_module("NUMBERS").attr("get")(source);
    if (number.is_none()) {
      return false;
    }
    value = static_cast<memswap::Action>(number.cast<uint8_t>());
    return true;
  }

  static handle cast(memswap::Action action, return_value_policy, handle) {
    return object(in_module("ACTIONS")[int_(static_cast<int>(action))]).release();
  }

 private:
  static object in_module(const char* name) { return memswap::from("memswap.engine.action", name); }
};
