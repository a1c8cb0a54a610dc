// Recorder and what it has taken down, as Python sees them: columns, read once an iteration.
#include "engine/recorder.h"

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/iteration.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;
using without_gil = py::call_guard<py::gil_scoped_release>;

namespace {

// memswap.Action, by what its members are worth.
constexpr std::array kWords = {"keep", "encode", "swap", "encode_swap", "recompute"};

PlannedAction action_of(const std::string& word) {
  for (size_t place = 0; place < kWords.size(); ++place) {
    if (word == kWords[place]) {
      return static_cast<PlannedAction>(place);
    }
  }
  throw py::value_error("a recorder knows keep, encode, swap, encode_swap and recompute, found " +
                        word);
}

std::vector<const char*> words_of(const IterationRecord& record) {
  std::vector<const char*> words;
  for (const PlannedAction action : record.actions) {
    words.push_back(kWords.at(static_cast<size_t>(action)));
  }
  return words;
}

template <std::vector<int32_t> IterationRecord::* column>
std::vector<std::optional<int32_t>> marks_of(const IterationRecord& record) {
  std::vector<std::optional<int32_t>> marks;
  for (const int32_t mark : record.*column) {
    marks.push_back(mark == kNever ? std::nullopt : std::optional(mark));
  }
  return marks;
}

std::vector<std::string> units_of(const IterationRecord& record) {
  std::vector<std::string> names;
  for (const size_t unit : record.units) {
    names.push_back(record.unit_names[unit]);
  }
  return names;
}

std::vector<std::vector<std::string>> others_of(const IterationRecord& record) {
  std::vector<std::vector<std::string>> names(record.others.size());
  for (size_t index = 0; index < names.size(); ++index) {
    for (const size_t unit : record.others[index]) {
      names[index].push_back(record.unit_names[unit]);
    }
  }
  return names;
}

py::list regions_of(const IterationRecord& record) {
  py::list regions;
  for (const auto& [unit, inputs, other_nbytes] : record.regions) {
    regions.append(py::make_tuple(unit, inputs, other_nbytes));
  }
  return regions;
}

template <std::vector<IterationRecord::Copy> IterationRecord::* column>
std::vector<std::pair<double, int64_t>> copies_of(const IterationRecord& record) {
  std::vector<std::pair<double, int64_t>> copies;
  for (const auto& [seconds, nbytes] : record.*column) {
    copies.emplace_back(seconds, nbytes);
  }
  return copies;
}

std::vector<bool> moved_of(const IterationRecord& record) {
  return {record.moved.begin(), record.moved.end()};
}

void bind_record(py::module_& module) {
  using Record = IterationRecord;
  py::class_<Record, std::shared_ptr<Record>>(
      module, "IterationRecord",
      "What one iteration was like, in columns (csrc/engine/iteration_record.h).")
      .def_property_readonly("units", &units_of)
      .def_readonly("ordinals", &Record::ordinals)
      .def_readonly("nbytes", &Record::nbytes)
      .def_readonly("dtypes", &Record::dtypes)
      .def_property_readonly("actions", &words_of)
      .def_property_readonly("moved", &moved_of)
      .def_property_readonly("held_until", &marks_of<&Record::held_until>)
      .def_property_readonly("last_demand", &marks_of<&Record::last_demand>)
      .def_property_readonly("kept_until", &marks_of<&Record::kept_until>)
      .def_property_readonly("others", &others_of)
      .def_readonly("order", &Record::order)
      .def_readonly("gaps_s", &Record::gaps_s)
      .def_readonly("costs_s", &Record::costs_s)
      .def_readonly("windows_s", &Record::windows_s)
      .def_readonly("extra_nbytes", &Record::extra_nbytes)
      .def_readonly("tail_s", &Record::tail_s)
      .def_readonly("peak_bytes", &Record::peak_bytes)
      .def_property_readonly("regions", &regions_of, "(unit, inputs, other_nbytes) of each.")
      .def_property_readonly("sends", &copies_of<&Record::sends>, "(seconds, nbytes) of each.")
      .def_property_readonly("fetches", &copies_of<&Record::fetches>, "(seconds, nbytes) of each.");
}

}  // namespace

void bind_recorder(py::module_& module) {
  bind_record(module);
  py::class_<Recorder, std::shared_ptr<Recorder>>(
      module, "Recorder", "Takes down one iteration (csrc/engine/recorder.h).")
      .def(py::init([](c10::Device device, std::function<bool()> capturing) {
             return std::make_shared<Recorder>(Clock(device, std::move(capturing)));
           }),
           py::arg("device"), py::arg("capturing") = py::none(),
           "`capturing`: whether a graph is captured now; None: none ever is on such a device.")
      .def(
          "choose",
          [](Recorder& self, const std::string& unit, int64_t ordinal, int64_t nbytes,
             c10::ScalarType dtype, const std::string& action) {
            self.choose({unit, ordinal, nbytes, dtype, action_of(action)});
          },
          py::arg("unit"), py::arg("ordinal"), py::arg("nbytes"), py::arg("dtype"),
          py::arg("action"), "A storage is about to be saved.")
      .def(
          "region",
          [](Recorder& self, std::string unit, const std::vector<at::Tensor>& inputs,
             const Iteration& of, int64_t least_bytes) {
            std::vector<StorageRefPtr> storages;
            for (const at::Tensor& input : inputs) {
              if (input.unsafeGetTensorImpl()->has_storage()) {
                storages.push_back(std::make_shared<StorageRef>(input.storage()));
              }
            }
            self.region(std::move(unit), storages, of, least_bytes);
          },
          py::arg("unit"), py::arg("inputs"), py::arg("iteration"), py::arg("least_bytes"),
          "A checkpoint region that is off is called with these tensors.")
      .def_readwrite("workspace", &Recorder::workspace,
                     "Also takes down what else is on the device, or None.")
      .def("close", &Recorder::close, "The next iteration begins.")
      .def("ready", &Recorder::ready, "Whether the device has passed the last moment.")
      .def("wait", &Recorder::wait, without_gil(), "Block the host until it has.")
      .def("take", &Recorder::take,
           "The record of an iteration that is over; None where a save or a demand broke off.");
}

}  // namespace memswap
