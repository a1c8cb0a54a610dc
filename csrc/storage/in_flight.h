// Memory that a collective of torch.distributed still fills.
#pragma once

#include <ATen/core/TensorBase.h>

namespace memswap {

// Waits for the functional collectives that write the tensor's storage, if there are any: the host,
// or, on an accelerator, the current stream. Later waits find nothing left to do.
//
// [Note: Collectives under way]
// Autograd also saves what a collective gave before anybody has waited for it: torch 2.15's
// all_reduce of a maximum or a minimum saves its own output, a plain tensor. Sent at once, the
// bytes of before would come back. (The AsyncCollectiveTensor around it, which an operator is
// given, waits in pack_unusual, by itself.) Torch knows by the storage what is under way.
void wait_for_collectives(const at::TensorBase& tensor);

}  // namespace memswap
