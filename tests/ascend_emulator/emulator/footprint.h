// The bytes that an operation touches: a list of 32-byte blocks, each with a mask of its bytes.
#pragma once

#include <cstdint>
#include <vector>

namespace ascend_emulator {

inline constexpr uint64_t kBlockBytes = 32;  // of UB; addresses and strides count it

struct Touch {
  uint64_t block;  // address / 32
  uint32_t bytes;  // bit i: byte i of the block
};

struct Footprint {
  std::vector<Touch> touches;

  void add_range(uint64_t begin, uint64_t end) {
    for (uint64_t block = begin / kBlockBytes; block * kBlockBytes < end; ++block) {
      const uint64_t first = block * kBlockBytes;
      const uint64_t low = begin > first ? begin - first : 0;
      const uint64_t high = end - first < kBlockBytes ? end - first : kBlockBytes;
      const uint32_t upto = high == kBlockBytes ? ~0u : (1u << high) - 1;
      touches.push_back({block, upto & ~((1u << low) - 1)});
    }
  }
};

// How stores combine with what is there. Those of one kind commute.
enum class Atomic : uint8_t { kNone, kAdd, kMax };

enum class Space : uint8_t { kUnified, kGlobal };

struct Access {
  Space space;
  bool write;
  Footprint footprint;
  Atomic atomic = Atomic::kNone;
};

inline Access access_range(Space space, bool write, uint64_t begin, uint64_t end) {
  Access access{space, write, {}};
  access.footprint.add_range(begin, end);
  return access;
}

}  // namespace ascend_emulator
