// Layouts ints, bits and raw, and the checksum, with AVX-512: [Note: one source for all vectors] in
// vector_lanes.h.
#define MEMSWAP_VECTOR_AVX512
#include "vector_ints.cpp"
