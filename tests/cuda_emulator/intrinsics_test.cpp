// What the emulator has in place of CUDA's intrinsics is what these are defined to be, bit by bit:
// "CUDA C++ Programming Guide" (warp functions, atomic functions), "CUDA Math API" (integer
// intrinsics, SIMD intrinsics) and, where the kernels write PTX themselves, "PTX ISA". Definitions
// are written here without a look at the emulator's. tests/unit/test_cuda_intrinsics.py says which
// the kernels use.
#include <array>
#include <bitset>
#include <cfloat>
#include <functional>
#include <set>

#include "emulated_codec.h"
#include "warp.cuh"

namespace memswap::test {
namespace {

class Intrinsics : public Emulated {
 protected:
  // Some operand, of every kind in turn: any bits, few bits, nearly all bits, the smallest and the
  // largest numbers.
  uint32_t operand() {
    const uint64_t random = splitmix64(7, counter_++);
    switch (random >> 60 & 7) {
      case 0:
        return 0;
      case 1:
        return 0xffffffff;
      case 2:
        return 1u << (random & 31);
      case 3:
        return ~(1u << (random & 31));
      case 4:
        return static_cast<uint32_t>(random & random >> 20 & random >> 30);
      default:
        return static_cast<uint32_t>(random);
    }
  }
  uint64_t operand64() { return operand() | uint64_t{operand()} << 32; }

  static constexpr int kTries = 2000;

 private:
  uint64_t counter_ = 0;
};

uint32_t byte_of(uint32_t word, uint32_t i) { return word >> (8 * i) & 0xff; }

// --- of one lane ---------------------------------------------------------------------------------

TEST_F(Intrinsics, CountBitsAndFindThem) {
  for (int i = 0; i < kTries; ++i) {
    const uint32_t x = operand();
    const std::bitset<32> bits(x);
    EXPECT_EQ(__popc(x), static_cast<int>(bits.count())) << x;
    int first = 0, leading = 0;
    for (int bit = 31; bit >= 0; --bit) {
      first = bits[static_cast<size_t>(bit)] ? bit + 1 : first;
    }
    while (leading < 32 && !bits[static_cast<size_t>(31 - leading)]) {
      ++leading;
    }
    EXPECT_EQ(__ffs(static_cast<int>(x)), first) << x;
    EXPECT_EQ(__clz(static_cast<int>(x)), leading) << x;
    const uint64_t wide = operand64();
    int leading64 = 0;
    while (leading64 < 64 && (wide >> (63 - leading64) & 1) == 0) {
      ++leading64;
    }
    EXPECT_EQ(__clzll(static_cast<long long>(wide)), leading64) << wide;
  }
}

// PTX: prmt.b32, generic form. A selector's three low bits name a byte, its fourth asks for that
// byte's sign in all bits.
uint32_t prmt(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint32_t bytes[8] = {byte_of(a, 0), byte_of(a, 1), byte_of(a, 2), byte_of(a, 3),
                             byte_of(b, 0), byte_of(b, 1), byte_of(b, 2), byte_of(b, 3)};
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 15;
    const uint32_t byte = bytes[selector % 8];
    result |= (selector < 8 ? byte : byte < 128 ? 0u : 255u) << (8 * i);
  }
  return result;
}

TEST_F(Intrinsics, PermuteBytes) {
  for (int i = 0; i < kTries; ++i) {
    const uint32_t a = operand(), b = operand(), selectors = operand();
    EXPECT_EQ(cuda::permute(a, b, selectors), prmt(a, b, selectors));
    // CUDA's function reads three bits of each of four selectors, and no others.
    EXPECT_EQ(__byte_perm(a, b, selectors), prmt(a, b, selectors & 0x7777));
  }
}

// PTX: lop3.b32. Bit 4 a + 2 b + c of the table is the result where operands have a, b and c.
TEST_F(Intrinsics, SelectBits) {
  constexpr uint32_t kTable = 0xca;
  for (int i = 0; i < kTries; ++i) {
    const uint32_t mask = operand(), ones = operand(), zeros = operand();
    uint32_t expected = 0;
    for (uint32_t bit = 0; bit < 32; ++bit) {
      const uint32_t row = 4 * (mask >> bit & 1) + 2 * (ones >> bit & 1) + (zeros >> bit & 1);
      expected |= (kTable >> row & 1) << bit;
    }
    EXPECT_EQ(cuda::select_bits(mask, ones, zeros), expected);
  }
}

TEST_F(Intrinsics, ShiftTwoWordsAsOne) {
  for (int i = 0; i < kTries; ++i) {
    const uint32_t low = operand(), high = operand(), shift = operand();
    std::bitset<64> both(high);
    both = both << 32 | std::bitset<64>(low);
    const std::bitset<64> word(0xffffffff);
    EXPECT_EQ(__funnelshift_l(low, high, shift), ((both << shift % 32) >> 32 & word).to_ulong());
    EXPECT_EQ(__funnelshift_r(low, high, shift), (both >> shift % 32 & word).to_ulong());
  }
}

TEST_F(Intrinsics, AddProductsOfBytes) {
  for (int i = 0; i < kTries; ++i) {
    const uint32_t a = operand(), b = operand(), sum = operand();
    uint64_t expected = sum;
    for (uint32_t byte = 0; byte < 4; ++byte) {
      expected += uint64_t{byte_of(a, byte)} * byte_of(b, byte);
    }
    EXPECT_EQ(__dp4a(a, b, sum), expected % (uint64_t{1} << 32));
  }
}

TEST_F(Intrinsics, CompareHalves) {
  for (int i = 0; i < kTries; ++i) {
    const uint32_t a = operand(), b = operand();
    const uint16_t a_halves[2] = {static_cast<uint16_t>(a), static_cast<uint16_t>(a >> 16)};
    const uint16_t b_halves[2] = {static_cast<uint16_t>(b), static_cast<uint16_t>(b >> 16)};
    uint32_t larger = 0, smaller = 0;
    for (int half = 0; half < 2; ++half) {
      const bool is_a = a_halves[half] > b_halves[half];
      larger |= uint32_t{is_a ? a_halves[half] : b_halves[half]} << (16 * half);
      smaller |= uint32_t{is_a ? b_halves[half] : a_halves[half]} << (16 * half);
    }
    EXPECT_EQ(__vmaxu2(a, b), larger);
    EXPECT_EQ(__vminu2(a, b), smaller);
    EXPECT_EQ(max(a, b), a > b ? a : b);
    EXPECT_EQ(min(a, b), a > b ? b : a);
    EXPECT_EQ(
        max(static_cast<int>(a), static_cast<int>(b)),
        static_cast<int>(a) > static_cast<int>(b) ? static_cast<int>(a) : static_cast<int>(b));
    EXPECT_EQ(
        min(static_cast<int>(a), static_cast<int>(b)),
        static_cast<int>(a) > static_cast<int>(b) ? static_cast<int>(b) : static_cast<int>(a));
  }
}

// "Maximum ulp error 2" for divisors of 2^-126 to 2^126. Every error that is allowed is made.
TEST_F(Intrinsics, DivideNearly) {
  std::set<int> errors;
  for (int i = 0; i < kTries; ++i) {
    const float a = static_cast<float>(1 + operand() % 100000);
    const float b = static_cast<float>(1 + operand() % 1000);
    const float found = __fdividef(a, b);
    const float exact = static_cast<float>(double{a} / double{b});
    const int ulps = static_cast<int>(__builtin_bit_cast(uint32_t, found)) -
                     static_cast<int>(__builtin_bit_cast(uint32_t, exact));
    EXPECT_LE(std::abs(ulps), 2) << a << " / " << b;
    errors.insert(ulps);
  }
  EXPECT_TRUE(errors.count(-2) == 1 && errors.count(0) == 1 && errors.count(2) == 1);
}

TEST_F(Intrinsics, LoadAroundTheFirstCache) {
  const uint64_t word = operand64();
  EXPECT_EQ(__ldcg(&word), word);
}

// --- of a warp -----------------------------------------------------------------------------------

using Body = std::function<uint64_t(uint32_t lane)>;
using Lanes = std::array<uint64_t, 32>;

struct WarpJob {
  const Body* body;
  uint64_t* results;
};

__global__ void run_body(WarpJob job) { job.results[threadIdx.x] = (*job.body)(threadIdx.x); }

Lanes on_a_warp(const Body& body) {
  Lanes results{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  const WarpJob job{&body, results.data()};
  EXPECT_EQ(cudaLaunchKernelEx(&config, run_body, job), cudaSuccess);
  return results;
}

// Calls `body` in the lanes of the mask, where a collective of these is; others return 0.
Lanes on_lanes(uint32_t mask, const Body& body) {
  return on_a_warp([&](uint32_t lane) { return mask >> lane & 1 ? body(lane) : 0; });
}

TEST_F(Intrinsics, Vote) {
  for (int i = 0; i < 100; ++i) {
    const uint32_t mask = operand() | 1, holds = operand();
    // A predicate is any number but 0.
    const auto predicate = [&](uint32_t lane) {
      return holds >> lane & 1 ? static_cast<int>(0x80000000u >> lane % 32) : 0;
    };
    const Lanes ballots =
        on_lanes(mask, [&](uint32_t lane) { return __ballot_sync(mask, predicate(lane)); });
    const Lanes any = on_lanes(mask, [&](uint32_t lane) {
      return static_cast<uint64_t>(__any_sync(mask, predicate(lane)));
    });
    for (uint32_t lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) {
        EXPECT_EQ(ballots[lane], mask & holds);
        EXPECT_EQ(any[lane] != 0, (mask & holds) != 0);
      }
    }
  }
}

TEST_F(Intrinsics, Shuffle) {
  for (int i = 0; i < 200; ++i) {
    Lanes values;
    for (uint64_t& value : values) {
      value = operand64();
    }
    const uint32_t by = i < 32 ? static_cast<uint32_t>(i) : operand() % 32;
    const auto low = [&](uint32_t lane) { return static_cast<uint32_t>(values[lane]); };
    const Lanes index = on_a_warp([&](uint32_t lane) {  // another source for each lane
      return __shfl_sync(cuda::kAllLanes, low(lane), lane * 7 + by);
    });
    const Lanes up =
        on_a_warp([&](uint32_t lane) { return __shfl_up_sync(cuda::kAllLanes, low(lane), by); });
    const Lanes down =
        on_a_warp([&](uint32_t lane) { return __shfl_down_sync(cuda::kAllLanes, low(lane), by); });
    const Lanes other = on_a_warp(
        [&](uint32_t lane) { return __shfl_xor_sync(cuda::kAllLanes, values[lane], by); });
    // PTX: shfl.sync.up sets its predicate where the source is a lane of the warp.
    const Lanes sum =
        on_a_warp([&](uint32_t lane) { return cuda::add_from_below(low(lane), by, lane); });
    for (uint32_t lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(index[lane], low((lane * 7 + by) % 32));
      EXPECT_EQ(up[lane], lane < by ? low(lane) : low(lane - by));
      EXPECT_EQ(down[lane], lane + by > 31 ? low(lane) : low(lane + by));
      EXPECT_EQ(other[lane], values[lane ^ by]);
      const uint32_t below = lane < by ? 0 : low(lane - by);
      EXPECT_EQ(sum[lane], low(lane) + below);
    }
  }
}

TEST_F(Intrinsics, Reduce) {
  for (int i = 0; i < 100; ++i) {
    Lanes values;
    for (uint64_t& value : values) {
      value = operand();
    }
    const uint32_t mask = operand() | 1;
    uint32_t sum = 0, smallest = 0xffffffff, largest = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) {
        const auto value = static_cast<uint32_t>(values[lane]);
        sum += value;
        smallest = value < smallest ? value : smallest;
        largest = value > largest ? value : largest;
      }
    }
    const auto low = [&](uint32_t lane) { return static_cast<uint32_t>(values[lane]); };
    const Lanes sums =
        on_lanes(mask, [&](uint32_t lane) { return __reduce_add_sync(mask, low(lane)); });
    const Lanes minima =
        on_lanes(mask, [&](uint32_t lane) { return __reduce_min_sync(mask, low(lane)); });
    const Lanes maxima =
        on_lanes(mask, [&](uint32_t lane) { return __reduce_max_sync(mask, low(lane)); });
    for (uint32_t lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) {
        EXPECT_EQ(sums[lane], sum);
        EXPECT_EQ(minima[lane], smallest);
        EXPECT_EQ(maxima[lane], largest);
      }
    }
  }
}

// Lanes' operations on one word have an order: each returns what those before it have left.
template <class Word>
void expect_an_order(Word first, const std::array<Word, 32>& values, const Lanes& returned,
                     Word last, const std::function<Word(Word, Word)>& change) {
  std::set<uint32_t> left;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    left.insert(lane);
  }
  Word now = first;
  while (!left.empty()) {
    // Of those that saw this word, whoever leaves it as it is comes before whoever changes it.
    auto next = left.end();
    for (auto it = left.begin(); it != left.end(); ++it) {
      if (returned[*it] == now && (next == left.end() || change(now, values[*it]) == now)) {
        next = it;
      }
    }
    ASSERT_TRUE(next != left.end()) << "no lane returned " << now;
    now = change(now, values[*next]);
    left.erase(next);
  }
  EXPECT_EQ(now, last);
}

TEST_F(Intrinsics, Atomics) {
  using Wide = unsigned long long;
  for (int i = 0; i < 50; ++i) {
    std::array<uint32_t, 32> words{};
    std::array<Wide, 32> wide{}, any{};
    for (uint32_t lane = 0; lane < 32; ++lane) {
      words[lane] = 1u << lane;
      wide[lane] = Wide{1} << (lane + 20);
      any[lane] = operand64();
    }
    const uint32_t first = operand();
    const Wide first_wide = operand64();
    uint32_t sum = first, bits = first & 0xffff;
    Wide wide_sum = first_wide, least = ~Wide{0} >> (i % 8);
    const Wide first_least = least;
    const uint32_t first_bits = bits;
    const emulator::Registered known[] = {{&sum, sizeof(sum), "a sum"},
                                          {&bits, sizeof(bits), "bits"},
                                          {&wide_sum, sizeof(wide_sum), "a wide sum"},
                                          {&least, sizeof(least), "the least"}};
    const Lanes sums = on_a_warp([&](uint32_t lane) { return atomicAdd(&sum, words[lane]); });
    const Lanes ors = on_a_warp([&](uint32_t lane) { return atomicOr(&bits, words[lane]); });
    const Lanes wides = on_a_warp([&](uint32_t lane) { return atomicAdd(&wide_sum, wide[lane]); });
    const Lanes minima = on_a_warp([&](uint32_t lane) { return atomicMin(&least, any[lane]); });
    expect_an_order<uint32_t>(first, words, sums, sum,
                              [](uint32_t a, uint32_t b) { return a + b; });
    expect_an_order<uint32_t>(first_bits, words, ors, bits,
                              [](uint32_t a, uint32_t b) { return a | b; });
    expect_an_order<Wide>(first_wide, wide, wides, wide_sum, [](Wide a, Wide b) { return a + b; });
    expect_an_order<Wide>(first_least, any, minima, least,
                          [](Wide a, Wide b) { return b < a ? b : a; });
    EXPECT_EQ(least, std::min(first_least, *std::min_element(any.begin(), any.end())));
  }
}

// prefetch.global.L2 changes nothing; of memory that is nobody's it would be an error here.
TEST_F(Intrinsics, FetchAhead) {
  uint8_t byte = 42;
  cuda::fetch_ahead(&byte);
  EXPECT_EQ(byte, 42);
}

}  // namespace
}  // namespace memswap::test
