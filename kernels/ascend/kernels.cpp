// Entries of the kernels. One job per launch; three launches encode a frame.
#include "bits.h"
#include "dense_decode.h"
#include "dense_encode.h"
#include "ints.h"
#include "plain_decode.h"
#include "raw.h"

namespace memswap::ascend {

__aicore__ inline EncodeJob encode_job(GM_ADDR input, GM_ADDR frame, uint64_t elements,
                                       uint64_t var_capacity, uint32_t dtype, uint32_t shape,
                                       uint32_t slab_bytes, uint32_t checksum) {
  return EncodeJob{input, frame, elements, var_capacity, dtype, shape, slab_bytes, checksum};
}

}  // namespace memswap::ascend

#define MEMSWAP_ENCODE_PARAMETERS                                                         \
  GM_ADDR input, GM_ADDR frame, uint64_t elements, uint64_t var_capacity, uint32_t dtype, \
      uint32_t shape, uint32_t slab_bytes, uint32_t checksum
#define MEMSWAP_ENCODE_JOB                                                                    \
  memswap::ascend::encode_job(input, frame, elements, var_capacity, dtype, shape, slab_bytes, \
                              checksum)

extern "C" __global__ __aicore__ void memswap_ascend_begin_frame(MEMSWAP_ENCODE_PARAMETERS) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  memswap::ascend::begin_frame(MEMSWAP_ENCODE_JOB);
}

extern "C" __global__ __aicore__ void memswap_ascend_end_frame(MEMSWAP_ENCODE_PARAMETERS) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  memswap::ascend::end_frame(MEMSWAP_ENCODE_JOB);
}

#define MEMSWAP_ENCODE_FLOATS(name, split)                                                        \
  extern "C" __global__ __aicore__ void memswap_ascend_encode_##name(MEMSWAP_ENCODE_PARAMETERS) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                               \
    AscendC::TPipe pipe;                                                                          \
    memswap::ascend::DenseEncoder<memswap::ascend::split> encoder(&pipe, MEMSWAP_ENCODE_JOB);     \
    encoder.run();                                                                                \
  }
MEMSWAP_ENCODE_FLOATS(bf16, SplitBf16)
MEMSWAP_ENCODE_FLOATS(fp16, SplitFp16)
MEMSWAP_ENCODE_FLOATS(fp32, SplitFp32)

#define MEMSWAP_ENCODE_PLAIN(name, width, codec)                                                  \
  extern "C" __global__ __aicore__ void memswap_ascend_encode_##name(MEMSWAP_ENCODE_PARAMETERS) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                               \
    AscendC::TPipe pipe;                                                                          \
    memswap::ascend::PlainEncoder<width, memswap::ascend::codec> encoder(&pipe,                   \
                                                                         MEMSWAP_ENCODE_JOB);     \
    encoder.run();                                                                                \
  }
MEMSWAP_ENCODE_PLAIN(raw8, 1, Raw<1>)
MEMSWAP_ENCODE_PLAIN(raw16, 2, Raw<2>)
MEMSWAP_ENCODE_PLAIN(raw32, 4, Raw<4>)
MEMSWAP_ENCODE_PLAIN(raw64, 8, Raw<8>)
MEMSWAP_ENCODE_PLAIN(bits, 1, Bits)
#define MEMSWAP_INTS(width, is_signed) Ints<width, is_signed>
MEMSWAP_ENCODE_PLAIN(int8, 1, MEMSWAP_INTS(1, true))
MEMSWAP_ENCODE_PLAIN(uint8, 1, MEMSWAP_INTS(1, false))
MEMSWAP_ENCODE_PLAIN(int16, 2, MEMSWAP_INTS(2, true))
MEMSWAP_ENCODE_PLAIN(uint16, 2, MEMSWAP_INTS(2, false))
MEMSWAP_ENCODE_PLAIN(int32, 4, MEMSWAP_INTS(4, true))
MEMSWAP_ENCODE_PLAIN(uint32, 4, MEMSWAP_INTS(4, false))

namespace memswap::ascend {

template <class Decoder>
__aicore__ inline uint32_t decode_with(TPipe* pipe, const DecodeJob& job,
                                       const FrameHeader& header) {
  Decoder decoder(pipe, job, header);
  return decoder.run();
}

// A frame's shape is known to the device alone, so one kernel per width decodes all that its dtypes
// may have. `Split` is void for dtypes that are not split. Shapes that are not here yet are
// reported as a bad header.
template <uint32_t kWidth, class Split>
__aicore__ inline void decode_frame(const DecodeJob& job) {
  TPipe pipe;
  constexpr uint32_t dense = static_cast<uint32_t>(frame::Shape::kDense);
  constexpr uint32_t bits = static_cast<uint32_t>(frame::Shape::kBits);
  constexpr uint32_t raw = static_cast<uint32_t>(frame::Shape::kRaw);
  constexpr uint32_t ints = static_cast<uint32_t>(frame::Shape::kInts);
  const FrameHeader header = read_header(&pipe, job, [=](uint32_t shape) {
    uint32_t slab_bytes = 0xffffffffu;
    if constexpr (!std::is_void_v<Split>) {
      slab_bytes = shape == dense ? Split::kSlabBytes : slab_bytes;
    }
    slab_bytes = kWidth == 1 && shape == bits ? Bits::kSlabBytes : slab_bytes;
    slab_bytes = kWidth <= 4 && shape == ints ? 0 : slab_bytes;
    return shape == raw ? Raw<kWidth>::kSlabBytes : slab_bytes;
  });
  uint32_t errors = GetBlockIdx() == 0 ? header.status : 0;
  if (header.status == frame::kOk) {
    if (header.shape == raw) {
      errors = decode_with<PlainDecoder<kWidth, Raw<kWidth>>>(&pipe, job, header);
    }
    if constexpr (kWidth <= 4) {
      // Signs matter to the encoder alone.
      if (header.shape == ints) {
        errors = decode_with<PlainDecoder<kWidth, Ints<kWidth, false>>>(&pipe, job, header);
      }
    }
    if constexpr (kWidth == 1) {
      if (header.shape == bits) {
        errors = decode_with<PlainDecoder<1, Bits>>(&pipe, job, header);
      }
    }
    if constexpr (!std::is_void_v<Split>) {
      if (header.shape == dense) {
        errors = decode_with<DenseDecoder<Split>>(&pipe, job, header);
      }
    }
  }
  report(&pipe, job, errors);
}

}  // namespace memswap::ascend

#define MEMSWAP_DECODE_PARAMETERS                                                              \
  GM_ADDR frame, GM_ADDR output, GM_ADDR status, GM_ADDR overflow, uint64_t overflow_capacity, \
      uint64_t frame_bytes, uint64_t elements, uint32_t dtype, uint32_t verify
#define MEMSWAP_DECODE_JOB                                                                   \
  memswap::ascend::DecodeJob {                                                               \
    frame, output, status, overflow, overflow_capacity, frame_bytes, elements, dtype, verify \
  }

#define MEMSWAP_DECODE(name, width, split)                                                        \
  extern "C" __global__ __aicore__ void memswap_ascend_decode_##name(MEMSWAP_DECODE_PARAMETERS) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                               \
    memswap::ascend::decode_frame<width, split>(MEMSWAP_DECODE_JOB);                              \
  }
MEMSWAP_DECODE(bf16, 2, memswap::ascend::SplitBf16)
MEMSWAP_DECODE(fp16, 2, memswap::ascend::SplitFp16)
MEMSWAP_DECODE(fp32, 4, memswap::ascend::SplitFp32)
MEMSWAP_DECODE(other8, 1, void)
MEMSWAP_DECODE(other16, 2, void)
MEMSWAP_DECODE(other32, 4, void)
MEMSWAP_DECODE(other64, 8, void)
