// A tensor as a kernel launch captures it.
//
// [Note: captures]
// A queued task holds addresses, sizes and strides, and never a reference to a tensor: a launched
// kernel does not keep memory alive, and a task that did would hide every premature free.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "../backend/backend.h"

namespace simdev {

struct RawTensor {
  void* data = nullptr;
  c10::SmallVector<int64_t, 5> sizes, strides;
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool wrapped_number = false, conj = false, neg = false;
  // The bounding range of the elements.
  uintptr_t begin = 0, end = 0;

  Span span(bool write, bool device = true) const { return {begin, end, write, device}; }
  double bytes() const { return static_cast<double>(end - begin); }
  bool defined() const { return dtype != at::ScalarType::Undefined; }
};

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

// [Note: thread state]
// A task may run on any host thread, in the middle of anything: under autocast, a dispatch mode,
// functorch, no_grad. While it lives, the thread is as a fresh one that is below autograd.
class FreshThreadState {
 public:
  FreshThreadState();

 private:
  at::ThreadLocalStateGuard fresh_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
};

// Raises where the tensor needs more bytes than its storage has, e.g. after resize_(0).
RawTensor describe(const at::Tensor& tensor);
// A CPU tensor over the same bytes, which it does not own.
at::Tensor as_cpu(const RawTensor& raw);

}  // namespace simdev
