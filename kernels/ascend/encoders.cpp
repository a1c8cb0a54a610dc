// Entries of the kernels that encode. One job per launch; three launches make a frame, four where
// several cores do or it has an overflow arena (codec.cpp).
#include "bits.h"
#include "dense_encode.h"
#include "frame_header.h"
#include "ints.h"
#include "ints64.h"
#include "kernel_entry.h"
#include "raw.h"
#include "sparse_encode.h"

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

MEMSWAP_KERNEL memswap_ascend_place_deferred(MEMSWAP_ASCEND_ENCODE_PARAMETERS(GM_ADDR)) {
  MEMSWAP_VECTOR_CORES_ONLY
  TPipe pipe;
  DeferredTiles deferred(&pipe, MEMSWAP_ENCODE_JOB);
  deferred.place();
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
