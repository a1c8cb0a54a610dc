#include "memswap/portable.h"

#include <string.h>

#include "payloads.h"

uint32_t memswap_frame_portable(const void* source, uint64_t frame_bytes, const void* overflow,
                                uint64_t overflow_capacity, void* target, uint64_t out_bytes,
                                uint64_t* written) {
  using namespace memswap;
  using namespace memswap::cpu;
  using frame::Dtype, frame::Header, frame::Sections, frame::Record, frame::Layout;
  *written = 0;
  const auto* frame = static_cast<const uint8_t*>(source);
  const uint64_t overflow_units = overflow == nullptr ? 0 : overflow_capacity;
  Header header{};
  Sections sections{};
  memcpy(&header, frame, frame_bytes < sizeof(header) ? frame_bytes : sizeof(header));
  if (!frame::validate(header, frame_bytes, overflow_units, &sections)) {
    return frame::kBadHeader;
  }
  const PayloadAreas areas =
      payload_areas(header, sections, frame, frame_bytes, overflow, overflow_units);
  uint64_t units = 0;
  for (uint32_t tile = 0; tile < sections.tiles; ++tile) {
    const Record record = record_at(frame, sections, tile);
    if (find_payloads(record, sections, static_cast<Dtype>(header.dtype),
                      static_cast<Layout>(header.layout), tile, areas) == nullptr ||
        units > frame::kMaxBaseUnits) {
      return frame::kBadRecord;
    }
    units += payload_units(record);
  }
  *written = sections.bytes(units);
  if (*written > out_bytes) {
    return frame::kNoRoom;
  }

  auto* out = static_cast<uint8_t*>(target);
  header.flags |= frame::kOrdered;
  header.var_capacity = units;
  header.var_used = units;
  header.overflow_used = 0;
  memcpy(out, &header, sizeof(header));
  memcpy(out + sections.slabs, frame + sections.slabs, sections.records - sections.slabs);
  uint64_t position = 0;
  for (uint32_t tile = 0; tile < sections.tiles; ++tile) {
    Record record = record_at(frame, sections, tile);
    const PayloadArea& area =
        (record.base & frame::kBaseInOverflow) != 0 ? areas.overflow : areas.var;
    const uint64_t from = uint64_t{record.base & ~frame::kBaseInOverflow} * frame::kUnitBytes;
    const uint64_t bytes = uint64_t{payload_units(record)} * frame::kUnitBytes;
    if (bytes != 0) {
      memcpy(out + sections.var + position * frame::kUnitBytes, area.begin + from, bytes);
    }
    record.base = static_cast<uint32_t>(position);
    memcpy(out + sections.records + uint64_t{tile} * frame::kRecordBytes, &record, sizeof(record));
    position += bytes / frame::kUnitBytes;
  }
  return frame::kOk;
}
