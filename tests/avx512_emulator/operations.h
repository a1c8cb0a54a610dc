// The intrinsics as functions of bytes: the emulated ones and the processor's have the same names,
// and are compared on random operands.
#pragma once

#include <cstdint>
#include <span>

namespace memswap::test {

struct Operands {
  alignas(64) unsigned char a[64], b[64], c[64];
  uint64_t mask;
};

struct Operation {
  const char* name;
  void (*run)(const Operands& operands, unsigned char (&result)[64]);
};

// operations.cpp, compiled twice: with the emulator's <immintrin.h> and with the compiler's.
std::span<const Operation> emulated_operations();
std::span<const Operation> avx512_operations();
bool has_avx512();

// operations_avx2.cpp: those of 64 bytes as two of 32.
std::span<const Operation> avx2_operations();
bool has_avx2();

}  // namespace memswap::test
