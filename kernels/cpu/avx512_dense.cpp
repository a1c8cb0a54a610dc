// Layouts dense and upcast, with AVX-512: [Note: one source for all vectors] in vector_lanes.h.
#define MEMSWAP_VECTOR_AVX512
#include "vector_dense.cpp"
