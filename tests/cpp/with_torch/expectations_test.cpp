// Expectations: what the last frame of a tensor says about its next one, without a tensor.
#include "engine/expectations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "codec/dtypes.h"

namespace memswap {
namespace {

using c10::ScalarType;
using frame::Layout;

constexpr int64_t kMebibyte = 1 << 20;
constexpr int64_t kElements = kMebibyte / 2;  // of two bytes
constexpr uint64_t kBlocks = 512;
const int64_t kRetryAfter = ExpectationLimits{}.retry_after;

TensorKey tensor(int64_t ordinal = 0, int64_t nbytes = kMebibyte,
                 ScalarType dtype = ScalarType::BFloat16, std::string unit = "layer") {
  return {std::move(unit), ordinal, nbytes, dtype};
}

const TensorKey kFloats = tensor(0, kMebibyte, ScalarType::Float);

// What an encoder might have found, all blocks in mode LQ2; a test says what was otherwise.
FrameFacts facts(double ratio) {
  FrameFacts found;
  found.frame_nbytes = static_cast<int64_t>(ratio * kMebibyte);
  found.elements = kElements;
  found.blocks = found.lq2_blocks = kBlocks;
  found.center_sum = kBlocks * 130;
  found.layout = static_cast<uint8_t>(Layout::kDense);
  return found;
}

FrameFacts facts(double ratio, uint64_t var_used, uint64_t zeros = 0) {
  FrameFacts found = facts(ratio);
  found.var_used = var_used;
  found.zeros = zeros;
  return found;
}

FrameFacts facts_of_floats(double ratio, uint64_t var_used = 0) {
  FrameFacts found = facts(ratio, var_used);
  found.elements = kElements / 2;
  return found;
}

FrameFacts facts_of_flat(double ratio) {
  FrameFacts found = facts(ratio);
  found.lq2_blocks = 0;
  found.fw2_blocks = kBlocks;
  return found;
}

frame::Sections sections_of(ScalarType dtype, Layout layout, uint64_t elements) {
  return checked_sections(static_cast<int64_t>(frame_dtype(dtype)), static_cast<int64_t>(layout),
                          elements);
}

Layout layout_of(const Expectation& expected) {
  return static_cast<Layout>(*expected.options.layout);
}
int64_t capacity_of(const Expectation& expected) {
  return static_cast<int64_t>(*expected.options.var_capacity);
}
bool canonical(const Expectation& expected) {
  return expected.options.profile == MEMSWAP_CANONICAL;
}

class KnownTensors : public ::testing::Test {
 protected:
  explicit KnownTensors(Expectations::Device device = {}) : known(std::move(device), {}) {}

  // One encode of a tensor, with this result. What was expected of it.
  Expectation learn(const FrameFacts& found, const TensorKey& key = tensor()) {
    Expectation expected = known.of(key);
    known.learn(expected, found);
    return expected;
  }

  // So much is encoded that there are bytes for trials.
  void encode_others(int iterations) {
    for (int number = 0; number < iterations; ++number) {
      for (int64_t ordinal = 100; ordinal < 164; ++ordinal) {
        known.of(tensor(ordinal));
      }
      known.begin_iteration();
    }
  }

  Expectations known;
};

class TensorsInHostMemory : public KnownTensors {
 protected:
  TensorsInHostMemory() : KnownTensors({.worst_case = true}) {}
};

TEST_F(KnownTensors, TheFirstFrameHasTheLayoutOfItsDtypeAndACapacityThatALayoutCanHave) {
  const std::vector<std::pair<ScalarType, Layout>> all = {
      {ScalarType::BFloat16, Layout::kDense},      {ScalarType::Half, Layout::kDense},
      {ScalarType::Float, Layout::kDense},         {ScalarType::Double, Layout::kDense},
      {ScalarType::Float8_e4m3fn, Layout::kDense}, {ScalarType::ComplexFloat, Layout::kDense},
      {ScalarType::Bool, Layout::kBits},           {ScalarType::Byte, Layout::kInts},
      {ScalarType::Long, Layout::kInts},
  };
  for (const auto& [dtype, layout] : all) {
    const Expectation first = known.of(tensor(0, kMebibyte, dtype));
    EXPECT_TRUE(first.pays && !first.trial) << dtype;
    EXPECT_EQ(first.options.dtype, static_cast<uint8_t>(frame_dtype(dtype))) << dtype;
    EXPECT_EQ(layout_of(first), layout) << dtype;
    const uint64_t elements = kMebibyte / frame::width_of(frame_dtype(dtype));
    EXPECT_LE(*first.options.var_capacity, sections_of(dtype, layout, elements).max_var_units())
        << dtype;
  }
}

TEST(Expectations, EveryDtypeOfTorchsHasAWidthAndALayoutThatTheFormatKnows) {
  for (int number = 0; number < static_cast<int>(ScalarType::Undefined); ++number) {
    const auto dtype = static_cast<ScalarType>(number);
    const size_t width = c10::elementSize(dtype) / (c10::isComplexType(dtype) ? 2 : 1);
    EXPECT_EQ(frame::width_of(frame_dtype(dtype)), width) << dtype;
    const frame::Sections first = sections_of(dtype, first_layout(frame_dtype(dtype)), 4096);
    EXPECT_GT(first.bytes(first.max_var_units()), 0u) << dtype;
    const frame::Sections raw = sections_of(dtype, Layout::kRaw, 4096);
    EXPECT_EQ(raw.max_var_units(), 0u) << dtype;
    EXPECT_NEAR(static_cast<double>(raw.var), 4096.0 * static_cast<double>(width), 1024) << dtype;
  }
}

TEST_F(KnownTensors, TheFirstDenseFrameGetsOneAndAHalfBitsPerElement) {
  const double units = kElements * 1.5 * 1.1 / 64;
  EXPECT_NEAR(static_cast<double>(capacity_of(known.of(tensor()))), units, 0.01 * units);
}

TEST_F(KnownTensors, TheFirstMaskGetsWhatABitmapTakesAndTheNextWhatWasNeeded) {
  const TensorKey mask = tensor(0, kMebibyte, ScalarType::Bool);
  FrameFacts found = facts(0.04, kMebibyte / 1024 * 4);  // every block all zeros
  found.elements = kMebibyte;
  const int64_t first = capacity_of(learn(found, mask));
  const double units = kMebibyte * 1.1 / 64;
  EXPECT_NEAR(static_cast<double>(first), units, 0.01 * units);
  EXPECT_LT(first * 7, sections_of(mask.dtype, Layout::kBits, kMebibyte).max_var_units());
  EXPECT_LT(capacity_of(known.of(mask)) * 3, first);
}

TEST_F(KnownTensors, ACapacityFollowsTheLastFrameWithAMarginAndSizesAreKnownFromThenOn) {
  EXPECT_FALSE(known.sizes(tensor()));
  FrameFacts found = facts(0.67, 5000);
  found.overflow_used = 1000;
  learn(found);
  EXPECT_NEAR(static_cast<double>(capacity_of(known.of(tensor()))), 6000 * 1.10, 20);
  learn(facts(0.66, 3000));
  EXPECT_NEAR(static_cast<double>(capacity_of(known.of(tensor()))), 3000 * 1.10, 20);
  ASSERT_TRUE(known.sizes(tensor()));
  EXPECT_EQ(known.sizes(tensor())->used, static_cast<int64_t>(0.66 * kMebibyte));
  EXPECT_TRUE(known.sizes(tensor(0, 2 * kMebibyte))) << "of another size in the same place";
}

TEST_F(KnownTensors, ACapacityIsNeverMoreThanTheWorstCase) {
  const uint64_t worst =
      sections_of(ScalarType::BFloat16, Layout::kDense, kElements).max_var_units();
  learn(facts(0.9, worst));
  EXPECT_EQ(capacity_of(known.of(tensor())), static_cast<int64_t>(worst));
}

TEST_F(KnownTensors, TensorsAreToldApartByUnitPlaceSizeAndDtype) {
  learn(facts(0.67, 100));
  const int64_t same = capacity_of(known.of(tensor()));
  EXPECT_NE(capacity_of(known.of(tensor(0, kMebibyte, ScalarType::BFloat16, "other"))), same);
  EXPECT_NE(capacity_of(known.of(tensor(1))), same);
  EXPECT_NE(capacity_of(known.of(tensor(0, kMebibyte, ScalarType::Half))), same);
  EXPECT_EQ(capacity_of(known.of(tensor())), same);
}

TEST_F(KnownTensors, TheSameTensorInAnotherSizeStartsFromWhatIsKnownPerElement) {
  learn(facts(0.67, 4000));
  EXPECT_NEAR(static_cast<double>(capacity_of(known.of(tensor(0, 2 * kMebibyte)))), 8000 * 1.10,
              40);
  learn(facts(0.99));
  EXPECT_TRUE(known.of(tensor(0, 4 * kMebibyte)).pays) << "the last size that was seen did shrink";
  Expectations never{{}, {}};
  never.learn(never.of(tensor()), facts(0.99));
  EXPECT_FALSE(never.of(tensor(0, 4 * kMebibyte)).pays) << "no size of it has ever shrunk";
}

TEST_F(KnownTensors, WhatDoesNotShrinkIsLeftAloneAndLookedAtAgain) {
  learn(facts(0.96));
  std::vector<Expectation> answers;
  for (int64_t number = 0; number < 3 * kRetryAfter; ++number) {
    answers.push_back(known.of(tensor()));
  }
  const auto pays = [](const Expectation& one) { return one.pays; };
  EXPECT_TRUE(std::none_of(answers.begin(), answers.begin() + kRetryAfter - 1, pays));
  EXPECT_EQ(std::count_if(answers.begin(), answers.end(), pays), 3) << "looks in so many steps";
  known.learn(*std::find_if(answers.begin(), answers.end(), pays), facts(0.5));
  for (int64_t number = 0; number < 2 * kRetryAfter; ++number) {
    EXPECT_TRUE(known.of(tensor()).pays) << "it shrinks now";
  }
}

TEST_F(KnownTensors, WhatCannotShrinkIsNeverTried) {
  for (int64_t number = 0; number < 3 * kRetryAfter; ++number) {
    EXPECT_FALSE(known.of(tensor(0, 512)).pays) << "a block holds more than 256 elements take";
    EXPECT_FALSE(known.of(tensor(0, kMebibyte + 1)).pays) << "bytes that are no elements";
  }
  EXPECT_TRUE(known.of(tensor()).pays) << "a longer tensor in the same place is another matter";
}

TEST_F(KnownTensors, ZerosTurnADenseFrameSparseAndBack) {
  learn(facts(0.67, 0, kElements / 10));
  EXPECT_EQ(layout_of(known.of(tensor())), Layout::kDense);
  learn(facts(0.8, 9000, kElements / 2));
  const Expectation sparse = known.of(tensor());
  EXPECT_EQ(layout_of(sparse), Layout::kSparse);
  const double units = kElements * (1 + 0.5 * 11.5) * 1.1 / 64;  // the bitmap, and the survivors
  EXPECT_NEAR(static_cast<double>(capacity_of(sparse)), units, 0.01 * units);
  known.learn(sparse, facts(0.4, 40'000, kElements / 2));
  EXPECT_EQ(layout_of(known.of(tensor())), Layout::kSparse);
  EXPECT_NEAR(static_cast<double>(capacity_of(known.of(tensor()))), 44'000, 20);
  learn(facts(0.7, 70'000));
  EXPECT_EQ(layout_of(known.of(tensor())), Layout::kDense);
}

TEST_F(KnownTensors, ZerosAreTriedEvenWhereTheDenseFrameDidNotShrink) {
  learn(facts(1.0, 0, kElements / 2));
  const Expectation next = known.of(tensor());
  EXPECT_TRUE(next.pays);
  EXPECT_EQ(layout_of(next), Layout::kSparse);
}

TEST_F(KnownTensors, FloatsThatWereBfloat16AreFoundByATrialThatCostsLittle) {
  for (int number = 0; number < 3; ++number) {
    EXPECT_EQ(layout_of(learn(facts_of_floats(0.83), kFloats)), Layout::kDense)
        << "no trial before there are bytes for it";
  }
  encode_others(1);
  const Expectation trial = known.of(kFloats);
  EXPECT_TRUE(trial.trial);
  EXPECT_EQ(layout_of(trial), Layout::kUpcast);
  const Expectation again = known.settled(trial);
  EXPECT_FALSE(again.trial);
  EXPECT_EQ(layout_of(again), Layout::kDense);
  known.learn(trial, facts_of_floats(0.34));
  const Expectation next = known.of(kFloats);
  EXPECT_FALSE(next.trial);
  EXPECT_EQ(layout_of(next), Layout::kUpcast);
}

TEST_F(KnownTensors, ATrialThatFailedChangesNothingAndIsNotRepeatedAtOnce) {
  learn(facts_of_floats(0.83, 900), kFloats);
  encode_others(4);
  EXPECT_TRUE(learn(facts_of_floats(1.0, 100'000), kFloats).trial);
  for (int64_t number = 0; number < kRetryAfter - 2; ++number) {
    const Expectation following = known.of(kFloats);
    EXPECT_EQ(layout_of(following), Layout::kDense);
    EXPECT_NEAR(static_cast<double>(capacity_of(following)), 1006.5, 0.5);
  }
}

TEST_F(KnownTensors, TrialsOfOneIterationAreASmallShareOfItsBytes) {
  const auto floats = [](int64_t ordinal) { return tensor(ordinal, kMebibyte, ScalarType::Float); };
  for (int64_t ordinal = 0; ordinal < 64; ++ordinal) {
    learn(facts_of_floats(0.83), floats(ordinal));
  }
  int all = 0;
  for (int iteration = 0; iteration < 40; ++iteration) {
    known.begin_iteration();
    int trials = 0;
    for (int64_t ordinal = 0; ordinal < 64; ++ordinal) {
      trials += known.of(floats(ordinal)).trial ? 1 : 0;
    }
    EXPECT_LE(trials, 2) << "64 MiB allow 2 MiB of trials";
    all += trials;
  }
  EXPECT_GT(all, 0);
}

TEST_F(KnownTensors, AConstantOfFloatsIsTriedAsIntegers) {
  learn(facts_of_flat(0.63));
  encode_others(1);
  const Expectation trial = known.of(tensor());
  EXPECT_TRUE(trial.trial);
  EXPECT_EQ(layout_of(trial), Layout::kInts);
  known.learn(trial, facts(0.005));
  EXPECT_EQ(layout_of(known.of(tensor())), Layout::kInts);
}

TEST_F(KnownTensors, OneCentreIsUsedOnAnAcceleratorWhileItServes) {
  learn(facts(0.67, 5000));
  for (const double ratio : {0.672, 0.70}) {
    const Expectation fast = learn(facts(ratio, 5100));
    EXPECT_EQ(fast.options.profile, MEMSWAP_FAST);
    EXPECT_EQ(fast.options.center, 130);
  }
  EXPECT_TRUE(canonical(known.of(tensor()))) << "the distribution moved away from the centre";
}

TEST_F(KnownTensors, ACentreIsLookedAtAgain) {
  learn(facts(0.67));
  int64_t looks = 0;
  for (int64_t number = 0; number < 2 * kRetryAfter; ++number) {
    looks += canonical(known.of(tensor())) ? 1 : 0;
  }
  EXPECT_EQ(looks, 2);
}

TEST_F(KnownTensors, OneCentreIsNotUsedWhereBlocksAreUnlike) {
  FrameFacts few = facts(0.67);
  few.lq2_blocks = 100;
  learn(few);
  EXPECT_TRUE(canonical(known.of(tensor())));
  learn(facts_of_flat(0.67), tensor(1));
  EXPECT_TRUE(canonical(known.of(tensor(1))));
}

TEST_F(TensorsInHostMemory, EveryFrameGetsItsWorstCaseAndTheCanonicalProfile) {
  EXPECT_FALSE(known.of(tensor()).options.var_capacity);
  learn(facts(0.67, 5000));
  EXPECT_FALSE(known.of(tensor()).options.var_capacity);
  EXPECT_TRUE(canonical(known.of(tensor())));
}

TEST_F(TensorsInHostMemory, ASampleChoosesTheFirstLayoutAndThoseAfterAChange) {
  const auto of_layout = [](double ratio, Layout layout) {
    FrameFacts found = facts(ratio);
    found.layout = static_cast<uint8_t>(layout);
    return found;
  };
  const Expectation first = learn(of_layout(0.33, Layout::kSparse));
  EXPECT_TRUE(first.pays && !first.options.layout);
  EXPECT_EQ(layout_of(learn(of_layout(0.34, Layout::kSparse))), Layout::kSparse);
  EXPECT_EQ(layout_of(learn(of_layout(0.60, Layout::kSparse))), Layout::kSparse)
      << "a little longer";
  EXPECT_FALSE(learn(of_layout(0.50, Layout::kDense)).options.layout) << "it is another tensor now";
  EXPECT_EQ(layout_of(known.of(tensor())), Layout::kDense);
}

TEST_F(TensorsInHostMemory, ASampleChoosesTheLayoutAnewNowAndThen) {
  std::vector<int64_t> sampled;
  for (int64_t number = 1; number <= 2 * kRetryAfter; ++number) {
    if (!learn(facts(0.5)).options.layout) {
      sampled.push_back(number);
    }
  }
  EXPECT_EQ(sampled, (std::vector<int64_t>{1, kRetryAfter, 2 * kRetryAfter}));
}

TEST_F(KnownTensors, ReportsThatSayNothingAreIgnored) {
  FrameFacts empty = facts(0), faulty = facts(1);
  empty.elements = 0;
  faulty.status = 1;
  const Expectation before = known.of(tensor());
  known.learn(before, empty);
  known.learn(before, faulty);
  EXPECT_EQ(known.of(tensor()), before);
}

TEST(Expectations, WhatIsAtFaultIsAskedOnceAndSaysWhy) {
  int asked = 0;
  std::string fault = "it gave other bits";
  Expectations known({.fault = [&](uint8_t, uint8_t) { return ++asked, fault; }}, {});
  EXPECT_EQ(known.of(tensor()).fault, fault);
  EXPECT_FALSE(known.of(tensor()).pays);
  EXPECT_EQ(asked, 2) << "it may have had no memory for the check";
  fault.clear();
  EXPECT_TRUE(known.of(tensor()).pays);
  EXPECT_TRUE(known.of(tensor()).pays);
  EXPECT_EQ(asked, 3) << "what is trusted is not asked about again";
}

TEST(Expectations, MemoryIsBoundedAndTheOldestGoFirst) {
  Expectations known({}, {.most_keys = 10});
  known.learn(known.of(tensor()), facts(0.67, 100));
  for (int64_t step = 0; step < 1000; ++step) {  // a mixture of experts: other sizes in every step
    for (int64_t ordinal = 1; ordinal < 5; ++ordinal) {
      known.of(tensor(ordinal, kMebibyte + 2048 * step));
    }
    known.of(tensor());
  }
  EXPECT_LE(known.size(), 10u);
  EXPECT_NEAR(static_cast<double>(capacity_of(known.of(tensor()))), 126.5, 0.5)
      << "what is used in every step was forgotten";
  const Expectation forgotten = known.of(tensor(1));
  known.learn(forgotten, facts(0.5));
  for (int64_t ordinal = 20; ordinal < 40; ++ordinal) {
    known.of(tensor(ordinal));
  }
  EXPECT_FALSE(known.sizes(tensor(1)));
  known.learn(forgotten, facts(0.5));
  EXPECT_TRUE(known.settled(forgotten).pays);
  EXPECT_LE(known.size(), 10u);
}

TEST(Expectations, WorthIsTheBound) {
  Expectations known({}, {.worth = std::numeric_limits<double>::infinity()});
  EXPECT_TRUE(known.of(tensor(0, 512)).pays);
  known.learn(known.of(tensor()), facts(5.0));
  EXPECT_TRUE(known.of(tensor()).pays);
}

TEST_F(KnownTensors, AFrameNeverGetsMoreThanAPlanHasForIt) {
  learn(facts(0.7, 40'000));
  const int64_t held = known.sizes(tensor())->held;
  const auto fixed =
      static_cast<int64_t>(sections_of(ScalarType::BFloat16, Layout::kDense, kElements).var);
  for (const int64_t most : {held + 1000, held, held - 80'000}) {
    const Expectation found = known.of(tensor(), most);
    EXPECT_TRUE(found.pays);
    EXPECT_LE(fixed + 8 * capacity_of(found), std::min(most, held));
  }
  EXPECT_FALSE(known.of(tensor(), 1000).pays);
}

TEST(Expectations, WhatIsSetAsideIsTheWorstCaseBeyondTheCapacity) {
  Expectations known({.spare_tiles = 1}, {});
  known.learn(known.of(tensor()), facts(0.7, 40'000));
  const FrameSizes sizes = *known.sizes(tensor());
  const frame::Sections sections = sections_of(ScalarType::BFloat16, Layout::kDense, kElements);
  const uint64_t most = sections.max_var_units();
  const uint64_t tile = 8 * (most / sections.blocks);
  EXPECT_EQ(static_cast<uint64_t>(sizes.held + sizes.overflow), sections.bytes(most + tile));
}

TEST(Expectations, APlannerReadsSizesWhileTensorsLeave) {
  Expectations known({}, {.most_keys = 8});
  std::atomic<bool> ended{false};
  std::thread planner([&] {
    while (!ended) {
      for (int64_t ordinal = 0; ordinal < 16; ++ordinal) {
        if (const auto sizes = known.sizes(tensor(ordinal))) {
          EXPECT_GT(sizes->used, 0);
        }
      }
    }
  });
  for (int times = 0; times < 200; ++times) {
    for (int64_t ordinal = 0; ordinal < 16; ++ordinal) {
      known.learn(known.of(tensor(ordinal)), facts(0.67, 5000 + ordinal));
    }
    known.begin_iteration();
  }
  ended = true;
  planner.join();
}

}  // namespace
}  // namespace memswap
