// Torch's dtypes as frames know them.
#pragma once

#include <c10/core/ScalarType.h>

#include "memswap/frame.h"

namespace memswap {

// The frame dtype of a torch dtype; that of the real and imaginary parts where it is complex (a
// frame then has twice as many elements). What the format has no name for is bits of its width.
// Throws std::invalid_argument for a width that no frame has.
frame::Dtype frame_dtype(c10::ScalarType dtype);

}  // namespace memswap
