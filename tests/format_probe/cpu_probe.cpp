// The CPU codec's lines, for one of its instruction sets: <folder of golden frames> <set>.
#include "memswap/cpu.h"
#include "probe.h"

namespace {

const memswap_codec* codec;

int encode(const memswap_encode_job& job) { return codec->encode(&job, nullptr); }
int decode(const memswap_decode_job& job) { return codec->decode(&job, nullptr); }

}  // namespace

int main(int, char** argv) {
  codec = memswap_codec_cpu_with(argv[2]);
  if (codec == nullptr) {
    printf("not here\n");
    return 0;
  }
  memswap::probe::Probe({&encode, &decode}, argv[1]).run();
  return 0;
}
