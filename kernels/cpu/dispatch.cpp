// Which instruction sets this build has and this processor runs.
#include <initializer_list>

#include "codec.h"

namespace memswap::cpu {

namespace {

bool is_intel() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

#if defined(MEMSWAP_CPU_HAS_VECTOR)
bool runs_vector() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
#else
  return true;  // NEON is part of aarch64
#endif
}
#endif

#if defined(MEMSWAP_CPU_HAS_AVX512)
// lzcnt, which old compilers cannot ask for, came with bmi or before.
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vpopcntdq") &&
         __builtin_cpu_supports("gfni") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}
#endif

}  // namespace

const BlockCodec* blocks_of(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return &scalar_blocks();
    case Isa::kVector:
#if defined(MEMSWAP_CPU_HAS_VECTOR)
      if (runs_vector()) {
        return &vector_blocks();
      }
#endif
      return nullptr;
    case Isa::kAvx512:
#if defined(MEMSWAP_CPU_HAS_AVX512)
      if (runs_avx512()) {
        return &avx512_blocks();
      }
#endif
      return nullptr;
  }
  return nullptr;
}

Isa best_isa() {
  for (const Isa isa : {Isa::kAvx512, Isa::kVector}) {
    if (blocks_of(isa) != nullptr) {
      return isa;
    }
  }
  return Isa::kScalar;
}

bool asks_near() { return is_intel(); }

bool asks_pages() { return is_intel(); }

bool touches_pages() { return !is_intel(); }

}  // namespace memswap::cpu
