// Encoding and decoding of tensors at once, on the current stream: what the operators and
// memswap.encode are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <stdexcept>

#include "frame_plan.h"

namespace memswap {

// What is wrong with a frame that was to be decoded, in words for the user.
struct DamagedFrameError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes for a frame in host memory, of any content.
at::Tensor new_host_frame(size_t nbytes);

// The layout in which `self`, read in the order of its elements, takes the fewest bytes as an array
// of frame dtype `dtype`, by a sample of its blocks ([Note: sampled layouts] in memswap/sample.h).
// On a device other than the CPU this waits for the sample. Throws std::invalid_argument where no
// such frame is possible.
uint8_t choose_layout(const at::Tensor& self, int64_t dtype);

// A frame with room for the worst case, as a tensor of bytes on self's device. `self` is read in
// the order of its elements. Enqueues and returns; on a CPU, where torch's threads do the work, the
// header is complete afterwards. Throws std::invalid_argument for codes that do not fit.
at::Tensor encode_tensor(const at::Tensor& self, int64_t dtype, int64_t layout, bool checksum);

// The same by a codec that has yet to be trusted (self_check.h); encode_tensor throws
// std::runtime_error where the device's codec is not.
at::Tensor encode_with(const memswap_codec& codec, const at::Tensor& self, int64_t dtype,
                       int64_t layout, bool checksum);

// The same frame in memory of exactly its length, with var_capacity = var_used. On a CPU the rest
// of the memory is given back; on any other device this waits for the encode and copies.
at::Tensor exact_frame(const at::Tensor& frame);

// A contiguous tensor out of a frame on its device. A damaged frame throws DamagedFrameError on a
// CPU; on any other device only check_decode = true, which waits, can know. `layout`: the
// frame's, where it is known, which spares a GPU a launch; a frame of another one may be damaged.
at::Tensor decode_tensor(const at::Tensor& frame, at::IntArrayRef size, at::ScalarType dtype,
                         bool check_decode, std::optional<uint8_t> layout = {});
at::Tensor decode_with(const memswap_codec& codec, const at::Tensor& frame, at::IntArrayRef size,
                       at::ScalarType dtype, bool check_decode, std::optional<uint8_t> layout = {});

// The frame in host memory, exact and with positions in the order of tiles (docs/format.md section
// 1, portable). Waits for the device. Throws DamagedFrameError if the frame contradicts itself.
at::Tensor portable_frame(const at::Tensor& frame);

// The header of a frame of `frame`'s bytes, which are in host memory. Throws DamagedFrameError.
FrameReport read_header(const at::Tensor& frame);

}  // namespace memswap
