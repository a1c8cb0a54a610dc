// Entries of the kernels that encode. One job per launch; four launches make a frame, two one of
// layout raw, and one that of no element (codec.cpp).
#include "bits.h"
#include "dense_encode.h"
#include "ints.h"
#include "ints64.h"
#include "kernel_entry.h"
#include "raw.h"
#include "sparse_encode.h"
#include "tile_places.h"

namespace memswap::ascend {

template <bool kSigned>
using IntsCoder8 = IntsCoder<1, kSigned>;
template <bool kSigned>
using IntsCoder16 = IntsCoder<2, kSigned>;
template <bool kSigned>
using IntsCoder32 = IntsCoder<4, kSigned>;

}  // namespace memswap::ascend

// Entries stand at file scope, as in CANN's own samples.
using namespace memswap::ascend;  // NOLINT

#define MEMSWAP_ENCODE_JOB \
  EncodeJob { MEMSWAP_ASCEND_ENCODE_ARGUMENTS }

MEMSWAP_KERNEL memswap_ascend_begin_frame(MEMSWAP_ASCEND_ENCODE_PARAMETERS(GM_ADDR)) {
  MEMSWAP_VECTOR_CORES_ONLY
  begin_frame(MEMSWAP_ENCODE_JOB);
}

MEMSWAP_KERNEL memswap_ascend_place_tiles(MEMSWAP_ASCEND_ENCODE_PARAMETERS(GM_ADDR)) {
  MEMSWAP_VECTOR_CORES_ONLY
  TPipe pipe;
  TilePlaces places(&pipe, MEMSWAP_ENCODE_JOB);
  places.place();
}

#define MEMSWAP_DEFINE(name, coder)                                                        \
  MEMSWAP_KERNEL memswap_ascend_encode_##name(MEMSWAP_ASCEND_ENCODE_PARAMETERS(GM_ADDR)) { \
    MEMSWAP_VECTOR_CORES_ONLY                                                              \
    TPipe pipe;                                                                            \
    FrameEncoder<coder> encoder(&pipe, MEMSWAP_ENCODE_JOB);                                \
    encoder.run();                                                                         \
  }
MEMSWAP_ASCEND_ENCODERS(MEMSWAP_DEFINE)
#undef MEMSWAP_DEFINE
