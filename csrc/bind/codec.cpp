// Codec lanes, frames and backends, as Python sees them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "codec/backends.h"
#include "codec/codec_lane.h"
#include "codec/dtypes.h"
#include "codec/host_memory.h"
#include "codec/self_check.h"
#include "codec/stream_codec_lane.h"
#include "codec/tensors.h"
#include "codec/worker_codec_lane.h"
#include "left_out.h"
#include "packed_stream.h"
#include "stop_at_exit.h"
#include "storage_ref.h"

namespace memswap {
namespace py = pybind11;
using without_gil = py::call_guard<py::gil_scoped_release>;

namespace {

using Encoded = std::optional<std::pair<EncodedStoragePtr, TicketPtr>>;

Encoded as_pair(std::optional<Encoding> encoding) {
  if (!encoding) {
    return std::nullopt;
  }
  return std::pair(std::move(encoding->encoded), std::move(encoding->ticket));
}

FrameOptions options_of(uint8_t dtype, std::optional<uint8_t> shape,
                        std::optional<uint64_t> var_capacity, uint8_t profile, uint8_t center) {
  return {.dtype = dtype,
          .shape = shape,
          .var_capacity = var_capacity,
          .profile = profile,
          .center = center};
}

// Python's buffers and bytes without numpy, which torch may have been installed without.
at::Tensor frame_of(const py::buffer& bytes) {
  const py::buffer_info found = bytes.request();
  const auto nbytes = static_cast<size_t>(found.size * found.itemsize);
  const py::gil_scoped_release release;
  at::Tensor frame = new_host_frame(nbytes);
  std::memcpy(frame.mutable_data_ptr(), found.ptr, nbytes);
  return frame;
}

py::bytes bytes_of(const at::Tensor& frame) {
  return {static_cast<const char*>(frame.const_data_ptr()), frame.nbytes()};
}

void bind_frames(py::module_& module) {
  py::class_<frame::Layout>(module, "FrameLayout", "Sizes of a frame, known before it is encoded.")
      .def_readonly("elements", &frame::Layout::elements)
      .def_readonly("blocks", &frame::Layout::blocks)
      .def_readonly("fixed_nbytes", &frame::Layout::var)
      .def_property_readonly("max_var_units", &frame::Layout::max_var_units)
      .def("most_overflow_units", &most_overflow, py::arg("var_capacity"), py::arg("spare_tiles"),
           "Units that an encode may need beyond var.")
      .def_property_readonly("max_nbytes", [](const frame::Layout& layout) {
        return layout.bytes(layout.max_var_units());
      });
  module.def("frame_layout", &checked_layout, py::arg("dtype"), py::arg("shape"),
             py::arg("elements"));

  py::class_<FrameReport>(module, "FrameReport", "What an encoder found.")
      .def_property_readonly("elements",
                             [](const FrameReport& report) { return report.header.elements; })
      .def_property_readonly("blocks",
                             [](const FrameReport& report) { return report.header.blocks; })
      .def_property_readonly("dtype", [](const FrameReport& report) { return report.header.dtype; })
      .def_property_readonly("shape", [](const FrameReport& report) { return report.header.shape; })
      .def_property_readonly("frame_nbytes", &FrameReport::frame_nbytes)
      .def_property_readonly("var_capacity",
                             [](const FrameReport& report) { return report.header.var_capacity; })
      .def_property_readonly("var_used",
                             [](const FrameReport& report) { return report.header.var_used; })
      .def_property_readonly("overflow_used",
                             [](const FrameReport& report) { return report.header.overflow_used; })
      .def_property_readonly("zeros", [](const FrameReport& report) { return report.header.zeros; })
      .def_property_readonly("center_sum",
                             [](const FrameReport& report) { return report.header.center_sum; })
      .def_property_readonly("status",
                             [](const FrameReport& report) { return report.header.status; })
      .def(
          "mode_count",
          [](const FrameReport& report, uint32_t mode) {
            if (mode < 1 || mode > frame::kModeCounts) {
              throw py::value_error("modes are 1 to 14");
            }
            return report.header.mode_count[mode - 1];
          },
          py::arg("mode"));

  py::register_local_exception<DamagedFrameError>(module, "DamagedFrameError", PyExc_RuntimeError);
  module.def("encode_tensor", &encode_tensor, py::arg("tensor"), py::arg("dtype"), py::arg("shape"),
             py::arg("checksum"), without_gil());
  module.def("choose_shape", &choose_shape, py::arg("tensor"), py::arg("dtype"), without_gil(),
             "The shape in which a tensor takes the fewest bytes, by a sample of its blocks.");
  module.def("exact_frame", &exact_frame, py::arg("frame"), without_gil());
  module.def(
      "decode_tensor",
      [](const at::Tensor& frame, const std::vector<int64_t>& size, at::ScalarType dtype,
         std::optional<uint8_t> shape) {
        const auto hint = static_cast<uint8_t>(shape ? 1 + *shape : 0);
        return decode_tensor(frame, size, dtype, /*check_decode=*/true, hint);
      },
      py::arg("frame"), py::arg("size"), py::arg("dtype"), py::arg("shape") = std::nullopt,
      without_gil());
  module.def("portable_frame", &portable_frame, py::arg("frame"), without_gil());
  module.def("frame_of", &frame_of, py::arg("bytes"),
             "A copy of a contiguous buffer in host memory, aligned as a frame is.");
  module.def("bytes_of", &bytes_of, py::arg("frame"), "A frame in host memory, as bytes.");
  module.def("read_header", &read_header, py::arg("frame"));
  module.def(
      "dtype_code", [](at::ScalarType dtype) { return static_cast<int>(frame_dtype(dtype)); },
      py::arg("dtype"), "The frame dtype of a torch dtype, or of its parts where it is complex.");
  module.def("spare_pool", &spare_pool, "The pool behind encode and decode of single tensors.");
}

void bind_backends(py::module_& module) {
  module.def(
      "register_codec",
      [](const std::string& device_type, const py::capsule& capsule) {
        if (capsule.name() == nullptr || std::string(capsule.name()) != "memswap_codec") {
          throw py::value_error("register_codec: expected a capsule named memswap_codec");
        }
        register_codec(c10::Device(device_type).type(), capsule.get_pointer<const memswap_codec>());
      },
      py::arg("device_type"), py::arg("capsule"),
      "Serve a device type with a memswap_codec (kernels/include/memswap/codec.h).");
  module.def(
      "codec_capsule",
      [](const c10::Device& device) -> std::optional<py::capsule> {
        const memswap_codec* codec = codec_of(device.type());
        return codec ? std::optional(py::capsule(codec, "memswap_codec")) : std::nullopt;
      },
      py::arg("device"), "The memswap_codec that serves a device, or None.");
  module.def(
      "codec_name",
      [](const c10::Device& device) -> std::optional<std::string> {
        const memswap_codec* codec = codec_of(device.type());
        return codec ? std::optional<std::string>(codec->name) : std::nullopt;
      },
      py::arg("device"));
  module.def(
      "codec_spare_tiles",
      [](const c10::Device& device) -> uint32_t {
        const memswap_codec* codec = codec_of(device.type());
        return codec ? codec->spare_tiles : 0;
      },
      py::arg("device"), "Tiles of var that an encode may leave unused (memswap_codec).");
  module.def(
      "codec_fault",
      [](const c10::Device& device, uint8_t dtype, uint8_t layout) {
        const memswap_codec* codec = codec_of(device.type());
        return codec ? distrust(*codec, device, dtype, layout)
                     : std::string("no codec serves the device");
      },
      py::arg("device"), py::arg("dtype"), py::arg("layout"), without_gil(),
      "Why the device's codec must not encode a dtype in a layout there; empty where it may "
      "(csrc/codec/self_check.h).");
  module.def(
      "codec_faults",
      [](const c10::Device& device) {
        const memswap_codec* codec = codec_of(device.type());
        return codec ? faults(*codec, device) : std::vector<std::string>();
      },
      py::arg("device"), without_gil(),
      "All that the self-check of the device's codec found wrong, a sentence each.");
}

// By device type.
py::dict codecs_left_out() {
  py::dict reasons;
  if (*kCudaLeftOut != '\0') {
    reasons["cuda"] = kCudaLeftOut;
  }
  if (*kAscendLeftOut != '\0') {
    reasons["npu"] = kAscendLeftOut;
  }
  return reasons;
}

void bind_codec_lanes(py::module_& module) {
  py::class_<FrameWatch, std::shared_ptr<FrameWatch>>(module, "FrameWatch",
                                                      "What an encoder found; holds no frame.")
      .def("report", &FrameWatch::report, without_gil());

  py::class_<EncodedStorage, EncodedStoragePtr>(module, "EncodedStorage",
                                                "One storage's bytes, encoded; owned.")
      .def_property_readonly("nbytes", &EncodedStorage::nbytes)
      .def_property_readonly("raw_nbytes", &EncodedStorage::raw_nbytes)
      .def_property_readonly("overflow_nbytes", &EncodedStorage::overflow_nbytes)
      .def_property_readonly("device_nbytes", &EncodedStorage::device_nbytes)
      .def_property_readonly("swapped", &EncodedStorage::swapped)
      .def("wait_sent", &EncodedStorage::wait_sent, without_gil(),
           "Order the caller after the frame's way to a pool: it is off the device then.")
      .def("watch", &EncodedStorage::watch)
      .def("report", &EncodedStorage::report, without_gil());

  py::class_<CodecLane, std::shared_ptr<CodecLane>>(module, "CodecLane",
                                                    "Where encodes and decodes run, in order.")
      .def_property_readonly("last_refusal", &CodecLane::last_refusal)
      .def(
          "encode",
          [](CodecLane& lane, StorageRefPtr storage, uint8_t dtype, std::optional<uint8_t> shape,
             std::optional<uint64_t> var_capacity, uint8_t profile, uint8_t center) {
            return as_pair(lane.encode(std::move(storage),
                                       options_of(dtype, shape, var_capacity, profile, center)));
          },
          py::arg("storage"), py::arg("dtype"), py::arg("shape"),
          py::arg("var_capacity") = py::none(), py::arg("profile") = 0, py::arg("center") = 0,
          without_gil())
      .def(
          "encode_to",
          [](CodecLane& lane, StorageRefPtr storage, uint8_t dtype, std::optional<uint8_t> shape,
             std::optional<uint64_t> var_capacity, const std::shared_ptr<Lane>& copies,
             const std::shared_ptr<Pool>& pool, uint8_t profile, uint8_t center) {
            return as_pair(lane.encode_to(std::move(storage),
                                          options_of(dtype, shape, var_capacity, profile, center),
                                          copies, pool));
          },
          py::arg("storage"), py::arg("dtype"), py::arg("shape"), py::arg("var_capacity"),
          py::arg("lane"), py::arg("pool"), py::arg("profile") = 0, py::arg("center") = 0,
          without_gil())
      .def("decode", &CodecLane::decode, py::arg("encoded"), without_gil())
      .def("meet_stream", &CodecLane::meet_stream)
      .def("settle", &CodecLane::settle, without_gil())
      .def("leaving_bytes", &CodecLane::leaving_bytes, without_gil())
      .def("set_max_leaving_bytes", &CodecLane::set_max_leaving_bytes, py::arg("nbytes"));

  py::class_<WorkerCodecLane, CodecLane, std::shared_ptr<WorkerCodecLane>>(
      module, "WorkerCodecLane", "Encodes and decodes storages in host memory, on threads.")
      .def(py::init([](size_t workers, std::shared_ptr<Pool> pool, std::shared_ptr<Pool> outputs,
                       size_t max_leaving_bytes) {
             auto lane = std::make_shared<WorkerCodecLane>(workers, std::move(pool),
                                                           std::move(outputs), max_leaving_bytes);
             stop_at_exit().add<WorkerCodecLane>(lane,
                                                 [](WorkerCodecLane& known) { known.stop(); });
             return lane;
           }),
           py::arg("workers"), py::arg("pool"), py::arg("outputs") = py::none(),
           py::arg("max_leaving_bytes") = 0)
      .def("stop", &WorkerCodecLane::stop);

  py::class_<StreamCodecLane, CodecLane, std::shared_ptr<StreamCodecLane>>(
      module, "StreamCodecLane", "Encodes and decodes storages on an accelerator, in stream order.")
      .def(py::init([](const c10::Device& device, size_t max_leaving_bytes, size_t arena_budget,
                       size_t arena_chunk, uint32_t max_processors) {
             const py::gil_scoped_release release;  // it allocates
             return std::make_shared<StreamCodecLane>(
                 device, StreamCodecLane::Options{.max_leaving_bytes = max_leaving_bytes,
                                                  .arena_budget = arena_budget,
                                                  .arena_chunk = arena_chunk,
                                                  .max_processors = max_processors});
           }),
           py::arg("device"), py::arg("max_leaving_bytes") = 0, py::arg("arena_budget") = 0,
           py::arg("arena_chunk") = size_t{16} << 20, py::arg("max_processors") = 0)
      .def_property_readonly(
          "encode_stream", [](const StreamCodecLane& lane) { return packed(lane.encode_stream()); })
      .def_property_readonly(
          "decode_stream", [](const StreamCodecLane& lane) { return packed(lane.decode_stream()); })
      .def_property_readonly(
          "control_stream",
          [](const StreamCodecLane& lane) { return packed(lane.control_stream()); })
      .def(
          "decode_status", [](StreamCodecLane& lane) { return lane.decode_status().wait(); },
          without_gil())
      .def(
          "take_decode_status",
          [](StreamCodecLane& lane) { return lane.decode_status().take_known(); }, without_gil())
      .def("set_arena_budget", &StreamCodecLane::set_arena_budget, py::arg("nbytes"), without_gil())
      .def("set_overflow_room", &StreamCodecLane::set_overflow_room, py::arg("nbytes"),
           without_gil(), "Overflows take exactly so many bytes of the device; None: as before.")
      .def("trim_arena", &StreamCodecLane::trim_arena, without_gil())
      .def("arena_statistics", [](const StreamCodecLane& lane) {
        Arena::Statistics statistics;
        {
          const py::gil_scoped_release release;
          statistics = lane.arena_statistics();
        }
        using namespace py::literals;
        return py::dict("budget_bytes"_a = statistics.budget_bytes,
                        "reserved_bytes"_a = statistics.reserved_bytes,
                        "set_aside_bytes"_a = statistics.set_aside_bytes,
                        "chunks"_a = statistics.chunks, "live_shares"_a = statistics.live_shares,
                        "resets"_a = statistics.resets, "refusals"_a = statistics.refusals);
      });
}

}  // namespace

void bind_codec(py::module_& module) {
  module.attr("codecs_left_out") = codecs_left_out();
  bind_backends(module);
  bind_frames(module);
  bind_codec_lanes(module);
}

}  // namespace memswap
