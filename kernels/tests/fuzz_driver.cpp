// Runs the fuzz target without libFuzzer: the files and directories that are named, and then
// mutations of them for MEMSWAP_FUZZ_SECONDS seconds (5 if it is not set). The mutations follow
// from MEMSWAP_FUZZ_SEED (1 if it is not set), so a failure is found again; the failing input is
// written to fuzz_decode.failed before it is run.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzz_input.h"
#include "patterns.h"

// Of the sanitizers' runtime, if the program was built with one.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

Bytes read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), {});
}

uint64_t number_from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  uint64_t below(uint64_t bound) { return memswap::test::splitmix64(seed_, counter_++) % bound; }

 private:
  uint64_t seed_;
  uint64_t counter_ = 0;
};

// Half of all places are among the first bytes, where headers and records of small frames are.
size_t place(const Bytes& bytes, Random& random) {
  const size_t bound = random.below(2) == 0 ? std::min<size_t>(bytes.size(), 256) : bytes.size();
  return random.below(bound);
}

void mutate(Bytes& bytes, const Bytes& other, Random& random) {
  static constexpr uint32_t kInteresting[] = {
      0, 1, 7, 8, 255, 1023, 1024, 0x7fffffff, 0x80000000, 0xffffffff, 0x80000001, 0x0fff0fff};
  if (bytes.empty()) {
    bytes.push_back(0);
  }
  const size_t at = place(bytes, random);
  switch (random.below(7)) {
    case 0:
      bytes[at] ^= static_cast<uint8_t>(1u << random.below(8));
      break;
    case 1:
      bytes[at] = static_cast<uint8_t>(random.below(256));
      break;
    case 2:
      for (size_t i = 0; i < 4 && at + i < bytes.size(); ++i) {
        bytes[at + i] =
            static_cast<uint8_t>(kInteresting[random.below(std::size(kInteresting))] >> 8 * i);
      }
      break;
    case 3:
      bytes.resize(at + 1);
      break;
    case 4:
      bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), random.below(64),
                   static_cast<uint8_t>(random.below(256)));
      break;
    case 5:
      bytes[0] = static_cast<uint8_t>(random.below(memswap::test::kFuzzKinds));
      break;
    default:
      if (!other.empty()) {
        const size_t from = random.below(other.size());
        const size_t count = std::min({random.below(128), other.size() - from, bytes.size() - at});
        std::copy_n(other.begin() + static_cast<ptrdiff_t>(from), count,
                    bytes.begin() + static_cast<ptrdiff_t>(at));
      }
  }
  bytes.resize(std::min<size_t>(bytes.size(), memswap::test::kMaxFuzzBytes));
}

const Bytes* running = nullptr;

void leave_failed_input() {
  if (std::FILE* file = running == nullptr ? nullptr : std::fopen("fuzz_decode.failed", "wb")) {
    std::fwrite(running->data(), 1, running->size(), file);
    std::fclose(file);
    std::fprintf(stderr, "the input is in fuzz_decode.failed\n");
  }
}

void run(const Bytes& bytes) {
  running = &bytes;
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  running = nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGABRT, [](int) {
    leave_failed_input();
    std::_Exit(1);
  });
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(&leave_failed_input);
  }
  std::vector<std::filesystem::path> paths;
  for (int i = 1; i < argc; ++i) {
    if (std::filesystem::is_directory(argv[i])) {
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
        paths.push_back(entry.path());
      }
    } else {
      paths.emplace_back(argv[i]);
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    corpus.push_back(read(path));
    run(corpus.back());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "usage: %s <corpus files or directories>\n", argv[0]);
    return 2;
  }

  const auto budget = std::chrono::seconds(number_from_environment("MEMSWAP_FUZZ_SECONDS", 5));
  const auto end = std::chrono::steady_clock::now() + budget;
  Random random(number_from_environment("MEMSWAP_FUZZ_SEED", 1));
  uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    Bytes bytes = corpus[random.below(corpus.size())];
    const Bytes& other = corpus[random.below(corpus.size())];
    for (uint64_t count = 1 + random.below(4); count > 0; --count) {
      mutate(bytes, other, random);
    }
    run(bytes);
  }
  std::printf("%zu corpus files, %llu mutations, no failure\n", corpus.size(),
              static_cast<unsigned long long>(runs));
  return 0;
}
