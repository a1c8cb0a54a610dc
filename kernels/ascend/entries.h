// The names of all kernels and how the host launches them. Preprocessor and plain C alone: kernels,
// host and tests include it.
//
// aclrtlaunch_<kernel>(blocks, stream, arguments...) is what ascendc_library of CANN 8 makes for
// each kernel; kernels.asc defines the same functions for CANN 9. They return 0 or the error of the
// ACL runtime.
#pragma once

#include <stdint.h>

// X(suffix of memswap_ascend_encode_, coder)
#define MEMSWAP_ASCEND_ENCODERS(X)       \
  X(dense_bf16, DenseCoder<SplitBf16>)   \
  X(dense_fp16, DenseCoder<SplitFp16>)   \
  X(dense_fp32, DenseCoder<SplitFp32>)   \
  X(dense_fp64, DenseCoder<SplitFp64>)   \
  X(dense_e4m3, DenseCoder<SplitE4m3>)   \
  X(dense_e5m2, DenseCoder<SplitE5m2>)   \
  X(upcast, DenseCoder<SplitUpcast>)     \
  X(sparse_bf16, SparseCoder<SplitBf16>) \
  X(sparse_fp16, SparseCoder<SplitFp16>) \
  X(sparse_fp32, SparseCoder<SplitFp32>) \
  X(sparse_fp64, SparseCoder<SplitFp64>) \
  X(sparse_e4m3, SparseCoder<SplitE4m3>) \
  X(sparse_e5m2, SparseCoder<SplitE5m2>) \
  X(bits, BitsCoder)                     \
  X(int8, IntsCoder8<true>)              \
  X(uint8, IntsCoder8<false>)            \
  X(int16, IntsCoder16<true>)            \
  X(uint16, IntsCoder16<false>)          \
  X(int32, IntsCoder32<true>)            \
  X(uint32, IntsCoder32<false>)          \
  X(int64, Ints64Coder<true>)            \
  X(uint64, Ints64Coder<false>)          \
  X(raw8, RawCoder<1>)                   \
  X(raw16, RawCoder<2>)                  \
  X(raw32, RawCoder<4>)                  \
  X(raw64, RawCoder<8>)

// X(suffix of memswap_ascend_decode_, bytes of an element, split, or void where there is none)
#define MEMSWAP_ASCEND_DECODERS(X) \
  X(bf16, 2, SplitBf16)            \
  X(fp16, 2, SplitFp16)            \
  X(fp32, 4, SplitFp32)            \
  X(fp64, 8, SplitFp64)            \
  X(e4m3, 1, SplitE4m3)            \
  X(e5m2, 1, SplitE5m2)            \
  X(other8, 1, void)               \
  X(other16, 2, void)              \
  X(other32, 4, void)              \
  X(other64, 8, void)

// Parameters of begin_frame, all encoders, and place_tiles; and of all decoders. `Pointer` is
// GM_ADDR in kernels and void* on the host.
#define MEMSWAP_ASCEND_ENCODE_PARAMETERS(Pointer)                                             \
  Pointer input, Pointer frame, Pointer overflow, Pointer overflow_cursor, uint64_t elements, \
      uint64_t var_capacity, uint64_t overflow_capacity, uint32_t dtype, uint32_t layout,     \
      uint32_t slab_bytes, uint32_t checksum, uint32_t fast, uint32_t center, uint32_t pass
#define MEMSWAP_ASCEND_ENCODE_ARGUMENTS                                                      \
  input, frame, overflow, overflow_cursor, elements, var_capacity, overflow_capacity, dtype, \
      layout, slab_bytes, checksum, fast, center, pass
#define MEMSWAP_ASCEND_DECODE_PARAMETERS(Pointer)                                              \
  Pointer frame, Pointer output, Pointer status, Pointer overflow, uint64_t overflow_capacity, \
      uint64_t frame_bytes, uint64_t elements, uint32_t dtype, uint32_t verify
#define MEMSWAP_ASCEND_DECODE_ARGUMENTS \
  frame, output, status, overflow, overflow_capacity, frame_bytes, elements, dtype, verify

#define MEMSWAP_ASCEND_ENCODE_STUB(name)                                    \
  uint32_t aclrtlaunch_memswap_ascend_##name(uint32_t blocks, void* stream, \
                                             MEMSWAP_ASCEND_ENCODE_PARAMETERS(void*))
#define MEMSWAP_ASCEND_DECODE_STUB(name)                                           \
  uint32_t aclrtlaunch_memswap_ascend_decode_##name(uint32_t blocks, void* stream, \
                                                    MEMSWAP_ASCEND_DECODE_PARAMETERS(void*))

extern "C" {
MEMSWAP_ASCEND_ENCODE_STUB(begin_frame);
MEMSWAP_ASCEND_ENCODE_STUB(place_tiles);
#define MEMSWAP_DECLARE(name, coder) MEMSWAP_ASCEND_ENCODE_STUB(encode_##name);
MEMSWAP_ASCEND_ENCODERS(MEMSWAP_DECLARE)
#undef MEMSWAP_DECLARE
#define MEMSWAP_DECLARE(name, width, split) MEMSWAP_ASCEND_DECODE_STUB(name);
MEMSWAP_ASCEND_DECODERS(MEMSWAP_DECLARE)
#undef MEMSWAP_DECLARE
}
