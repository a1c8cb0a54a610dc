// Tensors like those that training saves, as bytes, and how far any code of single symbols could
// compress them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "memswap/frame.h"

namespace memswap::bench {

enum class Kind {
  kNormal,       // N(0, 1)
  kActivations,  // normal values whose scale differs from channel to channel, and their products
  kSoftmax,      // causal attention probabilities: zeros above the diagonal
  kDropout,      // N(0, 1), half of them +-0
  kUpcast,       // bfloat16 values of N(0, 1) in float32
  kMask,         // causal mask: runs of 0 and 1
  kTokens,       // 0 .. 50256
  kRandom,       // random bits
};

const char* name_of(Kind kind);

// `bytes` is a multiple of the dtype's width. The same arguments make the same bytes.
std::vector<uint8_t> make_tensor(frame::Dtype dtype, Kind kind, size_t bytes);

// Order-0 bound: raw bits over the entropy of (zero or the exponent E) plus the bits of R of what
// is not zero; of one-byte integers, the bytes' entropy. 0 for wider integers.
double entropy_ratio(frame::Dtype dtype, const std::vector<uint8_t>& tensor);

}  // namespace memswap::bench
