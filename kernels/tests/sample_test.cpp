// The layout that a sample chooses, against all layouts tried by force.
#include "memswap/sample.h"

#include <cmath>
#include <functional>
#include <map>
#include <thread>

#include "support.h"

namespace memswap::test {
namespace {

// 1025 blocks, the last one not whole: 24 are looked at, as of any tensor up to 6144 blocks.
constexpr uint64_t kElements = 1024 * 1024 + 331;

// What a test fills a tensor with.
using Fill = std::function<void(Tensor&)>;

Fill of_pattern(Pattern pattern) {
  return [=](Tensor& tensor) {
    fill(pattern, tensor.dtype, 7, 0, tensor.elements, tensor.buffer.data());
  };
}

template <typename Element>
void put(Tensor& tensor, uint64_t index, Element element) {
  memcpy(tensor.buffer.data() + index * sizeof(Element), &element, sizeof(Element));
}

// Elements of N(0, 1) that are drawn before they come again: 64 blocks and a bit, so that rows of
// 2^k elements are not alike.
constexpr uint64_t kDrawn = 64 * 1024 + 77;

// N(0, 1) where `is_there` says so, else 0.
Fill normal_where(std::function<bool(uint64_t)> is_there) {
  return [=](Tensor& tensor) {
    const uint32_t width = frame::width_of(tensor.dtype);
    const uint64_t drawn = std::min<uint64_t>(tensor.elements, kDrawn);
    fill({Kind::kNormal, 0}, tensor.dtype, 11, 0, drawn, tensor.buffer.data());
    for (uint64_t i = drawn; i < tensor.elements; i += drawn) {
      memcpy(tensor.buffer.data() + i * width, tensor.buffer.data(),
             std::min(drawn, tensor.elements - i) * width);
    }
    for (uint64_t i = 0; i < tensor.elements; ++i) {
      if (!is_there(i)) {
        memset(tensor.buffer.data() + i * width, 0, width);
      }
    }
  };
}

uint64_t random(uint64_t seed, uint64_t index) { return splitmix64(seed, index); }

struct Case {
  const char* name;
  std::vector<Dtype> dtypes;
  Fill fill;
};

const std::vector<Dtype> kFloats = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32,
                                    Dtype::kFp64, Dtype::kE4m3, Dtype::kE5m2};
const std::vector<Dtype> kOneByte = {Dtype::kBool, Dtype::kUint8, Dtype::kInt8, Dtype::kBits8};

std::vector<Case> cases() {
  std::vector<Case> all = {
      {"dense", kFloats, of_pattern({Kind::kNormal, 0})},
      {"long tails", kFloats, of_pattern({Kind::kDecay, 14})},
      {"outliers", kFloats, of_pattern({Kind::kSpikes, 10})},
      {"half zeros", kFloats, of_pattern({Kind::kSparse, 8})},
      {"half of them signed zeros", kFloats, of_pattern({Kind::kSignedSparse, 8})},
      {"squared ReLU", kFloats, normal_where([](uint64_t i) { return random(3, i) % 3 == 0; })},
      {"residual dropout", kFloats,
       normal_where([](uint64_t i) { return random(3, i) % 10 != 0; })},
      {"causal softmax", kFloats,
       normal_where([](uint64_t i) { return i % 512 <= i / 512 % 512; })},
      {"causal softmax, rows of two blocks", kFloats,
       normal_where([](uint64_t i) { return i % 2048 <= 4 * (i / 2048 % 512); })},
      {"causal mask", kOneByte, of_pattern({Kind::kCausal, 10})},
      {"dropout mask", kOneByte, of_pattern({Kind::kBooleans, 0})},
      {"all zeros", all_dtypes(), of_pattern({Kind::kConstant, 0})},
      {"constant", all_dtypes(), of_pattern({Kind::kConstant, 1})},
      {"random bits", all_dtypes(), of_pattern({Kind::kRandomBits, 0})},
      {"tokens",
       {Dtype::kInt64, Dtype::kInt32, Dtype::kUint16, Dtype::kUint32},
       [](Tensor& tensor) {
         for (uint64_t i = 0; i < tensor.elements; ++i) {
           const uint64_t token = random(5, i) % 50257;
           memcpy(tensor.buffer.data() + i * frame::width_of(tensor.dtype), &token,
                  frame::width_of(tensor.dtype));
         }
       }},
      {"indices", {Dtype::kInt64, Dtype::kInt32}, of_pattern({Kind::kSorted, 1})},
      {"bfloat16 in float32", {Dtype::kFp32}, of_pattern({Kind::kUpcast, 0})},
      {"half zeros in bfloat16 in float32",
       {Dtype::kFp32},
       [](Tensor& tensor) {
         of_pattern({Kind::kUpcast, 0})(tensor);
         for (uint64_t i = 0; i < tensor.elements; ++i) {
           if (random(9, i) % 2 == 0) {
             put(tensor, i, 0.0F);
           }
         }
       }},
      // Their upper halves, which tell what most others take, are 0.
      {"denormals",
       {Dtype::kFp32, Dtype::kFp64},
       [](Tensor& tensor) {
         const uint32_t width = frame::width_of(tensor.dtype);
         memset(tensor.buffer.data(), 0, tensor.elements * width);
         for (uint64_t i = 0; i < tensor.elements; ++i) {
           const uint64_t bits = random(17, i);
           memcpy(tensor.buffer.data() + i * width, &bits, width - 2);
         }
       }},
      {"float16 in float32",
       {Dtype::kFp32},
       [](Tensor& tensor) {
         of_pattern({Kind::kNormal, 0})(tensor);
         for (uint64_t i = 0; i < tensor.elements; ++i) {
           uint32_t bits;
           memcpy(&bits, tensor.buffer.data() + 4 * i, 4);
           put(tensor, i, bits & ~uint32_t{0x1fff});
         }
       }},
  };
  // Of an embedding, whose rows are 1000 elements long: how many of its rows some batch asked for.
  for (const uint64_t of_100 : {2, 10, 40, 75, 90}) {
    all.push_back({"gradient of an embedding", kFloats,
                   normal_where([=](uint64_t i) { return random(13, i / 1000) % 100 < of_100; })});
  }
  return all;
}

uint64_t frame_bytes(const Tensor& tensor, Layout layout) {
  const Frame frame = encode(*memswap_codec_cpu(), tensor, {.layout = layout});
  return frame.sections().bytes(frame.header().var_used);
}

Layout chosen(const Tensor& tensor, const memswap_launch* launch = nullptr) {
  return static_cast<Layout>(memswap_choose_layout(tensor.buffer.data(), tensor.elements,
                                                   static_cast<uint8_t>(tensor.dtype), launch));
}

std::vector<Layout> layouts_of(Dtype dtype) {
  std::vector<Layout> layouts;
  for (uint8_t layout = 0; layout <= frame::kLastLayout; ++layout) {
    if (frame::layout_fits(dtype, static_cast<Layout>(layout))) {
      layouts.push_back(static_cast<Layout>(layout));
    }
  }
  return layouts;
}

void expect_near_the_best(const Tensor& tensor, const std::string& name) {
  const Layout layout = chosen(tensor);
  std::map<Layout, uint64_t> bytes;
  for (const Layout other : layouts_of(tensor.dtype)) {
    bytes[other] = frame_bytes(tensor, other);
  }
  for (const auto& [other, its_bytes] : bytes) {
    EXPECT_LE(static_cast<double>(bytes[layout]), 1.02 * static_cast<double>(its_bytes))
        << name << ", dtype " << int(tensor.dtype) << ", " << tensor.elements
        << " elements: chose layout " << int(layout) << ", where " << int(other) << " is shorter";
  }
}

TEST(Sample, ChoosesNearTheBestLayout) {
  for (const Case& what : cases()) {
    for (const Dtype dtype : what.dtypes) {
      Tensor tensor(dtype, kElements);
      what.fill(tensor);
      expect_near_the_best(tensor, what.name);
    }
  }
}

TEST(Sample, OfAFewBlocksLooksAtAllOfThem) {
  for (const uint64_t elements : {0, 1, 100, 1023, 1024, 1025, 8191, 8192, 24 * 1024}) {
    ASSERT_EQ(memswap_sample_count(elements), (elements + 1023) / 1024);
    for (const Pattern pattern : kPatterns) {
      for (const Dtype dtype : all_dtypes()) {
        const Tensor tensor(pattern, dtype, 3, elements);
        const Layout layout = chosen(tensor);
        ASSERT_TRUE(frame::layout_fits(dtype, layout));
        for (const Layout other : layouts_of(dtype)) {
          ASSERT_LE(frame_bytes(tensor, layout), frame_bytes(tensor, other))
              << "dtype " << int(dtype) << ", " << elements << " elements: chose layout "
              << int(layout) << ", where " << int(other) << " is shorter";
        }
      }
    }
  }
}

// [Note: sparse without zeros] in sample.cpp, which does not encode such blocks in layout sparse.
TEST(Sample, KnowsWhatSparseTakesWithoutZeros) {
  for (const Dtype dtype : kFloats) {
    const uint64_t block_bytes = frame::kBlockElements * frame::width_of(dtype);
    uint32_t found = 0;
    for (const Pattern pattern : kPatterns) {
      for (uint64_t seed = 1; seed <= 20; ++seed) {
        const Tensor tensor(pattern, dtype, seed, frame::kBlockElements);
        const Frame dense = encode(*memswap_codec_cpu(), tensor, {.layout = Layout::kDense});
        const uint32_t mode = frame::Record::mode(dense.record(0).block[0]);
        if (dense.header().zeros != 0 || mode != frame::kLq2) {
          continue;
        }
        const Frame sparse = encode(*memswap_codec_cpu(), tensor, {.layout = Layout::kSparse});
        const auto block = [](const Frame& frame) {
          return frame.sections().slab_bytes + frame.header().var_used * frame::kUnitBytes;
        };
        ASSERT_EQ(block(sparse), std::min(block(dense) + frame::kMapsBytes, block_bytes))
            << "dtype " << int(dtype) << ", pattern " << int(pattern.kind);
        ++found;
      }
    }
    EXPECT_GT(found, 20u) << "dtype " << int(dtype);
  }
}

TEST(Sample, BlocksAreWholeAscendAndSpreadOverTheTensor) {
  for (const uint64_t elements : {uint64_t{25 * 1024}, uint64_t{25 * 1024 + 1}, kElements,
                                  uint64_t{1} << 30, frame::kMaxElements}) {
    const uint32_t count = memswap_sample_count(elements);
    const uint64_t whole = elements / frame::kBlockElements;
    ASSERT_LE(count, std::max<uint64_t>(24, whole / 256)) << elements;
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t block = memswap_sample_block(elements, i);
      ASSERT_GE(block, i * whole / count) << "sample " << i << " of " << elements;
      ASSERT_LT(block, (i + 1) * whole / count) << "sample " << i << " of " << elements;
    }
  }
}

TEST(Sample, CopiedOutOfTheTensorChoosesTheSame) {
  for (const Case& what : cases()) {
    const Dtype dtype = what.dtypes[0];
    for (const uint64_t elements : {uint64_t{0}, uint64_t{5000}, kElements}) {
      Tensor tensor(dtype, elements);
      what.fill(tensor);
      const uint32_t width = frame::width_of(dtype);
      const uint32_t count = memswap_sample_count(elements);
      Tensor sample(dtype, std::min<uint64_t>(elements, count * frame::kBlockElements));
      for (uint32_t i = 0; i < count; ++i) {
        const uint64_t from = memswap_sample_block(elements, i) * frame::kBlockElements;
        memcpy(sample.buffer.data() + i * frame::kBlockElements * width,
               tensor.buffer.data() + from * width,
               std::min<uint64_t>(frame::kBlockElements, elements - from) * width);
      }
      EXPECT_EQ(static_cast<Layout>(memswap_choose_layout_of_sample(
                    sample.buffer.data(), elements, static_cast<uint8_t>(dtype), nullptr)),
                chosen(tensor))
          << what.name << ", " << elements << " elements";
    }
  }
}

TEST(Sample, IsTheSameOnAnyNumberOfThreads) {
  memswap_launch launch{};
  launch.max_processors = 3;
  launch.parallel_for = [](void*, size_t count, void (*task)(void*, size_t), void* context) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < count; ++i) {
      threads.emplace_back([=] { task(context, i); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  };
  for (const Case& what : cases()) {
    Tensor tensor(what.dtypes[0], kElements);
    what.fill(tensor);
    EXPECT_EQ(chosen(tensor, &launch), chosen(tensor)) << what.name;
  }
}

TEST(Sample, AConstantTakesBytesForABlock) {
  for (const Dtype dtype : all_dtypes()) {
    const Tensor tensor({Kind::kConstant, 1}, dtype, 3, kElements);
    const Layout layout = chosen(tensor);
    EXPECT_LE(frame_bytes(tensor, layout),
              128 + 32 * (kElements / 1024 + 1) + 4 * (kElements / 1024 + 8))
        << "dtype " << int(dtype);
  }
}

}  // namespace
}  // namespace memswap::test
