// Entries of the kernels that decode. One job per launch.
#include "bits.h"
#include "dense_decode.h"
#include "ints.h"
#include "ints64.h"
#include "kernel_entry.h"
#include "raw.h"
#include "sparse_decode.h"

namespace memswap::ascend {

template <uint32_t kWidth>
using AnyIntsReader = std::conditional_t<kWidth == 8, Ints64Reader, IntsReader<kWidth % 8>>;

template <class Reader>
__aicore__ inline uint32_t decode_with(TPipe* pipe, const DecodeJob& job,
                                       const FrameHeader& header) {
  FrameDecoder<Reader> decoder(pipe, job, header);
  return decoder.run();
}

// A frame's layout is known to the device alone, so one kernel per width decodes all that its
// dtypes may have. `Split` is void for dtypes that are not split. `visit` is called with a null
// pointer to the layout's reader; false where the layout does not fit the dtype.
template <uint32_t kWidth, class Split, class Visit>
__aicore__ inline bool with_reader(uint32_t layout, Visit visit) {
  switch (static_cast<frame::Layout>(layout)) {
    case frame::Layout::kRaw:
      visit(static_cast<RawReader<kWidth>*>(nullptr));
      return true;
    case frame::Layout::kInts:
      visit(static_cast<AnyIntsReader<kWidth>*>(nullptr));
      return true;
    case frame::Layout::kBits:
      if constexpr (kWidth == 1) {
        visit(static_cast<BitsReader*>(nullptr));
        return true;
      }
      return false;
    case frame::Layout::kDense:
      if constexpr (!std::is_void_v<Split>) {
        visit(static_cast<DenseReader<Split>*>(nullptr));
        return true;
      }
      return false;
    case frame::Layout::kSparse:
      if constexpr (!std::is_void_v<Split>) {
        visit(static_cast<SparseReader<Split>*>(nullptr));
        return true;
      }
      return false;
    case frame::Layout::kUpcast:
      if constexpr (std::is_same_v<Split, SplitFp32>) {
        visit(static_cast<DenseReader<SplitUpcast>*>(nullptr));
        return true;
      }
      return false;
  }
  return false;
}

template <uint32_t kWidth, class Split>
__aicore__ inline void decode_frame(const DecodeJob& job) {
  TPipe pipe;
  const FrameHeader header = read_header(&pipe, job, [](uint32_t layout) __aicore__ {
    uint32_t slab_bytes = 0xffffffffu;
    with_reader<kWidth, Split>(layout, [&](auto* reader) __aicore__ {
      slab_bytes = std::remove_pointer_t<decltype(reader)>::kSlabBytes;
    });
    return slab_bytes;
  });
  uint32_t errors = GetBlockIdx() == 0 ? header.status : 0;
  if (header.status == frame::kOk) {
    with_reader<kWidth, Split>(header.layout, [&](auto* reader) __aicore__ {
      errors = decode_with<std::remove_pointer_t<decltype(reader)>>(&pipe, job, header);
    });
  }
  report(&pipe, job, errors);
}

}  // namespace memswap::ascend

// Entries stand at file scope, as in CANN's own samples.
using namespace memswap::ascend;  // NOLINT

#define MEMSWAP_DECODE_JOB \
  DecodeJob { MEMSWAP_ASCEND_DECODE_ARGUMENTS }

#define MEMSWAP_DEFINE(name, width, split)                                                 \
  MEMSWAP_KERNEL memswap_ascend_decode_##name(MEMSWAP_ASCEND_DECODE_PARAMETERS(GM_ADDR)) { \
    MEMSWAP_VECTOR_CORES_ONLY                                                              \
    decode_frame<width, split>(MEMSWAP_DECODE_JOB);                                        \
  }
MEMSWAP_ASCEND_DECODERS(MEMSWAP_DEFINE)
#undef MEMSWAP_DEFINE
