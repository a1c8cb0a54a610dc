// Windows of an engine, as Python sees them.
#include "engine/windows.h"

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "packed_stream.h"

namespace memswap {
namespace py = pybind11;

namespace {

// An object of Python's, which is not kept alive: it knows the windows. What it no longer hears is
// nobody's business.
class PythonObserver final : public CodecObserver {
 public:
  explicit PythonObserver(const py::object& observer) : observer_(observer) {}

  void begin_iteration() override { call("begin_iteration"); }
  void begin() override { call("begin"); }
  void submitted(const c10::Stream& stream, int64_t nbytes, bool encoded) override {
    call("submitted", packed(stream), nbytes, encoded);
  }

 private:
  template <class... Arguments>
  void call(const char* name, const Arguments&... arguments) {
    const py::object observer = observer_();
    if (!observer.is_none()) {
      observer.attr(name)(arguments...);
    }
  }

  const py::weakref observer_;
};

using IsCurrent = std::function<bool(std::tuple<int64_t, int64_t, int64_t>)>;

template <auto number>
void def_option(py::class_<Windows, std::shared_ptr<Windows>>& windows, const char* name,
                const char* doc) {
  using Value = std::decay_t<decltype(std::declval<WindowQueue&>().*number)>;
  windows.def_property(
      name, [](const Windows& self) { return self.queue.*number; },
      [](Windows& self, Value value) { self.queue.*number = value; }, doc);
}

py::dict counts_of(const Windows& self) {
  using namespace py::literals;
  const WindowCounts& all = self.queue.counts;
  return py::dict(
      "windows"_a = all.windows, "window_s"_a = all.window_s,
      "encoded_in_windows"_a = all.encoded_in_windows, "encoded_bytes"_a = all.encoded_bytes,
      "started_at_bound"_a = all.started_at_bound, "started_at_end"_a = all.started_at_end,
      "kept_storages"_a = all.kept_storages, "kept_bytes"_a = all.kept_bytes,
      "decoded_in_windows"_a = all.decoded_in_windows, "decoded_ahead"_a = all.decoded_ahead,
      "pending_bytes"_a = self.queue.pending_bytes());
}

}  // namespace

void bind_windows(py::module_& module) {
  py::class_<Windows, std::shared_ptr<Windows>> windows(
      module, "Windows", "Codec work of an engine that waits for windows (csrc/engine/windows.h).");
  windows
      .def("open", &Windows::open, py::arg("seconds"),
           "An operator of so many seconds is about to be launched on the current stream.")
      .def("enter", &Windows::enter, py::arg("seconds"),
           "The same for several operators, up to `leave`, which the thread calls.")
      .def("leave", &Windows::leave)
      .def_property_readonly("inside", &Windows::inside,
                             "Whether the thread is in an explicit window.")
      .def("end_forward", &Windows::end_forward, "The managed part of a forward is over.")
      .def("begin_iteration", &Windows::begin_iteration, "What follows belongs to a new forward.")
      .def(
          "start_now",
          [](Windows& self, const std::vector<EntryPtr>& entries) {
            self.queue.start_now(entries);
          },
          py::arg("entries"), "Start some of what waits, in no window.")
      .def("bring", &Windows::bring, py::arg("entries"),
           "Start bringing back those that are away, as far as there is memory.")
      .def(
          "clear", [](Windows& self) { self.queue.clear(); },
          "Promise nothing any more. What waits stays where it is.")
      .def_property_readonly(
          "pending", [](const Windows& self) { return self.queue.pending(); },
          "Entries whose encodes wait, in the order in which they should start.")
      .def_property_readonly("counts", &counts_of, "What became of the work, a new dict.")
      .def("reset_counts", [](Windows& self) { self.queue.counts = {}; })
      .def(
          "set_observer",
          [](Windows& self, const py::object& observer) {
            self.observer = std::make_shared<PythonObserver>(observer);
          },
          py::arg("observer"), "Who hears what is started. Not kept alive.")
      .def(
          "set_is_current",
          [](Windows& self, std::optional<IsCurrent> is_current) {
            self.is_current = nullptr;
            if (is_current) {
              self.is_current = [ask = std::move(*is_current)](const c10::Stream& stream) {
                return ask(packed(stream));
              };
            }
          },
          py::arg("is_current"),
          "Whether a stream is the calling thread's current one; None: it is asked.")
      .def_readwrite("captures", &Windows::captures,
                     "Whether the current stream of a GPU captures a graph; None: never.");
  def_option<&WindowQueue::encode_rate>(windows, "encode_rate", "Bytes per second.");
  def_option<&WindowQueue::decode_rate>(windows, "decode_rate", "Bytes per second.");
  def_option<&WindowQueue::max_pending_bytes>(windows, "max_pending_bytes",
                                              "Most that wait; None: from what forwards defer.");
  def_option<&WindowQueue::leftovers_start>(
      windows, "leftovers_start", "Whether what waits at the end of a forward starts then.");
}

}  // namespace memswap
