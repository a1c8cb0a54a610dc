// Engine and its lock, as Python sees them.
#include "engine/engine.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "errors.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;

namespace {

// The engine's host is an object of Python's, which is not kept alive: it owns the engine. What it
// no longer hears is nobody's business.
class PythonHost final : public Host {
 public:
  explicit PythonHost(const py::object& host) : host_(host) {}

  void learn() override { call("learn"); }
  void look_ahead(const IterationPtr& iteration, size_t index) override {
    call("look_ahead", iteration, index);
  }
  void hurry(const EntryPtr& entry) override { call("hurry", entry); }

 private:
  template <class... Arguments>
  void call(const char* name, const Arguments&... arguments) {
    const py::object host = host_();
    if (!host.is_none()) {
      host.attr(name)(arguments...);
    }
  }

  const py::weakref host_;
};

PolicyTable::Action action_of(const std::string& word) {
  static const std::map<std::string, PolicyTable::Action> words = {
      {"swap", PolicyTable::Action::kSwap}, {"keep", PolicyTable::Action::kKeep}};
  const auto found = words.find(word);
  return found == words.end() ? PolicyTable::Action::kAsk : found->second;
}

EnginePtr make_engine(std::optional<int64_t> window_bytes) {
  auto engine = std::make_shared<Engine>(window_bytes);
  engine->ledger.warn = warn;
  return engine;
}

void set_policy(Engine& engine, int64_t min_bytes, const std::optional<std::string>& action) {
  PolicyTable& table = engine.policy;
  table.min_bytes = min_bytes;
  table.by_device = !action;
  table.action = action ? action_of(*action) : PolicyTable::Action::kAsk;
}

void set_device(Engine& engine, c10::Device device, const std::string& action,
                std::shared_ptr<BlockSender> sender) {
  auto& devices = engine.policy.devices;
  std::erase_if(devices, [&](const auto& row) { return row.device == device; });
  devices.push_back({device, action_of(action), std::move(sender)});
}

void set_persistent(Engine& engine, const std::vector<at::Tensor>& tensors) {
  engine.persistent.clear();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.unsafeGetTensorImpl()->has_storage()) {
      const WeakStorage storage(StorageRef(tensor.storage()));
      engine.persistent.emplace(storage.key(), storage);
    }
  }
}

void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const EntryStateError& error) {
    set_error("EntryStateError", error.what());
  } catch (const LostBytes& error) {
    set_error("TransferError", error.what());
  }
}

}  // namespace

void bind_engine(py::module_& module) {
  py::register_local_exception_translator(translate);

  py::class_<Lock>(module, "Lock", "A lock for `with`, which its thread may take again.")
      .def(py::init<>())
      .def("__enter__",
           [](py::object self) {
             self.cast<Lock&>().lock();
             return self;
           })
      .def("__exit__", [](Lock& lock, const py::args&) { lock.unlock(); });

  py::class_<Engine, EnginePtr>(module, "Engine",
                                "What becomes of the storages that autograd saves "
                                "(csrc/engine/engine.h).")
      .def(py::init(&make_engine), py::arg("window_bytes"))
      .def(
          "set_host",
          [](Engine& self, const py::object& host) {
            self.host = std::make_unique<PythonHost>(host);
          },
          py::arg("host"), "Who is asked (host.h). Not kept alive.")
      .def("set_policy", &set_policy, py::arg("min_bytes"), py::arg("action"),
           "What is done with every storage; None: as its device's row says. 'ask' and what is not "
           "known here: `decide`.")
      .def("set_device", &set_device, py::arg("device"), py::arg("action"),
           py::arg("sender").none(false),
           "What a policy without an action means there, and how storages are swapped.")
      .def("set_persistent", &set_persistent, py::arg("tensors"),
           "Parameters and buffers, whose storages stay.")
      .def(
          "is_persistent",
          [](const Engine& self, uintptr_t key) {
            return self.persistent.contains(reinterpret_cast<const void*>(key));
          },
          py::arg("key"))
      .def(
          "make_entry",
          [](Engine& self, const at::Tensor& tensor, const SavedView& look) {
            StorageRefPtr storage;
            EntryPtr entry = self.make_entry(tensor, look, storage);
            return std::pair(std::move(entry), std::move(storage));
          },
          py::arg("tensor"), py::arg("view"),
          "The entry of what the iteration admitted last, and its storage.")
      .def(
          "swap",
          [](Engine& self, const at::Tensor& tensor, const SavedView& look, BlockSender& sender) {
            EntryPtr entry;
            const bool moved = self.swap(tensor, look, sender, entry).as == Saved::As::kMoved;
            return std::pair(std::move(entry), moved);
          },
          py::arg("tensor"), py::arg("view"), py::arg("sender"),
          "Make the entry of what the iteration admitted last, and send it. The entry, and whether "
          "there was room.")
      .def("refused", &Engine::refused, py::arg("short_of"), py::arg("why"), py::arg("entry"),
           "A sender has no room for a storage: told once. The reason for the statistics.")
      .def("demand", &Engine::demand, py::arg("entry").none(false),
           "The storage of an entry, ordered before what the caller does next.")
      .def("saved", &Engine::saved, py::arg("entry").none(false),
           "What follows a save: what has to be gone by then, as planned, is waited for.")
      .def(
          "release",
          [](Engine& self, Iteration& of, size_t index) {
            self.release(of, index);
            if (const EntryPtr entry = of.entry(index)) {
              entry->release_frame();
            }
          },
          py::arg("iteration"), py::arg("index"),
          "What comes next comes after a storage has left, if it is leaving or waits to; its "
          "frame's way to a pool included.")
      .def_static("look_at_released", &Engine::look_at_released, py::arg("iteration"),
                  "Notice what was released, was still held then, and is gone by now.")
      .def("count_recomputed", &Engine::count_recomputed, py::arg("storage"),
           "A recomputed unit has saved a storage again, in backward. The lock is held.")
      .def(
          "sweep_recomputed", [](Engine& self) { self.recomputed.sweep(); },
          "Notice which of those are gone.")
      .def(
          "clear_recomputed", [](Engine& self) { self.recomputed.clear(); },
          "No backward runs: what is there of those still is somebody else's.")
      .def("note_window", &Engine::note_window, py::arg("seconds"),
           "An operator of so many seconds is about to be launched; codec work may run beside it.")
      .def_property_readonly(
          "ledger",
          [](const EnginePtr& self) { return std::shared_ptr<Ledger>(self, &self->ledger); })
      .def_readonly("lock", &Engine::lock)
      .def_readonly("departing", &Engine::departing)
      .def_readonly("timeline", &Engine::timeline)
      .def_readwrite("iteration", &Engine::iteration, "That saves now.")
      .def_readonly("backward", &Engine::backward, "Whose backward runs, where it is directed.")
      .def_readwrite("directed", &Engine::directed)
      .def_readwrite("looks_ahead", &Engine::looks_ahead)
      .def_readwrite("shares_batches", &Engine::shares_batches)
      .def_readwrite("awaits_reports", &Engine::awaits_reports);
}

}  // namespace memswap
