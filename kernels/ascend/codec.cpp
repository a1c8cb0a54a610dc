// The backend's table: arguments, tiling, launches. Every function returns as soon as its work is
// enqueued; nothing is allocated and nothing waits. Plain C++ for the host: kernels are reached by
// the functions of entries.h alone.
#include "memswap/codec.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "entries.h"
#include "memswap/arguments.h"
#include "memswap/frame.h"
#include "runtime.h"

namespace memswap::ascend {
namespace {

using frame::Dtype;
using frame::Layout;

constexpr int kNoCores = -3;

// No more cores than that work on a frame. Atlas A2 and A3 have 40 or 48.
constexpr uint32_t kMaxCores = 64;

// Tiles of room that an encode may leave unused (job.h, Note [positions without talking]).
constexpr uint32_t kSpareTiles = 1;

// Of the encoder's launches (job.h, which is the kernels' own).
constexpr uint32_t kMeasure = 0;
constexpr uint32_t kStore = 1;

// The kernels add up counters in 32 bits.
constexpr uint64_t kMaxElements = UINT32_MAX;

using EncodeLaunch = uint32_t (*)(uint32_t blocks, void* stream,
                                  MEMSWAP_ASCEND_ENCODE_PARAMETERS(void*));
using DecodeLaunch = uint32_t (*)(uint32_t blocks, void* stream,
                                  MEMSWAP_ASCEND_DECODE_PARAMETERS(void*));

#define ENCODER(name) aclrtlaunch_memswap_ascend_encode_##name
#define DECODER(name) aclrtlaunch_memswap_ascend_decode_##name

struct FloatKernels {
  Dtype dtype;
  EncodeLaunch dense;
  EncodeLaunch sparse;
  DecodeLaunch decode;
};
#define FLOAT_KERNELS(dtype, name) \
  {Dtype::dtype, ENCODER(dense_##name), ENCODER(sparse_##name), DECODER(name)}
constexpr FloatKernels kFloats[] = {
    FLOAT_KERNELS(kBf16, bf16), FLOAT_KERNELS(kFp16, fp16), FLOAT_KERNELS(kFp32, fp32),
    FLOAT_KERNELS(kFp64, fp64), FLOAT_KERNELS(kE4m3, e4m3), FLOAT_KERNELS(kE5m2, e5m2),
};

// For elements of so many bits, of any dtype; only floats have decoders of their own.
struct WidthKernels {
  EncodeLaunch signed_ints;
  EncodeLaunch unsigned_ints;
  EncodeLaunch raw;
  DecodeLaunch decode;
};
#define WIDTH_KERNELS(bits) \
  {ENCODER(int##bits), ENCODER(uint##bits), ENCODER(raw##bits), DECODER(other##bits)}
constexpr WidthKernels kWidths[] = {WIDTH_KERNELS(8), WIDTH_KERNELS(16), WIDTH_KERNELS(32),
                                    WIDTH_KERNELS(64)};

const FloatKernels* float_kernels(Dtype dtype) {
  const auto* found = std::find_if(std::begin(kFloats), std::end(kFloats),
                                   [=](const FloatKernels& one) { return one.dtype == dtype; });
  return found != std::end(kFloats) ? found : nullptr;
}

const WidthKernels& width_kernels(Dtype dtype) {
  const uint32_t width = frame::width_of(dtype);
  return kWidths[width == 1 ? 0 : width == 2 ? 1 : width == 4 ? 2 : 3];
}

// Null where the layout does not fit the dtype.
EncodeLaunch encoder_of(Dtype dtype, Layout layout) {
  const FloatKernels* floats = float_kernels(dtype);
  const WidthKernels& any = width_kernels(dtype);
  switch (layout) {
    case Layout::kDense:
      return floats != nullptr ? floats->dense : nullptr;
    case Layout::kSparse:
      return floats != nullptr ? floats->sparse : nullptr;
    case Layout::kUpcast:
      return ENCODER(upcast);
    case Layout::kBits:
      return ENCODER(bits);
    case Layout::kInts:
      return frame::is_signed(dtype) ? any.signed_ints : any.unsigned_ints;
    case Layout::kRaw:
      return any.raw;
  }
  return nullptr;
}

DecodeLaunch decoder_of(Dtype dtype) {
  const FloatKernels* floats = float_kernels(dtype);
  return floats != nullptr ? floats->decode : width_kernels(dtype).decode;
}

// Cores that share the tiles of a job: as many as the device and the caller permit, and none
// without a tile.
uint32_t blocks_for(uint64_t elements, uint32_t cores, const memswap_launch& where) {
  const uint64_t tiles = (elements + frame::kTileElements - 1) / frame::kTileElements;
  const uint32_t bound = where.max_processors != 0 ? where.max_processors : kMaxCores;
  return static_cast<uint32_t>(
      std::max<uint64_t>(1, std::min<uint64_t>({tiles, cores, bound, kMaxCores})));
}

int run(const memswap_encode_job& job, uint32_t cores, const memswap_launch& where) {
  const Dtype dtype = static_cast<Dtype>(job.dtype);
  const Layout layout = static_cast<Layout>(job.layout);
  const EncodeLaunch encoder = encoder_of(dtype, layout);
  const uint32_t blocks = blocks_for(job.elements, cores, where);
  const auto launch = [&](EncodeLaunch kernel, uint32_t on, uint32_t pass) {
    return static_cast<int>(kernel(on, where.stream, const_cast<void*>(job.input), job.frame,
                                   job.overflow, job.overflow_cursor, job.elements,
                                   job.var_capacity, job.overflow_capacity, job.dtype, job.layout,
                                   frame::slab_bytes(dtype, layout), job.checksum != 0,
                                   job.profile == MEMSWAP_FAST, job.center, pass));
  };
  int error = launch(aclrtlaunch_memswap_ascend_begin_frame, 1, 0);
  if (error != 0 || job.elements == 0) {
    return error;
  }
  error = launch(encoder, blocks, kMeasure);
  if (error != 0 || layout == Layout::kRaw) {
    return error;
  }
  error = launch(aclrtlaunch_memswap_ascend_place_tiles, 1, 0);
  return error != 0 ? error : launch(encoder, blocks, kStore);
}

int run(const memswap_decode_job& job, uint32_t cores, const memswap_launch& where) {
  const uint64_t overflow_capacity = job.overflow != nullptr ? job.overflow_capacity : 0;
  return static_cast<int>(decoder_of(static_cast<Dtype>(job.dtype))(
      blocks_for(job.elements, cores, where), where.stream, const_cast<void*>(job.frame),
      job.output, job.status, const_cast<void*>(job.overflow), overflow_capacity, job.frame_bytes,
      job.elements, job.dtype, job.verify != 0));
}

template <class Job>
int run_checked(const Job* job, const memswap_launch* launch_or_null) {
  if (!arguments::is_valid(job)) {
    return MEMSWAP_CODEC_BAD_ARGUMENT;
  }
  if (job->elements > kMaxElements) {
    return MEMSWAP_CODEC_NOT_SUPPORTED;
  }
  uint32_t cores = 0;
  if (const int error = vector_cores(&cores); error != 0) {
    return error;
  }
  if (cores == 0) {
    return kNoCores;
  }
  return run(*job, cores, launch_or_null != nullptr ? *launch_or_null : memswap_launch{});
}

int encode(const memswap_encode_job* job, const memswap_launch* launch) {
  return run_checked(job, launch);
}

int decode(const memswap_decode_job* job, const memswap_launch* launch) {
  return run_checked(job, launch);
}

const char* message(int code) {
  if (const char* shared = arguments::message_of(code)) {
    return shared;
  }
  if (code == kNoCores) {
    return "the device has no vector cores; the Ascend codec needs an Atlas A2 or A3";
  }
  static thread_local char words[96];
  std::snprintf(words, sizeof(words),
                "error %d of the ACL runtime; aclGetRecentErrMsg and plog have the details", code);
  return words;
}

constexpr memswap_codec kCodec = {MEMSWAP_CODEC_VERSION, "ascend", &encode, &decode, &message,
                                  kSpareTiles,           1,        0,       0,       0};

}  // namespace
}  // namespace memswap::ascend

const memswap_codec* memswap_codec_ascend(void) { return &memswap::ascend::kCodec; }
