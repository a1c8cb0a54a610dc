// Literal blocks.
#pragma once

#include "vector_bytes.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::vector {
namespace {
#include "literal_blocks.h"
}  // namespace
}  // namespace memswap::cpu::vector

MEMSWAP_VECTOR_END
