// One block of 1024 elements: what an instruction set implements (scalar.cpp is the oracle, every
// other table writes the same bytes). Tiles, positions, headers and threads are above this line, in
// encode.cpp and decode.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ahead.h"
#include "memswap/frame.h"

namespace memswap::cpu {

// Readable behind what a decoder is given as payload: whole vectors may be moved there.
inline constexpr uint32_t kSlackBytes = 64;

// Writable behind the longest payload that an encoder may produce: 2 bits for each element may have
// been written before it is seen that they are too many.
inline constexpr uint32_t kEncoderSlackBytes = kSlackBytes + frame::kBlockElements / 4;

// Of the widest elements.
inline constexpr uint32_t kMaxBlockBytes = frame::kBlockElements * sizeof(uint64_t);

// What stays the same for all blocks of a job.
struct EncodeParams {
  frame::Dtype dtype;
  frame::Layout layout;
  bool fast;  // profile: for dense and upcast, `center` is the centre; else as canonical
  uint8_t center;
  bool streaming;          // the job is larger than the caches: slabs may be written around them
  bool asks_near = false;  // elements in a row are asked for kNearBytes ahead
  bool touches_pages = false;  // streaming, and touch_pages_ahead() pays
  bool asks_pages = false;     // the job is larger than the caches, and ask_pages() pays

  // How far ahead of a block its elements are asked for in a row, where others want `far` bytes.
  uint32_t ahead(uint32_t far) const { return asks_near ? kNearBytes : far; }
};

// What the record and the header's counters take from one block.
struct EncodedBlock {
  uint32_t mode;
  uint32_t units;   // of payload
  uint32_t zeros;   // Header::zeros, of the `count` elements
  uint8_t center;   // Record::center
  uint8_t center2;  // Header::center_sum: c2; fast: the given centre; 0 in literal blocks and in
                    // layouts without centres
  bool packed = false;  // the payload begins with a packed bitmap
};

// Encodes the blocks of a tile, or the first few of them: all at once, because what is done to one
// block waits for itself, and other blocks can fill the time.
//   elements  whole blocks of 1024 elements, aligned to their width only; those from `count` on are
//             0
//   count     1..kTileElements: elements that are there (layout ints and the zeros counter ask)
//   slabs     slab_bytes for each block, 128-byte aligned, written completely and not beyond
//   payloads  8-byte aligned, of any content: max_payload_units * 8 bytes for each block and
//             kEncoderSlackBytes. A block's payload begins where that of the block before it ends,
//             is `units` units long and has zero bits up to the unit; what is behind the last is
//             garbage
//   encoded   for each block
using EncodeBlocks = void (*)(const EncodeParams& params, const void* elements, uint32_t count,
                              uint8_t* slabs, uint8_t* payloads, EncodedBlock* encoded);

// While block b of a tile is encoded in steps: asks for a quarter of what follows it, in this tile
// or a later one, by pages or lines. 0 lines ahead: what the processor's own prefetchers do better.
template <uint32_t kBlockBytes, uint32_t kLinesAhead>
inline void ask_ahead(const EncodeParams& params, const uint8_t* elements, uint32_t b,
                      uint32_t quarter) {
  if (b < frame::kTileBlocks) {
    constexpr uint32_t kQuarterBytes = kBlockBytes / 4;
    const uint8_t* from = elements + b * kBlockBytes + kQuarterBytes * quarter;
    if (params.asks_pages) {
      ask_pages(from, kQuarterBytes);
    } else if (kLinesAhead != 0) {
      ask_lines(from, kQuarterBytes, params.ahead(kLinesAhead));
    }
  }
}

// For what knows no more than one block: EncodeBlocks of a function of the same arguments, each of
// them for one block, that returns what it has made.
template <EncodedBlock (*kEncodeBlock)(const EncodeParams& params, const void* elements,
                                       uint32_t count, uint8_t* slab, uint8_t* payload)>
void encode_one_by_one(const EncodeParams& params, const void* elements, uint32_t count,
                       uint8_t* slabs, uint8_t* payloads, EncodedBlock* encoded) {
  const uint32_t block_bytes = frame::kBlockElements * frame::width_of(params.dtype);
  const uint32_t slab_bytes = frame::slab_bytes(params.dtype, params.layout);
  const auto* from = static_cast<const uint8_t*>(elements);
  for (; count != 0; ++encoded) {
    const uint32_t here = count < frame::kBlockElements ? count : frame::kBlockElements;
    if (params.touches_pages) {
      touch_pages_ahead(slabs, slab_bytes);
    }
    if (params.asks_pages) {
      ask_pages(from, block_bytes);
    }
    *encoded = kEncodeBlock(params, from, here, slabs, payloads);
    from += block_bytes;
    slabs += slab_bytes;
    payloads += encoded->units * frame::kUnitBytes;
    count -= here;
  }
}

struct DecodeParams {
  frame::Dtype dtype;
  frame::Layout layout;
  bool streaming;  // `out` is aligned to kLineBytes, and may be written around the caches
  bool touches_pages = false;  // streaming, and touch_pages_ahead() pays
  bool asks_pages = false;     // the job is larger than the caches, and ask_pages() pays
  uint32_t slab_bytes = frame::slab_bytes(dtype, layout);  // of a block
  uint32_t block_bytes = frame::kBlockElements * frame::width_of(dtype);
};

// What a record says of a block.
struct CodedBlock {
  uint32_t mode;
  uint32_t units;
  uint8_t center;
  bool packed;
};

inline CodedBlock coded_block(const frame::Record& record, uint32_t i) {
  const uint16_t block = record.block[i];
  return {frame::Record::mode(block), frame::Record::units(block), record.center[i],
          frame::Record::packed(block)};
}

// Decodes blocks of a tile; false if a payload is not exactly what its symbols say (its output is
// then anything). The caller has checked that each mode fits the layout, that `units` is no more
// than the longest payload, and that `packed` is set only where the payload begins with a bitmap;
// nothing else about the bytes is known, not even that `center` fits.
//   out       1024 elements for each block, aligned to their width only (but see `streaming`),
//             written completely and not beyond
//   slabs     of the blocks, one behind the other: slab_bytes readable, 128-byte aligned
//   payloads  as well: 8-byte aligned; kSlackBytes are readable behind the last
//   record    the tile's, of which these are blocks first .. first + count - 1
using DecodeBlocks = bool (*)(const DecodeParams& params, uint8_t* out, const uint8_t* slabs,
                              const uint8_t* payloads, const frame::Record& record, uint32_t first,
                              uint32_t count);

// For what knows no more than one block: DecodeBlocks of a function for one.
template <bool (*kDecodeBlock)(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                               const uint8_t* payload, const CodedBlock& block)>
bool decode_one_by_one(const DecodeParams& params, uint8_t* out, const uint8_t* slabs,
                       const uint8_t* payloads, const frame::Record& record, uint32_t first,
                       uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    if (params.touches_pages) {
      touch_pages_ahead(out, params.block_bytes);
    }
    const CodedBlock block = coded_block(record, first + i);
    if (params.asks_pages) {
      ask_pages(slabs, params.slab_bytes);
      ask_pages(payloads, block.units * frame::kUnitBytes);
    }
    if (!kDecodeBlock(params, out, slabs, payloads, block)) {
      return false;
    }
    out += params.block_bytes;
    slabs += params.slab_bytes;
    payloads += block.units * frame::kUnitBytes;
  }
  return true;
}

// The upper 16 bits of each element of a block, whose elements are of 4 or 8 bytes (`width`). True
// if all their other bits are 0.
using HighHalves = bool (*)(uint32_t width, const void* elements, uint8_t* high);

// Of the same: whether an element that is neither 0 nor -0 has upper 16 bits like them.
using HidesSurvivors = bool (*)(uint32_t width, const void* elements);

// The sum of section 4 of docs/format.md, over the first `bytes` bytes of a tile; the rest is 0.
// `data` is aligned to the elements' width only.
using Checksum = uint32_t (*)(const void* data, size_t bytes);

// memcpy for what nobody reads soon.
using Copy = void (*)(void* to, const void* from, size_t bytes);

// An instruction set. `encoder` and `decoder` are asked once per job, with a layout that fits the
// dtype, and never return NULL: where a set has nothing better it passes on scalar_blocks()'s.
// `fence` is called by every thread after its last block and copy, so that stores around the caches
// are seen by whoever waits for the thread.
struct BlockCodec {
  const char* name;
  EncodeBlocks (*encoder)(const EncodeParams& params);
  DecodeBlocks (*decoder)(const DecodeParams& params);
  HighHalves high_halves;
  HidesSurvivors hides_survivors;
  Checksum checksum;
  Copy copy_around_caches;
  void (*fence)();
};

const BlockCodec& scalar_blocks();

// One block, by the oracle.
inline EncodedBlock encode_scalar_block(const EncodeParams& params, const void* elements,
                                        uint32_t count, uint8_t* slab, uint8_t* payload) {
  EncodedBlock encoded;
  scalar_blocks().encoder(params)(params, elements, count, slab, payload, &encoded);
  return encoded;
}

// Built where kernels/CMakeLists.txt finds their source and the target has the instructions;
// dispatch.cpp asks the processor before it calls them.
const BlockCodec& vector_blocks();
const BlockCodec& avx512_blocks();

}  // namespace memswap::cpu
