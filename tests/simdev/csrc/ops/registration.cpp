// What the simulated device registers with the dispatcher beside its copies, factories and views.
#include <torch/library.h>

#include "ops.h"

namespace simdev {
namespace {

void record_stream_op(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), stream_id(stream));
}

bool is_pinned_op(const at::Tensor&, std::optional<at::Device>) { return false; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Backends without a kernel get a composition of other operators: slower, with other bits.
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream_op);
  m.impl("is_pinned", is_pinned_op);
}

}  // namespace
}  // namespace simdev
