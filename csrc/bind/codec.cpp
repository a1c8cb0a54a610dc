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

template <>
struct py::detail::type_caster<memswap::Encoding>
    : memswap::TupleCaster<memswap::Encoding, &memswap::Encoding::encoded,
                           &memswap::Encoding::ticket> {};

namespace memswap {

namespace {

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

template <auto member>
auto in_header(const FrameReport& report) {
  return report.header.*member;
}

// What is asked of the codec that serves a device, and what is said where none does.
template <class Result, class... Arguments, class Ask>
auto of_codec(Result without, Ask ask) {
  return [without, ask](const c10::Device& device, Arguments... arguments) -> Result {
    const memswap_codec* const codec = codec_of(device.type());
    return codec ? Result(ask(*codec, device, arguments...)) : without;
  };
}

constexpr const char* kCapsule = "memswap_codec";

void serve(const std::string& device_type, const py::capsule& capsule) {
  if (capsule.name() == nullptr || std::string(capsule.name()) != kCapsule) {
    throw py::value_error("register_codec: expected a capsule named memswap_codec");
  }
  register_codec(c10::Device(device_type).type(), capsule.get_pointer<const memswap_codec>());
}

void bind_frames(py::module_& module) {
  py::class_<frame::Layout>(module, "FrameLayout")
      .def_readonly("elements", &frame::Layout::elements)
      .def_readonly("blocks", &frame::Layout::blocks)
      .def_readonly("fixed_nbytes", &frame::Layout::var)
      .def_property_readonly("max_var_units", &frame::Layout::max_var_units)
      .def("most_overflow_units", &most_overflow, "var_capacity"_a, "spare_tiles"_a)
      .def_property_readonly("max_nbytes", [](const frame::Layout& layout) {
        return layout.bytes(layout.max_var_units());
      });
  module.def("frame_layout", &checked_layout, "dtype"_a, "shape"_a, "elements"_a);

  py::class_<FrameReport>(module, "FrameReport")
      .def_property_readonly("elements", &in_header<&frame::Header::elements>)
      .def_property_readonly("blocks", &in_header<&frame::Header::blocks>)
      .def_property_readonly("dtype", &in_header<&frame::Header::dtype>)
      .def_property_readonly("shape", &in_header<&frame::Header::shape>)
      .def_property_readonly("frame_nbytes", &FrameReport::frame_nbytes)
      .def_property_readonly("var_capacity", &in_header<&frame::Header::var_capacity>)
      .def_property_readonly("var_used", &in_header<&frame::Header::var_used>)
      .def_property_readonly("overflow_used", &in_header<&frame::Header::overflow_used>)
      .def_property_readonly("zeros", &in_header<&frame::Header::zeros>)
      .def_property_readonly("center_sum", &in_header<&frame::Header::center_sum>)
      .def_property_readonly("status", &in_header<&frame::Header::status>);

  py::register_local_exception<DamagedFrameError>(module, "DamagedFrameError", PyExc_RuntimeError);
  module.def("encode_tensor", &encode_tensor, "tensor"_a, "dtype"_a, "shape"_a, "checksum"_a,
             without_gil());
  module.def("choose_shape", &choose_shape, "tensor"_a, "dtype"_a, without_gil());
  module.def("exact_frame", &exact_frame, "frame"_a, without_gil());
  module.def(
      "decode_tensor",
      [](const at::Tensor& frame, const std::vector<int64_t>& size, at::ScalarType dtype,
         std::optional<uint8_t> shape) {
        const auto hint = static_cast<uint8_t>(shape ? 1 + *shape : 0);
        return decode_tensor(frame, size, dtype, /*check_decode=*/true, hint);
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
  module.def("codec_capsule",
             of_codec<py::object>(py::none(), [](const memswap_codec& codec, c10::Device) {
               return py::capsule(&codec, kCapsule);
             }));
  module.def("codec_name", of_codec<const char*>(nullptr, [](const memswap_codec& codec,
                                                             c10::Device) { return codec.name; }));
  module.def("codec_spare_tiles",
             of_codec<uint32_t>(
                 0, [](const memswap_codec& codec, c10::Device) { return codec.spare_tiles; }));
  module.def("codec_fault",
             of_codec<std::string, uint8_t, uint8_t>("no codec serves the device", &distrust),
             without_gil());
  module.def("codec_faults", of_codec<std::vector<std::string>>({}, &faults), without_gil());
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
                 device, StreamCodecLane::Options{.max_leaving_bytes = max_leaving_bytes,
                                                  .arena_budget = arena_budget,
                                                  .arena_chunk = arena_chunk,
                                                  .arena_pool = std::move(arena_pool),
                                                  .max_processors = max_processors});
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
      .def("arena_statistics", [](const StreamCodecLane& lane) {
        const Arena::Statistics all = [&] {
          const py::gil_scoped_release release;
          return lane.arena_statistics();
        }();
        return py::dict(
            "budget_bytes"_a = all.budget_bytes, "reserved_bytes"_a = all.reserved_bytes,
            "pinned_bytes"_a = all.pinned_bytes, "set_aside_bytes"_a = all.set_aside_bytes,
            "chunks"_a = all.chunks, "live_shares"_a = all.live_shares, "resets"_a = all.resets,
            "refusals"_a = all.refusals);
      });
}

}  // namespace

void bind_codec(py::module_& module) {
  bind_backends(module);
  bind_frames(module);
  bind_codec_lanes(module);
}

}  // namespace memswap
