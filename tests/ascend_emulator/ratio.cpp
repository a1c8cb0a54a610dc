// How long the kernels' frames are beside the canonical encoder's: LQ3 and FW alone against all
// modes. Arguments: a dtype (bf16, fp16 or fp32), then files of raw elements.
#include "harness.h"

int main(int argc, char** argv) {
  using namespace memswap::test;
  const std::string name = argc > 1 ? argv[1] : "";
  const Dtype dtype = name == "fp32" ? Dtype::kFp32 : name == "fp16" ? Dtype::kFp16 : Dtype::kBf16;
  const Format format{dtype, Shape::kDense};
  for (int i = 2; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    const Data data(std::istreambuf_iterator<char>(file), {});
    const uint64_t elements = data.size() / format.width();
    Run run;
    run.cores = 1;
    run.options.report_hazards = false;
    run.options.order = ascend_emulator::Order::kEager;
    const Layout layout = format.layout(elements);
    const auto bytes = [&](const Frame& frame) {
      return layout.bytes(portable(frame).size() > 0 ? frame.header().var_used : 0);
    };
    const uint64_t kernels = bytes(ascend_encode(format, data, layout.max_var_units(), run));
    const uint64_t canonical = bytes(cpu_encode(format, data));
    std::printf("%s,%zu,%llu,%llu,%.4f,%.4f\n", argv[i], data.size(),
                static_cast<unsigned long long>(kernels),
                static_cast<unsigned long long>(canonical),
                static_cast<double>(kernels) / static_cast<double>(data.size()),
                static_cast<double>(canonical) / static_cast<double>(data.size()));
  }
  return failures;
}
