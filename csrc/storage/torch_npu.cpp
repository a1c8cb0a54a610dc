#include "torch_npu.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace memswap {
namespace {

// Functions of libtorch_npu.so, by their names in C++'s binary interface. The declarations are in
// torch_npu/csrc/framework/OpCommand.h, core/npu/NPUStream.h and core/npu/NPUFormat.h of its wheel.
struct TorchNpu {
  // at_npu::native::OpCommand::RunOpApiV2(const std::string&, const std::function<int()>&, bool)
  using RunOpApi = void (*)(const std::string& name, const std::function<int()>& run, bool sync);
  // c10_npu::NPUStream::stream(bool need_empty) const; an NPUStream is a c10::Stream and no more.
  using RawStream = void* (*)(const c10::Stream* self, bool need_empty);
  // at_npu::native::get_npu_format(const at::Tensor&)
  using FormatOf = int64_t (*)(const at::TensorBase& tensor);

  RunOpApi run_op_api = nullptr;
  RawStream raw_stream = nullptr;
  FormatOf format_of = nullptr;
};

template <class Function>
Function function_of(void* library, const char* symbol) {
  void* found = dlsym(library, symbol);
  TORCH_CHECK_NOT_IMPLEMENTED(found, "memswap: this torch_npu has no ", symbol,
                              "; memswap was written for torch_npu 2.11 to 2.13. Install one of "
                              "them, or report this with the version of yours");
  return reinterpret_cast<Function>(found);
}

// Null where torch_npu is not loaded: PrivateUse1 may be anybody's device. Whoever provides a
// device is loaded before it is used, so the answer does not change.
const TorchNpu* torch_npu(c10::DeviceType type) {
  if (type != c10::DeviceType::PrivateUse1) {
    return nullptr;
  }
  static const std::optional<TorchNpu> found = []() -> std::optional<TorchNpu> {
    void* library = dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) {
      return std::nullopt;
    }
    return TorchNpu{
        .run_op_api = function_of<TorchNpu::RunOpApi>(
            library,
            "_ZN6at_npu6native9OpCommand10RunOpApiV2ERKNSt7__cxx1112basic_stringIcSt11char_"
            "traitsIcESaIcEEERKSt8functionIFivEEb"),
        .raw_stream = function_of<TorchNpu::RawStream>(library, "_ZNK7c10_npu9NPUStream6streamEb"),
        .format_of = function_of<TorchNpu::FormatOf>(
            library, "_ZN6at_npu6native14get_npu_formatERKN2at6TensorE"),
    };
  }();
  return found ? &*found : nullptr;
}

}  // namespace

int submit(const char* name, c10::Stream stream, std::function<int(void*)> work) {
  const TorchNpu* npu = torch_npu(stream.device_type());
  if (!npu) {
    return work(stream.native_handle());
  }
  void* native = npu->raw_stream(&stream, /*need_empty=*/false);
  struct Outcome {
    const std::thread::id caller = std::this_thread::get_id();
    int code = 0;  // set where `work` runs in the calling thread
  };
  auto outcome = std::make_shared<Outcome>();
  const c10::StreamGuard guard(stream);
  try {
    npu->run_op_api(
        name,
        [native, outcome, work = std::move(work)] {
          const int code = work(native);
          if (std::this_thread::get_id() == outcome->caller) {
            outcome->code = code;
          }
          return code;
        },
        /*sync=*/false);
  } catch (const std::exception&) {
    if (outcome->code == 0) {
      throw;
    }
  }
  return outcome->code;
}

bool has_private_format(const at::TensorBase& tensor) {
  const TorchNpu* npu = torch_npu(tensor.device().type());
  if (!npu) {
    return false;
  }
  // aclFormat: undefined, NCHW, ND, NCDHW. In these the elements lie as sizes and strides say.
  const int64_t format = npu->format_of(tensor);
  return format != -1 && format != 0 && format != 2 && format != 30;
}

}  // namespace memswap
