// The table of the AVX-512 path: [Note: one source for all vectors] in vector_lanes.h.
#define MEMSWAP_VECTOR_AVX512
#include "vector.cpp"
