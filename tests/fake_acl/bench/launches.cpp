// Emulated kernels take their place in the fake runtime's streams before the benchmark begins.
#include "../torch/ascend_kernels.h"

[[maybe_unused]] static const memswap_codec* const on_streams = fake_acl::ascend_codec();
