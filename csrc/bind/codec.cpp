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

namespace memswap {

template <>
inline constexpr std::tuple kMembers<Encoding>{&Encoding::encoded, &Encoding::ticket};

static py::object fields_of(const FrameReport& report) {
  using H = frame::Header;
  py::object fields =
      as_object<&H::elements, &H::blocks, &H::dtype, &H::var_capacity, &H::var_used,
                &H::overflow_used, &H::zeros, &H::center_sum, &H::status>(report.header);
  fields.attr("layout") = report.header.layout;
  fields.attr("frame_nbytes") = report.frame_nbytes();
  return fields;
}

static py::object fields_of(const Arena::Statistics& all) {
  using S = Arena::Statistics;
  return as_dict<&S::budget_bytes, &S::reserved_bytes, &S::pinned_bytes, &S::set_aside_bytes,
                 &S::chunks, &S::live_shares, &S::resets, &S::refusals>(all);
}

namespace {

py::object sizes_of(int64_t dtype, int64_t layout, uint64_t elements) {
  const frame::Sections sizes = checked_sections(dtype, layout, elements);
  py::object fields = as_object<&frame::Sections::elements, &frame::Sections::blocks>(sizes);
  fields.attr("fixed_nbytes") = sizes.var;
  fields.attr("max_var_units") = sizes.max_var_units();
  fields.attr("max_nbytes") = sizes.bytes(sizes.max_var_units());
  return fields;
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
  module.def("frame_sizes", &sizes_of, "dtype"_a, "layout"_a, "elements"_a);
  py::register_local_exception<DamagedFrameError>(module, "DamagedFrameError", PyExc_RuntimeError);
  bind_functions<&encode_tensor, &choose_layout, &exact_frame, &decode_tensor, &portable_frame>(
      module, without_gil());
  bind_functions<&frame_of, &bytes_of, &read_header, &spare_pool>(module);
  module.def(
      "dtype_code", [](at::ScalarType dtype) { return static_cast<int>(frame_dtype(dtype)); },
      "dtype"_a);
}

void bind_codec_lanes(py::module_& module) {
  Bound<EncodedStorage, EncodedStoragePtr>(module, "EncodedStorage")
      .reads<&EncodedStorage::nbytes, &EncodedStorage::overflow_nbytes,
             &EncodedStorage::device_nbytes, &EncodedStorage::swapped>()
      .calls<&EncodedStorage::wait_sent, &EncodedStorage::report>(without_gil())
      .calls<&EncodedStorage::watch>();
  Bound<FrameWatch, std::shared_ptr<FrameWatch>>(module, "FrameWatch")
      .calls<&FrameWatch::report>(without_gil());

  Bound<CodecLane, std::shared_ptr<CodecLane>>(module, "CodecLane")
      .reads<&CodecLane::last_refusal>()
      .calls<&CodecLane::encode, &CodecLane::encode_to, &CodecLane::decode, &CodecLane::settle,
             &CodecLane::leaving_bytes>(without_gil())
      .calls<&CodecLane::set_max_leaving_bytes>();

  Bound<WorkerCodecLane, CodecLane, std::shared_ptr<WorkerCodecLane>>(module, "WorkerCodecLane")
      .calls<&WorkerCodecLane::stop>()
      .def(py::init(&opened<WorkerCodecLane, size_t, std::shared_ptr<Pool>, std::shared_ptr<Pool>,
                            size_t>),
           "workers"_a, "pool"_a, "outputs"_a = py::none(), "max_leaving_bytes"_a = 0);

  using Stream = StreamCodecLane;
  Bound<Stream, CodecLane, std::shared_ptr<Stream>>(module, "StreamCodecLane")
      .reads<&Stream::encode_stream, &Stream::decode_stream, &Stream::control_stream>()
      .calls<&Stream::set_arena_budget, &Stream::set_overflow_room, &Stream::trim_arena,
             &Stream::arena_statistics>(without_gil())
      .def(py::init([](const c10::Device& device, size_t max_leaving_bytes, size_t arena_budget,
                       size_t arena_chunk, std::shared_ptr<Pool> arena_pool) {
             const py::gil_scoped_release release;  // it allocates
             return std::make_shared<Stream>(
                 device, Stream::Options{max_leaving_bytes, arena_budget, arena_chunk,
                                         std::move(arena_pool)});
           }),
           "device"_a, "max_leaving_bytes"_a = 0, "arena_budget"_a = 0,
           "arena_chunk"_a = size_t{16} << 20, "arena_pool"_a = py::none())
      .def(
          "decode_status", [](Stream& lane) { return lane.decode_status().wait(); }, without_gil())
      .def(
          "take_decode_status", [](Stream& lane) { return lane.decode_status().take_known(); },
          without_gil());
}

}  // namespace

void bind_codec(py::module_& module) {
  module.def("register_codec", &serve, "device_type"_a, "capsule"_a);
  module.def("codec_capsule", [](const c10::Device& device) -> py::object {
    const memswap_codec* const codec = codec_of(device.type());
    return codec ? py::capsule(codec, kCapsule) : py::object(py::none());
  });
  module.def("codec_name", [](const c10::Device& device) {
    const memswap_codec* const codec = codec_of(device.type());
    return codec ? codec->name : nullptr;
  });
  bind_functions<&codec_fault, &codec_faults>(module, without_gil());
  module.attr("codecs_left_out") = codecs_left_out();
  bind_frames(module);
  bind_codec_lanes(module);
}

}  // namespace memswap
