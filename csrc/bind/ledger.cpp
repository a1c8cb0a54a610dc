// Ledger, as Python sees it: what an engine counts, and which storages it knows.
#include "engine/ledger.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "errors.h"

namespace memswap {
namespace py = pybind11;

namespace {

template <int64_t Ledger::Kept::* number>
py::dict by_reason(const Ledger& ledger) {
  py::dict numbers;
  for (const auto& [reason, kept] : ledger.kept()) {
    numbers[py::str(reason)] = kept.*number;
  }
  return numbers;
}

template <auto number>
void def_counter(py::class_<Ledger, std::shared_ptr<Ledger>>& ledger, const char* name) {
  ledger.def_property(
      name, [](const Ledger& self) { return self.counters.*number; },
      [](Ledger& self, decltype(self.counters.*number) value) { self.counters.*number = value; });
}

}  // namespace

void bind_ledger(py::module_& module) {
  py::class_<Known, KnownPtr>(module, "Known", "Whoever stands for a storage that is known.");
  py::class_<Ledger, std::shared_ptr<Ledger>> ledger(module, "Ledger",
                                                     "What an engine counts (ledger.h).");
  ledger
      .def(py::init([] {
        auto made = std::make_shared<Ledger>();
        made->warn = warn;
        return made;
      }))
      .def(
          "find",
          [](Ledger& self, const SavedView& look) -> py::object {
            const Ledger::Found found = self.find(look);
            return found.conflicts ? py::object(py::bool_(false)) : py::cast(found.known);
          },
          py::arg("view"),
          "The entry or stay of a view's very storage and content; None; or False, where the "
          "storage is known with another tensor's version counter and one of them was edited.")
      .def("keep", &Ledger::keep, py::arg("reason"), py::arg("nbytes"), "A tensor stays.")
      .def("wait", &Ledger::wait, py::arg("ticket"),
           "Wait for a ticket; for as long as the host is blocked, that counts.")
      .def("tell_once", &Ledger::tell_once, py::arg("reason"), py::arg("message"),
           "Warn about something that costs memory but not correctness, once for each reason.")
      .def(
          "resident", [](Ledger& self, int64_t change) { self.counters.resident(change); },
          py::arg("change"), "So many more bytes are on the device.")
      .def(
          "away", [](Ledger& self, int64_t change) { self.counters.away(change); },
          py::arg("change"), "So many more bytes are in pools.")
      .def("set_reserved", [](Ledger& self, int64_t nbytes) { self.counters.set_reserved(nbytes); })
      .def("reset", &Ledger::reset, "Count anew; what is resident and away stays known.")
      .def_property_readonly("kept_tensors", &by_reason<&Ledger::Kept::tensors>,
                             "Reason -> tensors that stayed, a new dict.")
      .def_property_readonly("kept_bytes", &by_reason<&Ledger::Kept::nbytes>,
                             "Reason -> bytes of their storages, a new dict.")
      .def_property_readonly("known_storages", &Ledger::known_storages,
                             "Number of storages that `find` knows.");
  def_counter<&Counters::offered_tensors>(ledger, "offered_tensors");
  def_counter<&Counters::offered_bytes>(ledger, "offered_bytes");
  def_counter<&Counters::deduplicated_tensors>(ledger, "deduplicated_tensors");
  def_counter<&Counters::deduplicated_bytes>(ledger, "deduplicated_bytes");
  def_counter<&Counters::moved_storages>(ledger, "moved_storages");
  def_counter<&Counters::moved_bytes>(ledger, "moved_bytes");
  def_counter<&Counters::encoded_storages>(ledger, "encoded_storages");
  def_counter<&Counters::encoded_bytes>(ledger, "encoded_bytes");
  def_counter<&Counters::frame_bytes>(ledger, "frame_bytes");
  def_counter<&Counters::returned_storages>(ledger, "returned_storages");
  def_counter<&Counters::returned_bytes>(ledger, "returned_bytes");
  def_counter<&Counters::freed_bytes>(ledger, "freed_bytes");
  def_counter<&Counters::stalls>(ledger, "stalls");
  def_counter<&Counters::exposed_wait_s>(ledger, "exposed_wait_s");
  def_counter<&Counters::resident_bytes>(ledger, "resident_bytes");
  def_counter<&Counters::peak_resident_bytes>(ledger, "peak_resident_bytes");
  def_counter<&Counters::away_bytes>(ledger, "away_bytes");
  def_counter<&Counters::peak_away_bytes>(ledger, "peak_away_bytes");
  py::class_<Stay, Known, std::shared_ptr<Stay>>(module, "Stay",
                                                 "A storage that stays for good, counted once.")
      .def(py::init(&Stay::make), py::arg("ledger").none(false), py::arg("view"));
}

}  // namespace memswap
