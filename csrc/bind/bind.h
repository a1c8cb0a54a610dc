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
#include <tuple>
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

// The members of a struct that is a tuple in Python, in their order.
template <class Struct>
inline constexpr std::tuple<> kMembers;

template <class Struct>
concept IsTuple = std::tuple_size_v<std::decay_t<decltype(kMembers<Struct>)>> != 0;

// A struct that Python only reads: `fields_of` makes what it gets.
template <class Struct>
concept HasFields = requires(const Struct& given) { fields_of(given); };

// dtype, shape, var_capacity
template <>
inline constexpr std::tuple kMembers<FrameOptions>{&FrameOptions::dtype, &FrameOptions::shape,
                                                   &FrameOptions::var_capacity};

}  // namespace memswap

namespace pybind11::detail {

template <memswap::IsTuple Struct>
struct type_caster<Struct> {
  static constexpr auto members = std::apply(
      []<class... Member>(Member Struct::*...) { return concat(make_caster<Member>::name...); },
      memswap::kMembers<Struct>);
  PYBIND11_TYPE_CASTER(Struct, const_name("tuple[") + members + const_name("]"));

  bool load(handle source, bool convert) {
    return std::apply(
        [&](auto... of) {
          if (!isinstance<tuple>(source) || pybind11::len(source) != sizeof...(of)) {
            return false;
          }
          const auto given = reinterpret_borrow<tuple>(source);
          size_t place = 0;
          return (load_member(of, given[place++], convert) && ...);
        },
        memswap::kMembers<Struct>);
  }

  static handle cast(const Struct& given, return_value_policy, handle) {
    return std::apply([&](auto... of) { return pybind11::make_tuple(given.*of...); },
                      memswap::kMembers<Struct>)
        .release();
  }

 private:
  template <class Member>
  bool load_member(Member Struct::* member, handle given, bool convert) {
    make_caster<Member> caster;
    if (!caster.load(given, convert)) {
      return false;
    }
    value.*member = cast_op<Member>(std::move(caster));
    return true;
  }
};

template <memswap::HasFields Struct>
struct type_caster<Struct> {
  static constexpr auto name = const_name("object");

  static handle cast(const Struct& given, return_value_policy, handle) {
    return fields_of(given).release();
  }
};

// A memswap.Action.
template <>
struct type_caster<memswap::Action> {
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

}  // namespace pybind11::detail
