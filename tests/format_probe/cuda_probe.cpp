// The CUDA kernels' lines, on the emulator: <folder of golden frames>.
#include "emulated_codec.h"  // tests/cuda_emulator
#include "probe.h"

namespace {

int encode(const memswap_encode_job& job) { return memswap::test::emulated_encode(&job, nullptr); }
int decode(const memswap_decode_job& job) { return memswap::test::emulated_decode(&job, nullptr); }

}  // namespace

int main(int, char** argv) {
  memswap::probe::Probe({&encode, &decode}, argv[1]).run();
  return 0;
}
