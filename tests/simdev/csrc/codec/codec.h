// A codec for the simulated device: what a backend's kernels would do, done by another codec in
// stream order.
#pragma once

#include "memswap/codec.h"

namespace simdev {

// A table that runs `host`'s functions (of host memory, and valid for ever) as tasks of the stream
// that a launch names, with the accesses declared to the race detector. It fills reports, but does
// not say so: a copy of the table may. One per process: the first `host` stays.
const memswap_codec* codec_on_streams(const memswap_codec* host);

}  // namespace simdev
