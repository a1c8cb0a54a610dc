// Frames, codec lanes and backends.
#include <cstring>

#include "bind.h"
#include "codec/backends.h"
#include "codec/codec_lane.h"
#include "codec/dtypes.h"
#include "codec/host_memory.h"
#include "codec/self_check.h"
#include "codec/stream_codec_lane.h"
#include "codec/tensors.h"
#include "codec/worker_codec_lane.h"
#include "left_out.h"
#include "work/stop_at_exit.h"

namespace memswap {

template <>
inline constexpr std::tuple kMembers<Encoding>{&Encoding::encoded, &Encoding::ticket};

static py::object fields_of(const FrameReport& report) {
  const frame::Header& of = report.header;
  return with_attributes("elements"_a = of.elements, "blocks"_a = of.blocks, "dtype"_a = of.dtype,
                         "shape"_a = of.shape, "frame_nbytes"_a = report.frame_nbytes(),
                         "var_capacity"_a = of.var_capacity, "var_used"_a = of.var_used,
                         "overflow_used"_a = of.overflow_used, "zeros"_a = of.zeros,
                         "center_sum"_a = of.center_sum, "status"_a = of.status);
}

static py::object fields_of(const Arena::Statistics& all) {
  return py::dict("budget_bytes"_a = all.budget_bytes, "reserved_bytes"_a = all.reserved_bytes,
                  "pinned_bytes"_a = all.pinned_bytes, "set_aside_bytes"_a = all.set_aside_bytes,
                  "chunks"_a = all.chunks, "live_shares"_a = all.live_shares,
                  "resets"_a = all.resets, "refusals"_a = all.refusals);
}

namespace {

py::object layout_of(int64_t dtype, int64_t shape, uint64_t elements) {
  const frame::Layout layout = checked_layout(dtype, shape, elements);
  const uint64_t most = layout.max_var_units();
  return with_attributes("elements"_a = layout.elements, "blocks"_a = layout.blocks,
                         "fixed_nbytes"_a = layout.var, "max_var_units"_a = most,
                         "max_nbytes"_a = layout.bytes(most));
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

constexpr const char* kCapsule = "memswap_codec";

void serve(const std::string& device_type, const py::capsule& capsule) {
  if (capsule.name() == nullptr || std::string(capsule.name()) != kCapsule) {
    throw py::value_error("register_codec: expected a capsule named memswap_codec");
  }
  register_codec(c10::Device(device_type).type(), capsule.get_pointer<const memswap_codec>());
}

void bind_frames(py::module_& module) {
  module.def("frame_layout", &layout_of, "dtype"_a, "shape"_a, "elements"_a);
  py::register_local_exception<DamagedFrameError>(module, "DamagedFrameError", PyExc_RuntimeError);
  module.def("encode_tensor", &encode_tensor, "tensor"_a, "dtype"_a, "shape"_a, "checksum"_a,
             without_gil());
  module.def("choose_shape", &choose_shape, "tensor"_a, "dtype"_a, without_gil());
  module.def("exact_frame", &exact_frame, "frame"_a, without_gil());
  module.def(
      "decode_tensor",
      [](const at::Tensor& frame, const std::vector<int64_t>& size, at::ScalarType dtype,
         std::optional<uint8_t> shape) {
        return decode_tensor(frame, size, dtype, /*check_decode=*/true, shape);
      },
      "frame"_a, "size"_a, "dtype"_a, "shape"_a = std::nullopt, without_gil());
  module.def("portable_frame", &portable_frame, "frame"_a, without_gil());
  module.def("frame_of", &frame_of, "bytes"_a);
  module.def("bytes_of", &bytes_of, "frame"_a);
  module.def("read_header", &read_header, "frame"_a);
  module.def(
      "dtype_code", [](at::ScalarType dtype) { return static_cast<int>(frame_dtype(dtype)); },
      "dtype"_a);
  module.def("spare_pool", &spare_pool);
}

void bind_backends(py::module_& module) {
  module.def("register_codec", &serve, "device_type"_a, "capsule"_a);
  module.def("codec_capsule", [](const c10::Device& device) -> py::object {
    const memswap_codec* const codec = codec_of(device.type());
    return codec ? py::capsule(codec, kCapsule) : py::object(py::none());
  });
  module.def("codec_name", [](const c10::Device& device) {
    const memswap_codec* const codec = codec_of(device.type());
    return codec ? codec->name : nullptr;
  });
  module.def("codec_fault", &codec_fault, "device"_a, "dtype"_a, "layout"_a, without_gil());
  module.def("codec_faults", &codec_faults, "device"_a, without_gil());
  py::dict left_out;  // by device type
  if (*kCudaLeftOut != '\0') {
    left_out["cuda"] = kCudaLeftOut;
  }
  if (*kAscendLeftOut != '\0') {
    left_out["npu"] = kAscendLeftOut;
  }
  module.attr("codecs_left_out") = left_out;
}

void bind_codec_lanes(py::module_& module) {
  py::class_<EncodedStorage, EncodedStoragePtr>(module, "EncodedStorage")
      .def_property_readonly("nbytes", &EncodedStorage::nbytes)
      .def_property_readonly("overflow_nbytes", &EncodedStorage::overflow_nbytes)
      .def_property_readonly("device_nbytes", &EncodedStorage::device_nbytes)
      .def_property_readonly("swapped", &EncodedStorage::swapped)
      .def("wait_sent", &EncodedStorage::wait_sent, without_gil())
      .def("watch", &EncodedStorage::watch)
      .def("report", &EncodedStorage::report, without_gil());
  py::class_<FrameWatch, std::shared_ptr<FrameWatch>>(module, "FrameWatch")
      .def("report", &FrameWatch::report, without_gil());

  py::class_<CodecLane, std::shared_ptr<CodecLane>>(module, "CodecLane")
      .def_property_readonly("last_refusal", &CodecLane::last_refusal)
      .def("encode", &CodecLane::encode, "storage"_a, "options"_a, without_gil())
      .def("encode_to", &CodecLane::encode_to, "storage"_a, "options"_a, "lane"_a, "pool"_a,
           without_gil())
      .def("decode", &CodecLane::decode, "encoded"_a, without_gil())
      .def("settle", &CodecLane::settle, without_gil())
      .def("leaving_bytes", &CodecLane::leaving_bytes, without_gil())
      .def("set_max_leaving_bytes", &CodecLane::set_max_leaving_bytes, "nbytes"_a);

  py::class_<WorkerCodecLane, CodecLane, std::shared_ptr<WorkerCodecLane>>(module,
                                                                           "WorkerCodecLane")
      .def(py::init([](size_t workers, std::shared_ptr<Pool> pool, std::shared_ptr<Pool> outputs,
                       size_t max_leaving_bytes) {
             return stop_at_exit().add(
                 std::make_shared<WorkerCodecLane>(workers, std::move(pool), std::move(outputs),
                                                   max_leaving_bytes),
                 &WorkerCodecLane::stop);
           }),
           "workers"_a, "pool"_a, "outputs"_a = py::none(), "max_leaving_bytes"_a = 0)
      .def("stop", &WorkerCodecLane::stop);

  py::class_<StreamCodecLane, CodecLane, std::shared_ptr<StreamCodecLane>>(module,
                                                                           "StreamCodecLane")
      .def(py::init([](const c10::Device& device, size_t max_leaving_bytes, size_t arena_budget,
                       size_t arena_chunk, std::shared_ptr<Pool> arena_pool,
                       uint32_t max_processors) {
             const py::gil_scoped_release release;  // it allocates
             return std::make_shared<StreamCodecLane>(
                 device, StreamCodecLane::Options{max_leaving_bytes, arena_budget, arena_chunk,
                                                  std::move(arena_pool), max_processors});
           }),
           "device"_a, "max_leaving_bytes"_a = 0, "arena_budget"_a = 0,
           "arena_chunk"_a = size_t{16} << 20, "arena_pool"_a = py::none(), "max_processors"_a = 0)
      .def_property_readonly("encode_stream", &StreamCodecLane::encode_stream)
      .def_property_readonly("decode_stream", &StreamCodecLane::decode_stream)
      .def_property_readonly("control_stream", &StreamCodecLane::control_stream)
      .def(
          "decode_status", [](StreamCodecLane& lane) { return lane.decode_status().wait(); },
          without_gil())
      .def(
          "take_decode_status",
          [](StreamCodecLane& lane) { return lane.decode_status().take_known(); }, without_gil())
      .def("set_arena_budget", &StreamCodecLane::set_arena_budget, "nbytes"_a, without_gil())
      .def("set_overflow_room", &StreamCodecLane::set_overflow_room, "nbytes"_a, without_gil())
      .def("trim_arena", &StreamCodecLane::trim_arena, without_gil())
      .def("arena_statistics", &StreamCodecLane::arena_statistics, without_gil());
}

}  // namespace

void bind_codec(py::module_& module) {
  bind_backends(module);
  bind_frames(module);
  bind_codec_lanes(module);
}

}  // namespace memswap
