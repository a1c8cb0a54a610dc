// Bit-exact for every dtype, layout, profile and size, and the same bytes from every instruction
// set.
#include <algorithm>
#include <set>

#include "../cpu/streaming.h"
#include "support.h"

namespace memswap::test {
namespace {

class RoundTrip : public CpuCodecTest {
 protected:
  // Also sees that the frame is the oracle's.
  void check(const Tensor& tensor, const EncodeOptions& options) {
    const Frame frame = encode(codec(), tensor, options);
    ASSERT_EQ(frame.header().status, frame::kOk) << "the worst case of var did not hold";
    expect_round_trip(codec(), frame, tensor);
    const Frame oracle = encode(scalar(), tensor, options);
    ASSERT_TRUE(frame.bytes == oracle.bytes) << "not the bytes of the scalar encoder";
    ASSERT_TRUE(frame.overflow == oracle.overflow) << "not the scalar encoder's payloads";
    expect_round_trip(scalar(), frame, tensor);
    expect_round_trip(codec(), frame, tensor, true);
  }

  // The profiles of a layout, with centres that fit and that do not.
  template <typename Check>
  void for_each_profile(Layout layout, Check check) {
    EncodeOptions options;
    options.layout = layout;
    check(options);
    if (has_profiles(layout)) {
      options.fast = true;
      for (const int center : {0, 1, 8, 17, 127, 129, 255}) {
        options.center = static_cast<uint8_t>(center);
        check(options);
      }
    }
  }
};

TEST_P(RoundTrip, EveryPatternOfBitsComesBack) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      for (const Pattern pattern : kPatterns) {
        for (const uint64_t elements : {1, 1025}) {
          SCOPED_TRACE(describe(dtype, layout) + " " + describe(pattern) + " elements " +
                       std::to_string(elements));
          const Tensor tensor(pattern, dtype, elements + 7, elements);
          for_each_profile(layout, [&](const EncodeOptions& options) { check(tensor, options); });
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST_P(RoundTrip, EveryNumberOfElementsComesBack) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      for (const uint64_t elements :
           {0, 1, 2, 7, 63, 64, 65, 1023, 1024, 1025, 2047, 8191, 8192, 8193, 17000, 50001}) {
        SCOPED_TRACE(describe(dtype, layout) + " elements " + std::to_string(elements));
        const Tensor tensor({Kind::kMixed, 0}, dtype, elements, elements);
        EncodeOptions options;
        options.layout = layout;
        options.checksum = elements % 2 != 0;
        check(tensor, options);
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

TEST_P(RoundTrip, EveryLengthOfTheLastBlockComesBack) {
  for (const Dtype dtype :
       {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32, Dtype::kBool, Dtype::kInt64}) {
    for (const Layout layout : layouts_of(dtype)) {
      for (uint64_t elements = 1; elements <= 1024; elements += elements < 70 ? 1 : 53) {
        SCOPED_TRACE(describe(dtype, layout) + " elements " + std::to_string(elements));
        check(Tensor({Kind::kSparse, 8}, dtype, elements, elements), {.layout = layout});
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

// What is larger than the caches takes other stores, and what is aligned to lines as well (block.h,
// `streaming`).
TEST_P(RoundTrip, TensorsLargerThanTheCachesComeBack) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp32, Dtype::kUint8}) {
    const uint64_t elements =
        (cpu::streaming_bytes() + (uint64_t{1} << 20)) / frame::width_of(dtype) + 333;
    const Tensor tensor({Kind::kMixed, 0}, dtype, 3, elements);
    for (const Layout layout : layouts_of(dtype)) {
      SCOPED_TRACE(describe(dtype, layout));
      check(tensor, {.layout = layout, .checksum = false});
      // Some of the payloads beyond var, which ends amid tiles that are copied together.
      const uint64_t longest = frame::sections_of(dtype, layout, elements).max_var_units();
      check(tensor, {.layout = layout,
                     .checksum = false,
                     .var_capacity = longest / 8,
                     .overflow_capacity = longest});
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST_P(RoundTrip, EveryModeOfEveryLayoutWasReached) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      SCOPED_TRACE(describe(dtype, layout));
      std::set<uint32_t> reached;
      for (uint64_t seed = 0; seed < 2; ++seed) {
        const Tensor tensor({Kind::kMixed, 0}, dtype, seed, 1024 * kPatternCount);
        const Header header = encode(codec(), tensor, {.layout = layout}).header();
        for (uint32_t mode = 1; mode <= frame::kModeCounts; ++mode) {
          if (header.mode_count[mode - 1] != 0) {
            reached.insert(mode);
          }
        }
      }
      for (uint32_t mode = 1; mode <= frame::kModeCounts; ++mode) {
        EXPECT_EQ(reached.count(mode), frame::mode_fits(dtype, layout, mode) ? 1u : 0u)
            << "mode " << mode << " is not tested, or does not belong to the layout";
      }
    }
  }
}

MEMSWAP_FOR_EACH_INSTRUCTION_SET(RoundTrip);

}  // namespace
}  // namespace memswap::test
