// Where a tile's payloads are, once its record has been checked.
#pragma once

#include <stdint.h>
#include <string.h>

#include "memswap/frame.h"

namespace memswap::cpu {

// var or the overflow arena.
struct PayloadArea {
  const uint8_t* begin;
  uint64_t units;               // payloads end at or before begin + units
  const uint8_t* readable_end;  // of the buffer around it
};

struct PayloadAreas {
  PayloadArea var;
  PayloadArea overflow;
};

// Needs a header that frame::validate accepted.
inline PayloadAreas payload_areas(const frame::Header& header, const frame::Sections& sections,
                                  const void* frame, uint64_t frame_bytes, const void* overflow,
                                  uint64_t overflow_units) {
  const auto* frame_begin = static_cast<const uint8_t*>(frame);
  const auto* arena = static_cast<const uint8_t*>(overflow);
  return {{frame_begin + sections.var, header.var_capacity, frame_begin + frame_bytes},
          {arena, overflow_units, arena + overflow_units * frame::kUnitBytes}};
}

inline frame::Record record_at(const void* frame, const frame::Sections& sections, uint32_t tile) {
  frame::Record record;
  memcpy(&record,
         static_cast<const uint8_t*>(frame) + sections.records + uint64_t{tile} * sizeof(record),
         sizeof(record));
  return record;
}

inline uint32_t blocks_of_tile(const frame::Sections& sections, uint32_t tile) {
  const uint32_t rest = sections.blocks - tile * frame::kTileBlocks;
  return rest < frame::kTileBlocks ? rest : frame::kTileBlocks;
}

inline uint32_t payload_units(const frame::Record& record) {
  uint32_t units = 0;
  for (const uint16_t block : record.block) {
    units += frame::Record::units(block);
  }
  return units;
}

// The area that holds the tile's payloads; NULL if its record is impossible.
inline const PayloadArea* find_payloads(const frame::Record& record,
                                        const frame::Sections& sections, frame::Dtype dtype,
                                        frame::Layout layout, uint32_t tile,
                                        const PayloadAreas& areas) {
  const uint32_t blocks = blocks_of_tile(sections, tile);
  for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
    const uint16_t block = record.block[i];
    const bool possible = i < blocks ? frame::block_fits(dtype, layout, block) : block == 0;
    if (!possible) {
      return nullptr;
    }
  }
  const bool in_overflow = (record.base & frame::kBaseInOverflow) != 0;
  const PayloadArea& area = in_overflow ? areas.overflow : areas.var;
  const uint64_t end = uint64_t{record.base & ~frame::kBaseInOverflow} + payload_units(record);
  return end <= area.units ? &area : nullptr;
}

}  // namespace memswap::cpu
