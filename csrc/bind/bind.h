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
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "codec/dtypes.h"
#include "codec/frame_plan.h"
#include "engine/action.h"
#include "storage/storage.h"
#include "work/stop_at_exit.h"

namespace memswap {

namespace py = pybind11;
using namespace py::literals;
using without_gil = py::call_guard<py::gil_scoped_release>;

// A module of Python's that is asked for a name. Most are there: to import one again takes longer.
inline py::object from(const char* module, const char* name) {
  const auto there = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str(module).ptr()));
  return (there ? there : py::module_::import(module)).attr(name);
}

// A lane with threads, which end before the process does.
template <class Lane, class... Args>
std::shared_ptr<Lane> opened(Args... args) {
  return stop_at_exit().add(std::make_shared<Lane>(std::move(args)...), &Lane::stop);
}

inline uintptr_t as_int(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// The name of a member or a function, as the compiler writes it: "nbytes" of &Block::nbytes.
template <auto member>
constexpr std::string_view name_in_words() {
  constexpr std::string_view words = __PRETTY_FUNCTION__;  // "... member = &Block::nbytes]"
  constexpr size_t end = words.find_first_of(";]", words.find("member ="));
  constexpr std::string_view identifiers =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
  constexpr size_t begin = words.find_last_not_of(identifiers, end - 1) + 1;
  return words.substr(begin, end - begin);
}
static_assert(name_in_words<&FrameOptions::var_capacity>() == "var_capacity");
static_assert(name_in_words<&frame_dtype>() == "frame_dtype");

template <auto member>
std::string name_of() {
  return std::string(name_in_words<member>());
}

// Members of a struct in a dict; the same as attributes of an object.
template <auto... members, class Struct>
py::dict as_dict(const Struct& all) {
  py::dict named;
  ((named[name_of<members>().c_str()] = all.*members), ...);
  return named;
}

template <auto... members, class Struct>
py::object as_object(const Struct& all) {
  return from("types", "SimpleNamespace")(**as_dict<members...>(all));
}

// Functions of a module, whose arguments have no names. `extra`: as `def` takes it.
template <auto... functions, class... Extra>
void bind_functions(py::module_& module, const Extra&... extra) {
  (module.def(name_of<functions>().c_str(), functions, extra...), ...);
}

// A class whose members have the same names in Python.
template <class Type, class... Options>
class Bound : public py::class_<Type, Options...> {
 public:
  using py::class_<Type, Options...>::class_;

  // Attributes that Python only reads: members, and functions without arguments.
  template <auto... members>
  Bound& reads() {
    (read<members>(), ...);
    return *this;
  }

  // Attributes that it sets as well.
  template <auto... members>
  Bound& writes() {
    (this->def_readwrite(name_of<members>().c_str(), members), ...);
    return *this;
  }

  // Functions, as in `bind_functions`.
  template <auto... functions, class... Extra>
  Bound& calls(const Extra&... extra) {
    (this->def(name_of<functions>().c_str(), functions, extra...), ...);
    return *this;
  }

 private:
  template <auto member>
  void read() {
    if constexpr (std::is_member_function_pointer_v<decltype(member)>) {
      this->def_property_readonly(name_of<member>().c_str(), member);
    } else {
      this->def_readonly(name_of<member>().c_str(), member);
    }
  }
};

// The first members of a struct that is a tuple in Python, in their order.
template <class Struct>
inline constexpr std::tuple<> kMembers;

template <class Struct>
concept IsTuple = std::tuple_size_v<std::decay_t<decltype(kMembers<Struct>)>> != 0;

template <IsTuple Struct>
auto tuple_of(const Struct& given) {
  return std::apply([&](auto... of) { return std::tuple(given.*of...); }, kMembers<Struct>);
}

// A struct that Python only reads: `fields_of` makes what it gets.
template <class Struct>
concept HasFields = requires(const Struct& given) { fields_of(given); };

template <>
inline constexpr std::tuple kMembers<FrameOptions>{&FrameOptions::dtype, &FrameOptions::layout,
                                                   &FrameOptions::var_capacity};

}  // namespace memswap

namespace pybind11::detail {

template <memswap::IsTuple Struct>
struct type_caster<Struct> {
  using Tuple = decltype(memswap::tuple_of(std::declval<Struct>()));
  PYBIND11_TYPE_CASTER(Struct, make_caster<Tuple>::name);

  bool load(handle source, bool convert) {
    make_caster<Tuple> caster;
    if (!isinstance<tuple>(source) || !caster.load(source, convert)) {
      return false;
    }
    value = std::apply([](auto&&... of) { return Struct{std::move(of)...}; },
                       cast_op<Tuple&&>(std::move(caster)));
    return true;
  }

  static handle cast(const Struct& given, return_value_policy policy, handle parent) {
    return make_caster<Tuple>::cast(memswap::tuple_of(given), policy, parent);
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
    const object number = memswap::from(kModule, "NUMBERS").attr("get")(source);
    if (number.is_none()) {
      return false;
    }
    value = static_cast<memswap::Action>(number.cast<uint8_t>());
    return true;
  }

  static handle cast(memswap::Action action, return_value_policy, handle) {
    return object(memswap::from(kModule, "ACTIONS")[int_(static_cast<int>(action))]).release();
  }

 private:
  static constexpr const char* kModule = "memswap.engine.action";
};

}  // namespace pybind11::detail
