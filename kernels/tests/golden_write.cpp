// Writes the golden frames, the elements that they hold, or the fuzzer's first corpus:
//   memswap_kernels_golden_write golden <directory>
//   memswap_kernels_golden_write inputs <directory>
//   memswap_kernels_golden_write corpus <directory>
// The golden files change only together with the version of the format.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fuzz_input.h"
#include "golden_frames.h"
#include "memswap/cpu.h"
#include "memswap/portable.h"

namespace memswap::test {
namespace {

struct FreeAligned {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

std::vector<uint8_t> input_of(const GoldenFrame& golden) {
  std::vector<uint8_t> input(golden.elements * frame::width_of(golden.dtype));
  fill(golden.pattern, golden.dtype, golden.seed, 0, golden.elements, input.data());
  return input;
}

std::vector<uint8_t> portable_frame(const GoldenFrame& golden) {
  const std::vector<uint8_t> input = input_of(golden);
  const frame::Sections sections = frame::sections_of(golden.dtype, golden.layout, golden.elements);
  const uint64_t bytes = sections.bytes(sections.max_var_units());
  const std::unique_ptr<uint8_t, FreeAligned> memory(
      static_cast<uint8_t*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128)));
  memswap_encode_job job = encode_job_of(golden, input.data());
  job.frame = memory.get();
  job.var_capacity = sections.max_var_units();
  uint64_t written = 0;
  if (memswap_codec_cpu_with("scalar")->encode(&job, nullptr) != MEMSWAP_CODEC_OK) {
    std::fprintf(stderr, "%s does not encode\n", golden.name);
    std::exit(1);
  }
  std::vector<uint8_t> portable(bytes);
  memswap_frame_portable(memory.get(), bytes, nullptr, 0, portable.data(), bytes, &written);
  portable.resize(written);
  return portable;
}

void write(const std::string& path, const std::vector<uint8_t>& bytes) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() ||
      std::fclose(file) != 0) {
    std::perror(path.c_str());
    std::exit(1);
  }
}

// Every third frame as it is, and a few tensors for the round trip, whole and drawn.
void write_corpus(const std::string& directory) {
  uint32_t index = 0;
  for (const GoldenFrame& golden : kGoldenFrames) {
    if (index++ % 3 != 0 || golden.elements > 2000) {
      continue;
    }
    std::vector<uint8_t> input = {kFuzzFrame, 0};
    const std::vector<uint8_t> frame = portable_frame(golden);
    input.insert(input.end(), frame.begin(), frame.end());
    write(directory + "/frame-" + golden.name, input);
  }
  for (const frame::Dtype dtype :
       {frame::Dtype::kBf16, frame::Dtype::kFp32, frame::Dtype::kInt16}) {
    for (const Pattern pattern : {Pattern{Kind::kSignedSparse, 8}, Pattern{Kind::kOutliers, 9}}) {
      std::vector<uint8_t> input(kFuzzTensorHeaderBytes + 1100 * frame::width_of(dtype));
      input[0] = kFuzzTensor;
      input[1] = static_cast<uint8_t>(dtype);
      fill(pattern, dtype, 1, 0, 1100, input.data() + kFuzzTensorHeaderBytes);
      write(directory + "/tensor-" + std::to_string(static_cast<int>(dtype)) + "-" +
                std::to_string(static_cast<int>(pattern.kind)),
            input);
    }
  }
  for (const frame::Dtype dtype : {frame::Dtype::kBf16, frame::Dtype::kFp16, frame::Dtype::kFp32,
                                   frame::Dtype::kFp64, frame::Dtype::kE5m2}) {
    std::vector<uint8_t> input(kFuzzDrawnHeaderBytes + 12 * frame::width_of(dtype));
    input[0] = kFuzzDrawn;
    input[1] = static_cast<uint8_t>(dtype);
    input[3] = kFuzzNoise | kFuzzChecksum;
    input[5] = 255;
    input[7] = 1024 >> 8;
    fill({Kind::kOutliers, 6}, dtype, 1, 0, 12, input.data() + kFuzzDrawnHeaderBytes);
    write(directory + "/drawn-" + std::to_string(static_cast<int>(dtype)), input);
    input[2] = kFuzzChosenLayout;
    write(directory + "/chosen-" + std::to_string(static_cast<int>(dtype)), input);
  }
}

}  // namespace
}  // namespace memswap::test

int main(int argc, char** argv) {
  using namespace memswap::test;
  const std::string what = argc == 3 ? argv[1] : "";
  if (what == "golden") {
    for (const GoldenFrame& golden : kGoldenFrames) {
      write(std::string(argv[2]) + "/" + golden.name + ".msf", portable_frame(golden));
    }
  } else if (what == "inputs") {
    for (const GoldenFrame& golden : kGoldenFrames) {
      write(std::string(argv[2]) + "/" + golden.name + ".bin", input_of(golden));
    }
  } else if (what == "corpus") {
    write_corpus(argv[2]);
  } else {
    std::fprintf(stderr, "usage: %s golden|inputs|corpus <directory>\n", argv[0]);
    return 2;
  }
  return 0;
}
