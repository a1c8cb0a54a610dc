// What is to be encoded, and how long its frame gets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "memswap/codec.h"
#include "memswap/frame.h"

namespace memswap {

// How one storage's bytes are to be encoded. Codes as in docs/format.md.
struct FrameOptions {
  bool operator==(const FrameOptions&) const = default;

  uint8_t dtype = 0;
  std::optional<uint8_t> layout = 0;     // nothing: by a sample, with room for the worst case
  std::optional<uint64_t> var_capacity;  // units; nothing: the worst case
  uint8_t profile = MEMSWAP_CANONICAL;
  uint8_t center = 0;
};

// Units that an encode may need beyond a var of `var_capacity` units, whatever the elements are. A
// tile that does not fit goes elsewhere as a whole and leaves up to a tile of var unused: once, or
// as often as the codec says (memswap_codec::spare_tiles).
inline uint64_t most_overflow(const frame::Sections& sections, uint64_t var_capacity,
                              uint32_t spare_tiles) {
  const uint64_t most = sections.max_var_units();
  if (var_capacity >= most) {
    return 0;
  }
  const uint64_t tile = uint64_t{frame::kTileBlocks} * sections.max_payload_units;
  return std::min(most, most - var_capacity + spare_tiles * tile);
}

// A frame whose size is settled.
struct FramePlan {
  frame::Dtype dtype;
  frame::Layout layout;
  frame::Sections sections;
  uint64_t var_capacity;  // units

  size_t frame_bytes() const { return sections.bytes(var_capacity); }

  uint64_t most_overflow(uint32_t spare_tiles) const {
    return memswap::most_overflow(sections, var_capacity, spare_tiles);
  }
};

// The frame of `nbytes` bytes at `bytes`, or nothing and in `refusal`, in words for the user, why
// they cannot be encoded so. Where no layout is given it is a frame of any of them, which all are
// as long at worst.
std::optional<FramePlan> plan_frame(const FrameOptions& options, const void* bytes, size_t nbytes,
                                    std::string& refusal);

// Throws std::invalid_argument for codes that name nothing or do not go together.
frame::Sections checked_sections(int64_t dtype, int64_t layout, uint64_t elements);

// A job with everything of the plan filled in but the buffers.
memswap_encode_job encode_job(const FramePlan& plan, const FrameOptions& options);

// What an encoder found, from the frame's header.
struct FrameReport {
  frame::Header header;

  uint64_t frame_nbytes() const {
    const auto sections =
        frame::sections_of(static_cast<frame::Dtype>(header.dtype),
                           static_cast<frame::Layout>(header.layout), header.elements);
    return sections.bytes(header.var_used) + header.overflow_used * frame::kUnitBytes;
  }
};

// In words for the user: what the status bits of a decode say.
std::string describe_status(uint32_t status);

}  // namespace memswap
