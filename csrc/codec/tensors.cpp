#include "tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/safe_numerics.h>

#include <cstring>
#include <string>

#include "backends.h"
#include "dtypes.h"
#include "host_memory.h"
#include "memswap/portable.h"
#include "memswap/sample.h"
#include "parallel.h"
#include "self_check.h"
#include "storage/torch_npu.h"

namespace memswap {
namespace {

const memswap_codec& codec_for(const at::Tensor& tensor) {
  const memswap_codec* codec = codec_of(tensor.device().type());
  if (codec == nullptr) {
    throw std::invalid_argument("memswap has no codec for device type '" +
                                c10::DeviceTypeName(tensor.device().type(), true) +
                                "' in this build (python -m memswap info lists them)");
  }
  return *codec;
}

// Encodes or decodes: on torch's threads, or on the device's current stream. `work` takes a copy of
// what it needs.
template <class Work>
int run_on(c10::Device device, const char* name, Work work) {
  if (device.is_cpu()) {
    return work(on_torch_threads());
  }
  return submit(name, c10::impl::VirtualGuardImpl(device.type()).getStream(device),
                [work](void* stream) {
                  memswap_launch launch{};
                  launch.stream = stream;
                  return work(launch);
                });
}

// Bytes of a tensor of this size.
size_t nbytes_of(at::IntArrayRef size, at::ScalarType dtype) {
  size_t nbytes = c10::elementSize(dtype);
  for (const int64_t length : size) {
    TORCH_CHECK_VALUE(
        length >= 0 && !c10::mul_overflows(nbytes, static_cast<size_t>(length), &nbytes),
        "memswap: no tensor of ", dtype, " has size ", size);
  }
  return nbytes;
}

// A header on the host says what is worth allocating before a frame is decoded: whoever asks for
// more would otherwise be given it, and then be told that the frame is damaged.
void expect_elements(const at::Tensor& frame, uint64_t elements) {
  const uint64_t found = read_header(frame).header.elements;
  if (found != elements) {
    throw DamagedFrameError("its header says " + std::to_string(found) + " elements, expected " +
                            std::to_string(elements));
  }
}

// Of a warm pool on a CPU; from torch's allocator, which has one, elsewhere.
at::Tensor new_tensor(at::IntArrayRef size, at::TensorOptions options) {
  if (!options.device().is_cpu()) {
    return at::empty(size, options);
  }
  at::Tensor tensor = at::empty({0}, options);
  const size_t nbytes = c10::multiply_integers(size) * tensor.itemsize();
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(host_storage(spare_pool().get(), nbytes));
  impl->set_sizes_contiguous(size);
  return tensor;
}

at::Tensor new_bytes(size_t nbytes, c10::Device device) {
  return new_tensor({static_cast<int64_t>(nbytes)}, at::TensorOptions(device).dtype(at::kByte));
}

// A frame may have come through a program that knows nothing of its alignment.
at::Tensor aligned(const at::Tensor& frame) {
  TORCH_CHECK_VALUE(frame.scalar_type() == at::kByte && frame.dim() == 1,
                    "memswap: a frame is a tensor of bytes with one dimension, found ",
                    frame.scalar_type(), " with ", frame.dim());
  const auto address = reinterpret_cast<uintptr_t>(frame.const_data_ptr());
  if (frame.is_contiguous() && address % frame::kAlignmentBytes == 0) {
    return frame;
  }
  return new_bytes(frame.nbytes(), frame.device()).copy_(frame);
}

// The blocks of a device's tensor that a layout is chosen by, in host memory.
at::Tensor sampled_blocks(const at::Tensor& input, uint64_t elements, uint32_t width) {
  const at::Tensor bytes = input.view({-1}).view(at::kByte);
  const int64_t count = memswap_sample_count(elements);
  const int64_t block_bytes = int64_t{frame::kBlockElements} * width;
  if (bytes.numel() <= count * block_bytes) {
    return bytes.cpu();
  }
  at::Tensor blocks = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    blocks.mutable_data_ptr<int64_t>()[i] =
        static_cast<int64_t>(memswap_sample_block(elements, static_cast<uint32_t>(i)));
  }
  const int64_t whole = bytes.numel() / block_bytes;
  return bytes.narrow(0, 0, whole * block_bytes)
      .view({whole, block_bytes})
      .index_select(0, blocks.to(input.device()))
      .cpu();
}

}  // namespace

at::Tensor new_host_frame(size_t nbytes) { return new_bytes(nbytes, c10::kCPU); }

// The codec of a tensor that may be encoded. Throws std::invalid_argument where none serves its
// device or its bytes do not say what it is.
static const memswap_codec& codec_to_encode(const at::Tensor& self) {
  const memswap_codec& codec = codec_for(self);
  if (has_private_format(self)) {
    throw std::invalid_argument(
        "memswap::encode: the tensor has a private format of the NPU; cast it to ND first "
        "(torch_npu.npu_format_cast(tensor, 2))");
  }
  return codec;
}

uint8_t choose_layout(const at::Tensor& self, int64_t dtype) {
  (void)codec_to_encode(self);
  checked_sections(dtype, static_cast<int64_t>(frame::Layout::kRaw), 0);
  const auto code = static_cast<uint8_t>(dtype);
  const at::Tensor input = self.contiguous();
  const uint32_t width = frame::width_of(static_cast<frame::Dtype>(dtype));
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(input.const_data_ptr()) % width == 0 &&
                        input.nbytes() % width == 0,
                    "memswap: ", input.nbytes(), " bytes are no aligned array of elements of ",
                    width, " bytes");
  const uint64_t elements = input.nbytes() / width;
  const memswap_launch threads = on_torch_threads();
  if (input.is_cpu()) {
    return memswap_choose_layout(input.const_data_ptr(), elements, code, &threads);
  }
  const c10::DeviceGuard guard(input.device());
  const at::Tensor sample = sampled_blocks(input, elements, width);
  return memswap_choose_layout_of_sample(sample.const_data_ptr(), elements, code, &threads);
}

at::Tensor encode_tensor(const at::Tensor& self, int64_t dtype, int64_t layout, bool checksum) {
  const memswap_codec& codec = codec_to_encode(self);
  checked_sections(dtype, layout, 0);
  if (const std::string reason =
          distrust(codec, self.device(), static_cast<uint8_t>(dtype), static_cast<uint8_t>(layout));
      !reason.empty()) {
    throw std::runtime_error("memswap: " + reason);
  }
  return encode_with(codec, self, dtype, layout, checksum);
}

at::Tensor encode_with(const memswap_codec& codec, const at::Tensor& self, int64_t dtype,
                       int64_t layout, bool checksum) {
  const c10::DeviceGuard guard(self.device());
  const at::Tensor input = self.contiguous();
  checked_sections(dtype, layout, 0);
  FrameOptions options;
  options.dtype = static_cast<uint8_t>(dtype);
  options.layout = static_cast<uint8_t>(layout);
  std::string reason;
  const auto plan = plan_frame(options, input.const_data_ptr(), input.nbytes(), reason);
  if (!plan) {
    throw std::invalid_argument("memswap::encode: " + reason);
  }
  at::Tensor frame = new_bytes(plan->frame_bytes(), self.device());
  memswap_encode_job job = encode_job(*plan, options);
  job.checksum = checksum ? 1 : 0;
  job.frame = frame.mutable_data_ptr();
  job.input = input.nbytes() > 0 ? input.const_data_ptr() : job.frame;  // never null
  const int done =
      run_on(self.device(), "memswap::encode",
             [&codec, job](const memswap_launch& launch) { return codec.encode(&job, &launch); });
  check_codec(codec, done, "encode a tensor");
  return frame;
}

FrameReport read_header(const at::Tensor& frame) {
  FrameReport report{};
  const size_t nbytes = frame.nbytes();
  if (nbytes < frame::kHeaderBytes) {
    throw DamagedFrameError("found " + std::to_string(nbytes) +
                            " bytes, expected a frame's header of " +
                            std::to_string(frame::kHeaderBytes));
  }
  std::memcpy(&report.header, frame.const_data_ptr(), sizeof(report.header));
  frame::Sections sections{};
  if (!frame::validate(report.header, nbytes, 0, &sections)) {
    throw DamagedFrameError("the header contradicts itself or the length of " +
                            std::to_string(nbytes) + " bytes");
  }
  return report;
}

at::Tensor exact_frame(const at::Tensor& frame) {
  if (frame.device().is_cpu()) {
    const size_t exact = read_header(frame).frame_nbytes();
    auto* header = static_cast<frame::Header*>(frame.mutable_data_ptr());
    header->var_capacity = header->var_used;
    if (const BlockPtr block = block_behind(frame.storage().data_ptr())) {
      block->shrink(exact);
    }
    frame.storage().unsafeGetStorageImpl()->set_nbytes(exact);
    frame.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(exact)});
    return frame;
  }
  at::Tensor header = frame.narrow(0, 0, frame::kHeaderBytes).cpu();
  auto* found = static_cast<frame::Header*>(header.mutable_data_ptr());
  if (found->status != frame::kOk) {
    throw DamagedFrameError("the device could not encode: " + describe_status(found->status));
  }
  const auto exact = static_cast<int64_t>(FrameReport{*found}.frame_nbytes());
  at::Tensor kept = at::empty({exact}, frame.options());
  kept.copy_(frame.narrow(0, 0, exact));
  found->var_capacity = found->var_used;
  kept.narrow(0, 0, frame::kHeaderBytes).copy_(header);
  return kept;
}

at::Tensor decode_tensor(const at::Tensor& given, at::IntArrayRef size, at::ScalarType dtype,
                         bool check_decode, std::optional<uint8_t> layout) {
  return decode_with(codec_for(given), given, size, dtype, check_decode, layout);
}

at::Tensor decode_with(const memswap_codec& codec, const at::Tensor& given, at::IntArrayRef size,
                       at::ScalarType dtype, bool check_decode, std::optional<uint8_t> layout) {
  const c10::DeviceGuard guard(given.device());
  const at::Tensor frame = aligned(given);
  const frame::Dtype code = frame_dtype(dtype);
  const uint64_t elements = nbytes_of(size, dtype) / frame::width_of(code);
  const bool on_host = given.device().is_cpu();
  if (on_host) {
    expect_elements(frame, elements);
  }
  at::Tensor output = new_tensor(size, given.options().dtype(dtype));
  uint32_t status = frame::kOk;
  const auto new_status = [&] {
    const auto options = given.options().dtype(at::kInt);
    // Cleared by a launch of its own, which is spared where nobody asks.
    return check_decode ? at::zeros({}, options) : at::empty({}, options);
  };
  const at::Tensor device_status = on_host ? at::Tensor() : new_status();
  memswap_decode_job job{};
  job.frame = frame.const_data_ptr();
  job.frame_bytes = frame.nbytes();
  job.elements = elements;
  job.dtype = static_cast<uint8_t>(code);
  job.verify = 1;
  job.layout_hint = static_cast<uint8_t>(layout ? 1 + *layout : 0);
  job.status = on_host ? &status : static_cast<uint32_t*>(device_status.mutable_data_ptr());
  // Never null, and never written where there are no elements.
  job.output = job.elements > 0 ? output.mutable_data_ptr() : const_cast<void*>(job.frame);
  const int done =
      run_on(given.device(), "memswap::decode",
             [&codec, job](const memswap_launch& launch) { return codec.decode(&job, &launch); });
  check_codec(codec, done, "decode a frame");
  if (!on_host && check_decode) {
    status = static_cast<uint32_t>(device_status.item<int32_t>());
  }
  if (status != frame::kOk) {
    throw DamagedFrameError(describe_status(status));
  }
  return output;
}

at::Tensor portable_frame(const at::Tensor& given) {
  const at::Tensor frame = aligned(given.device().is_cpu() ? given : given.cpu());
  const auto rewrite = [&](void* out, uint64_t out_bytes, uint64_t* written) {
    return memswap_frame_portable(frame.const_data_ptr(), frame.nbytes(), nullptr, 0, out,
                                  out_bytes, written);
  };
  uint64_t length = 0;
  rewrite(nullptr, 0, &length);  // 0 where the frame is damaged: then the next call says how
  at::Tensor portable = new_bytes(length, c10::kCPU);
  const uint32_t status = rewrite(portable.mutable_data_ptr(), length, &length);
  if (status != frame::kOk) {
    throw DamagedFrameError(describe_status(status));
  }
  return portable;
}

}  // namespace memswap
