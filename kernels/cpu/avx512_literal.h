// Literal blocks.
#pragma once

#include "avx512_bytes.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {
#include "literal_blocks.h"
}  // namespace
}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
