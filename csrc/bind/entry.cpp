// Entry, and what departs, as Python sees them.
#include "engine/entry.h"

#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>

#include "engine/block_form.h"
#include "engine/departing.h"
#include "engine/engine.h"
#include "engine/iteration.h"
#include "engine/recipes.h"
#include "errors.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

// A weak reference to an entry: equal to any other one to the same entry.
class EntryReference {
 public:
  explicit EntryReference(const EntryPtr& entry) : entry_(entry), address_(entry.get()) {}
  EntryPtr lock() const { return entry_.lock(); }
  bool operator==(const EntryReference& other) const {
    return !entry_.owner_before(other.entry_) && !other.entry_.owner_before(entry_);
  }
  size_t hash() const { return std::hash<const void*>()(address_); }

 private:
  std::weak_ptr<Entry> entry_;
  const void* address_;
};

}  // namespace

void bind_entry(py::module_& module) {
  py::native_enum<State>(module, "State", "enum.Enum", "Where an entry's bytes are (residence.h).")
      .value("RESIDENT", State::kResident)
      .value("LEAVING", State::kLeaving)
      .value("AWAY", State::kAway)
      .value("RETURNING", State::kReturning)
      .finalize();

  py::class_<EntryReference>(module, "EntryReference", "A weak reference to an entry.")
      .def("__call__", &EntryReference::lock, "The entry, or None: it is dead.")
      .def("__eq__", &EntryReference::operator==, py::is_operator())
      .def("__hash__", &EntryReference::hash);

  py::class_<Entry, Known, EntryPtr>(module, "Entry",
                                     "One saved storage that may leave (csrc/engine/entry.h).")
      .def(py::init([](const EnginePtr& engine, const SavedView& look, const StorageRef& storage) {
             return Entry::make(engine, look, storage);
           }),
           py::arg("engine").none(false), py::arg("view"), py::arg("storage"))
      .def("__repr__", &Entry::described)
      .def("move", &Entry::move, py::arg("state"), "Change the state, or raise EntryStateError.")
      .def(
          "leave",
          [](Entry& entry, AwayFormPtr away, TicketPtr departure) {
            entry.leave({std::move(away), std::move(departure)});
          },
          py::arg("away").none(false), py::arg("departure").none(false), "It is being sent.")
      .def(
          "swap",
          [](Entry& entry, BlockSender& sender, const StorageRefPtr& storage) {
            return entry.swap(sender, some(storage));
          },
          py::arg("sender"), py::arg("storage"),
          "Send it into a block. Whether there was room; if not, nothing changed.")
      .def("sent", &Entry::sent,
           "Whether the send has ended. One that failed gives the storage back: nothing is lost.")
      .def("gone", &Entry::gone, py::arg("wait") = false,
           "Notice whether a leaving storage really went away. What was gathered is gone before "
           "its bytes are anywhere else for sure; `wait` for that, instead of saying no.")
      .def("lingers", &Entry::lingers, "Whether it is leaving and somebody holds it still.")
      .def("fetch", &Entry::fetch,
           "Start bringing the bytes back into a storage of memswap's own. May be out of memory.")
      .def("fetch_ahead", &Entry::fetch_ahead,
           "The same where it is away and its form works ahead. Whether that was done.")
      .def("bring", &Entry::bring,
           "The storage: the one that is still there, the one that was fetched, or else a fetch "
           "now, which counts as a stall. The caller waits for `arrival` before it reads.")
      .def("lock", &Entry::lock, "Hold the storage, if anybody does. Whether there was one.")
      .def("retain", &Entry::retain,
           "Hold on to a storage that has not gone away yet: then nothing has to come back. "
           "Whether there was one.")
      .def("let_go", &Entry::let_go,
           "Let go of a storage again whose away form is still there. Nothing is copied.")
      .def("count_away", &Entry::count_away, "Count what the away form takes up now.")
      .def_property_readonly("state", &Entry::state)
      .def_property_readonly("nbytes", &Entry::nbytes)
      .def_property_readonly("device", &Entry::device)
      .def_property_readonly("engine", &Entry::engine)
      .def_property_readonly(
          "reference", [](Entry& entry) { return EntryReference(entry.shared_from_this()); },
          "A weak reference.")
      .def_property_readonly("identity", &Entry::identity, py::return_value_policy::copy,
                             "The storage, as a WeakStorage.")
      .def_property_readonly(
          "is_away", &Entry::is_away,
          "Whether the storage has left, or is leaving, as far as its owner is concerned.")
      .def_property_readonly(
          "lost_memory", &Entry::lost_memory,
          "Whether the storage that it holds has been resized since it was saved.")
      .def_property(
          "storage", [](const Entry& entry) { return entry.storage; },
          [](Entry& entry, StorageRefPtr storage) {
            entry.storage.swap(storage);  // what was there goes when the entry is as it will be
          },
          "The storage, where the entry itself holds it; or None.")
      .def_property_readonly("away", &Entry::away, "The away form, or None.")
      .def_property_readonly("departure", &Entry::departure, "The ticket of its send, or None.")
      .def_property_readonly("arrival", &Entry::arrival, "The ticket of its return, or None.")
      .def_readwrite("trial", &Entry::trial,
                     "What proves its recipe while its bytes wait elsewhere, or None.")
      .def_readwrite("handles", &Entry::handles)
      .def_readwrite("keeps", &Entry::keeps)
      .def_readwrite("unseen", &Entry::unseen)
      .def_readonly("iteration", &Entry::iteration)
      .def_readonly("index", &Entry::index)
      .def_property_readonly("version", &Entry::version)
      .def_property_readonly("fetched", &Entry::fetched);

  py::class_<Departing>(module, "Departing",
                        "Entries whose storages were sent, until these are gone. Owned by nobody "
                        "here.")
      .def(py::init<>())
      .def(
          "add", [](Departing& self, Entry& entry) { self.add(&entry); }, py::arg("entry"),
          "An entry was sent.")
      .def("notice_gone", &Departing::notice_gone, py::arg("looks") = Departing::kAll,
           "Account for storages that went away since the last look, oldest first. `looks` bounds "
           "how many of those are looked at that were sent and are still held.")
      .def("notice_some", &Departing::notice_some, "What each save does: look at a few of those.")
      .def("__len__", &Departing::size);
}

}  // namespace memswap
