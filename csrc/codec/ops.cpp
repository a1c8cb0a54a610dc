// torch.ops.memswap.encode and decode: the codec inside a graph.
//
// Neither is differentiable: a frame is bytes. A frame has its worst-case length, which follows
// from the input's size alone, so that shapes are known to a compiler. On an accelerator nothing
// waits, so a damaged frame cannot raise there: its output is meaningless (memswap.decode does
// check). Who names the layout that encode was given spares a GPU a launch, where it would
// otherwise have to try two kernels; a frame of another layout may then be damaged.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "dtypes.h"
#include "tensors.h"

namespace memswap {
namespace {

at::Tensor encode(const at::Tensor& self, int64_t dtype, int64_t layout, bool checksum) {
  try {
    at::Tensor frame = encode_tensor(self, dtype, layout, checksum);
    if (frame.device().is_cpu()) {
      // The same input gives the same output, whatever the memory held before. (On an accelerator
      // payloads lie where their tiles found room first, which is no more the same twice.)
      const auto used = static_cast<int64_t>(read_header(frame).frame_nbytes());
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      frame.narrow(0, used, frame.numel() - used).zero_();
    }
    return frame;
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

at::Tensor decode(const at::Tensor& frame, at::IntArrayRef size, at::ScalarType dtype,
                  std::optional<int64_t> layout) {
  TORCH_CHECK_VALUE(!layout || (*layout >= 0 && *layout <= frame::kLastLayout),
                    "memswap::decode: no frame has layout ", *layout,
                    " (docs/format.md section 3)");
  try {
    const auto known = layout ? std::optional(static_cast<uint8_t>(*layout)) : std::nullopt;
    return decode_tensor(frame, size, dtype, /*check_decode=*/false, known);
  } catch (const DamagedFrameError& fault) {
    TORCH_CHECK(false, "memswap::decode: the frame is damaged: ", fault.what());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

at::Tensor encode_meta(const at::Tensor& self, int64_t dtype, int64_t layout, bool) {
  const auto sections = checked_sections(dtype, layout, 0);
  const int64_t width = frame::width_of(static_cast<frame::Dtype>(dtype));
  const int64_t per_block =
      sections.slab_bytes + int64_t{sections.max_payload_units} * frame::kUnitBytes;
  constexpr int64_t kBlock = frame::kBlockElements;
  constexpr int64_t kTile = frame::kTileBlocks;
  const c10::SymInt elements = self.sym_numel() * static_cast<int64_t>(self.itemsize()) / width;
  const c10::SymInt blocks = (elements + (kBlock - 1)) / kBlock;
  const c10::SymInt tiles = (blocks + (kTile - 1)) / kTile;
  const int64_t header = frame::kHeaderBytes;
  return at::empty_symint(
      {blocks * per_block + tiles * static_cast<int64_t>(frame::kRecordBytes) + header},
      self.options().dtype(at::kByte));
}

at::Tensor decode_meta(const at::Tensor& frame, c10::SymIntArrayRef size, at::ScalarType dtype,
                       std::optional<int64_t>) {
  return at::empty_symint(size, frame.options().dtype(dtype));
}

TORCH_LIBRARY(memswap, library) {
  library.def("encode(Tensor self, int dtype, int layout, bool checksum=False) -> Tensor",
              {at::Tag::pt2_compliant_tag});
  library.def("decode(Tensor frame, SymInt[] size, ScalarType dtype, int? layout=None) -> Tensor",
              {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(memswap, CPU, library) {
  library.impl("encode", &encode);
  library.impl("decode", &decode);
}

TORCH_LIBRARY_IMPL(memswap, CUDA, library) {
  library.impl("encode", &encode);
  library.impl("decode", &decode);
}

TORCH_LIBRARY_IMPL(memswap, PrivateUse1, library) {
  library.impl("encode", &encode);
  library.impl("decode", &decode);
}

TORCH_LIBRARY_IMPL(memswap, Meta, library) {
  library.impl("encode", &encode_meta);
  library.impl("decode", &decode_meta);
}

}  // namespace
}  // namespace memswap
