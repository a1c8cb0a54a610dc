// The memswap frame, version 1: constants, sections, bounds and validation. The specification is
// docs/format.md; every backend and the Python layer take the format from here.
//
// C++17, no library beyond the freestanding headers, callable from device code.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define MEMSWAP_HOST_DEVICE __host__ __device__
#else
#define MEMSWAP_HOST_DEVICE
#endif

namespace memswap::frame {

inline constexpr uint16_t kVersion = 1;
inline constexpr uint32_t kMagic = 0x3146534d;  // 'M' 'S' 'F' '1', little-endian
inline constexpr uint32_t kBlockElements = 1024;
inline constexpr uint32_t kTileBlocks = 8;
inline constexpr uint32_t kTileElements = kBlockElements * kTileBlocks;
inline constexpr uint32_t kHeaderBytes = 128;
inline constexpr uint32_t kRecordBytes = 32;
inline constexpr uint32_t kUnitBytes = 8;         // payload sizes and positions count these
inline constexpr uint32_t kAlignmentBytes = 128;  // of a frame's first byte, in memory
inline constexpr uint32_t kLowPlaneBytes = kBlockElements / 4;  // L0: 2 bits per element
inline constexpr uint32_t kBitmapBytes = kBlockElements / 8;    // 1 bit per element
inline constexpr uint32_t kByteMapBytes = kBitmapBytes / 8;     // Z or F: 1 bit per byte of those
inline constexpr uint32_t kMapsBytes = 2 * kByteMapBytes;       // Z and F
inline constexpr uint64_t kMaxElements = uint64_t{1} << 41;     // so that no size overflows
inline constexpr uint32_t kMaxBaseUnits = 0x7fffffff;           // of a record, in either area
inline constexpr uint32_t kBaseInOverflow = 0x80000000;

// Backends count with words, vectors and loops of these sizes: they do not follow another number.
static_assert(kBlockElements == 1024 && kTileBlocks == 8 && kUnitBytes == 8);
static_assert(kTileElements == kBlockElements * kTileBlocks && kLowPlaneBytes == 256 &&
              kBitmapBytes == 128 && kByteMapBytes == 16 && kMapsBytes == 32);

// Section 4: the modulus of a tile's checksum, the largest prime below 2^32.
inline constexpr uint64_t kChecksumPrime = 4294967291u;

// Section 3: the v that the nibbles of an escape stand for. `first` and the eleven v behind it are
// 0 to 11; then those of 12 and of 13. 14 is E = 0, and 15 a byte E.
struct NibbleCode {
  uint8_t first, twelve, thirteen;

  MEMSWAP_HOST_DEVICE constexpr bool is(uint8_t a, uint8_t b, uint8_t c) const {
    return first == a && twelve == b && thirteen == c;
  }
};
inline constexpr NibbleCode kLq2Nibbles{6, 255, 254};  // S2
inline constexpr NibbleCode kLq3Nibbles{8, 0, 255};    // S1

// What the elements are.
enum class Dtype : uint8_t {
  kBf16 = 1,
  kFp16 = 2,
  kFp32 = 3,
  kE4m3 = 4,
  kE5m2 = 5,
  kFp64 = 6,
  kBool = 7,
  kInt8 = 8,
  kUint8 = 9,
  kInt16 = 10,
  kUint16 = 11,
  kInt32 = 12,
  kUint32 = 13,
  kInt64 = 14,
  kUint64 = 15,
  kBits8 = 16,  // anything else, by width
  kBits16 = 17,
  kBits32 = 18,
  kBits64 = 19,
};
inline constexpr uint8_t kLastDtype = 19;

// How a frame lays its elements out.
enum class Layout : uint8_t {
  kDense = 0,   // floats: exponents coded, the rest at fixed addresses
  kSparse = 1,  // floats with many zeros: zero-compacted
  kBits = 2,    // one-byte elements that are 0 or 1
  kInts = 3,    // integers: frame of reference
  kRaw = 4,     // as they are
  kUpcast = 5,  // fp32 whose low halves are zero: dense bf16 of the high halves
};
inline constexpr uint8_t kLastLayout = 5;

// How one block is coded.
enum Mode : uint8_t {
  kNone = 0,  // no such block (behind the last one of the last tile)
  kLq2 = 1,   // exponents: 2-bit codes around a centre, escapes of 2, 4 and 8 bits
  kLq3 = 2,   // exponents: 3-bit codes around a centre, escapes of 4 and 8 bits
  kFw2 = 3,   // exponents: distance below a maximum, 2 to 8 bits each (kFw2 + k - 2)
  kFw3 = 4,
  kFw4 = 5,
  kFw5 = 6,
  kFw6 = 7,
  kFw7 = 8,
  kFw8 = 9,
  kLiteral = 10,      // the block's bytes: the first slab_bytes in the slab, the rest as payload
  kZeros = 11,        // sparse, every zero is +0
  kSignedZeros = 12,  // sparse, a sign bit for every zero
  kBitmap = 13,       // bits: the bitmap alone
  kReference = 14,    // ints: distance above a minimum, `center` bits each
};
inline constexpr uint32_t kModeCounts = 14;  // modes 1..14
inline constexpr uint32_t kModes = 15;
static_assert(kFw8 == kFw2 + 6 && kModes == kModeCounts + 1);

enum Flags : uint8_t { kOrdered = 1, kChecked = 2 };

// Bits of Header::status and of a decode's status word.
enum Status : uint32_t {
  kOk = 0,
  kNoRoom = 1,       // encode: var and overflow were full; the frame is unusable
  kBadHeader = 2,    // decode: the header contradicts itself, the buffers or the caller
  kBadRecord = 4,    // decode: a record names an impossible mode, size or position
  kBadPayload = 8,   // decode: a payload's length is not what its symbols say, or Z and F of a
                     // packed bitmap contradict each other
  kBadChecksum = 16  // decode: a tile's bytes are not the ones that were encoded
};

struct Header {
  uint32_t magic;
  uint16_t version;
  uint8_t dtype;
  uint8_t layout;
  uint8_t flags;
  uint8_t reserved[3];
  uint32_t status;  // written by the encoder's device, like everything from var_used on
  uint64_t elements;
  uint32_t blocks;
  uint32_t slab_bytes;
  uint64_t var_capacity;             // units
  uint64_t var_used;                 // units
  uint64_t overflow_used;            // units
  uint64_t zeros;                    // elements whose exponent symbol is 0, or which are 0 (sparse)
  uint64_t center_sum;               // over the blocks, of the LQ2 centre
  uint32_t mode_count[kModeCounts];  // blocks coded in mode 1, 2, ...
};
static_assert(sizeof(Header) == kHeaderBytes);

// One tile. The payload of its block i stands at base + the sizes of the blocks before it, in
// units, in var or, where base has bit kBaseInOverflow, in the overflow arena.
struct Record {
  uint32_t base;
  uint16_t block[kTileBlocks];  // bits 0..10: payload units; 11: packed; 12..15: mode
  uint8_t center[kTileBlocks];
  uint32_t checksum;

  static constexpr uint32_t kUnitsMask = 0x7ff;
  static constexpr uint32_t kPackedBit = 11;  // the block's bitmap is packed
  static constexpr uint32_t kModeShift = 12;

  MEMSWAP_HOST_DEVICE static constexpr uint32_t units(uint16_t block) { return block & kUnitsMask; }
  MEMSWAP_HOST_DEVICE static constexpr bool packed(uint16_t block) {
    return (block >> kPackedBit & 1) != 0;
  }
  MEMSWAP_HOST_DEVICE static constexpr uint32_t mode(uint16_t block) { return block >> kModeShift; }
  MEMSWAP_HOST_DEVICE static constexpr uint16_t pack(uint32_t mode, uint32_t units,
                                                     bool packed = false) {
    return static_cast<uint16_t>(mode << kModeShift | uint32_t{packed} << kPackedBit | units);
  }
};
static_assert(sizeof(Record) == kRecordBytes);
// A block's 16 bits are full: its units are up to 1024, which takes 11, and its mode is up to 14.
static_assert(kBlockElements * 8 / kUnitBytes <= Record::kUnitsMask &&
              Record::kUnitsMask == (1u << Record::kPackedBit) - 1 &&
              Record::kModeShift == Record::kPackedBit + 1 && kModes <= 1u << 4 &&
              Record::kModeShift + 4 == 16);

// How a float is split: rotated left by one bit, its top exponent_bits are the symbol E, and what
// is below are R fields of 8, 2, 4 or 1 bits, each a plane of the slab, in that order.
struct Split {
  uint8_t width;          // bytes per element
  uint8_t exponent_bits;  // of E; 0: no float
  uint8_t byte_planes;    // R: low bytes of the rotated element, one plane each
  uint8_t rest_bits;      // R: what is left between the byte planes and E (0, 3 or 4 bits)
};

MEMSWAP_HOST_DEVICE constexpr bool is_dtype(uint8_t dtype) {
  return dtype >= 1 && dtype <= kLastDtype;
}

MEMSWAP_HOST_DEVICE constexpr Split split_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return {2, 8, 1, 0};
    case Dtype::kFp16:
      return {2, 5, 1, 3};
    case Dtype::kFp32:
      return {4, 8, 3, 0};
    case Dtype::kFp64:
      return {8, 8, 7, 0};
    case Dtype::kE4m3:
      return {1, 4, 0, 4};
    case Dtype::kE5m2:
      return {1, 5, 0, 3};
    case Dtype::kBool:
    case Dtype::kInt8:
    case Dtype::kUint8:
    case Dtype::kBits8:
      return {1, 0, 0, 0};
    case Dtype::kInt16:
    case Dtype::kUint16:
    case Dtype::kBits16:
      return {2, 0, 0, 0};
    case Dtype::kInt32:
    case Dtype::kUint32:
    case Dtype::kBits32:
      return {4, 0, 0, 0};
    default:
      return {8, 0, 0, 0};
  }
}

// Backends have kernels of layouts dense and sparse for these, and for no others.
constexpr bool is_float(Dtype dtype) {
  return dtype == Dtype::kBf16 || dtype == Dtype::kFp16 || dtype == Dtype::kFp32 ||
         dtype == Dtype::kE4m3 || dtype == Dtype::kE5m2 || dtype == Dtype::kFp64;
}
constexpr bool only_floats_have_exponents() {
  for (uint8_t dtype = 1; dtype <= kLastDtype; ++dtype) {
    const Dtype one = static_cast<Dtype>(dtype);
    if ((split_of(one).exponent_bits != 0) != is_float(one)) {
      return false;
    }
  }
  return true;
}
static_assert(only_floats_have_exponents());

MEMSWAP_HOST_DEVICE constexpr uint32_t width_of(Dtype dtype) { return split_of(dtype).width; }

// Whether integers of this type compare as signed ones (layout ints).
MEMSWAP_HOST_DEVICE constexpr bool is_signed(Dtype dtype) {
  return dtype == Dtype::kInt8 || dtype == Dtype::kInt16 || dtype == Dtype::kInt32 ||
         dtype == Dtype::kInt64;
}

// Bytes of a block's R planes.
MEMSWAP_HOST_DEVICE constexpr uint32_t rest_bytes(const Split& split) {
  return kBlockElements * split.byte_planes + kBlockElements / 8 * split.rest_bits;
}

MEMSWAP_HOST_DEVICE constexpr bool layout_fits(Dtype dtype, Layout layout) {
  switch (layout) {
    case Layout::kDense:
    case Layout::kSparse:
      return split_of(dtype).exponent_bits != 0;
    case Layout::kBits:
      return width_of(dtype) == 1;
    case Layout::kUpcast:
      return dtype == Dtype::kFp32;
    case Layout::kInts:
    case Layout::kRaw:
      return true;
  }
  return false;
}

MEMSWAP_HOST_DEVICE constexpr uint32_t slab_bytes(Dtype dtype, Layout layout) {
  switch (layout) {
    case Layout::kDense:
      return rest_bytes(split_of(dtype)) + kLowPlaneBytes;
    case Layout::kUpcast:
      return rest_bytes(split_of(Dtype::kBf16)) + kLowPlaneBytes;
    case Layout::kSparse:
    case Layout::kBits:
    case Layout::kInts:
      return 0;
    case Layout::kRaw:
      return kBlockElements * width_of(dtype);
  }
  return 0;
}

// Longest payload of one block, units. Nothing that an encoder writes is longer.
MEMSWAP_HOST_DEVICE constexpr uint32_t max_payload_units(Dtype dtype, Layout layout) {
  const uint32_t block = kBlockElements * width_of(dtype);
  if (layout == Layout::kDense) {
    return kBlockElements / 8 * (split_of(dtype).exponent_bits - 2) / kUnitBytes;
  }
  return (block - slab_bytes(dtype, layout)) / kUnitBytes;
}

// Where a frame's sections are.
struct Sections {
  uint64_t elements;
  uint32_t blocks;
  uint32_t tiles;
  uint32_t slab_bytes;
  uint32_t max_payload_units;  // of one block
  uint64_t slabs;              // offset: slab(b) = slabs + b * slab_bytes
  uint64_t records;            // offset
  uint64_t var;                // offset, and the bytes of the fixed part

  // The var capacity with which an encode fits whatever the elements are, units.
  MEMSWAP_HOST_DEVICE constexpr uint64_t max_var_units() const {
    return uint64_t{blocks} * max_payload_units;
  }
  MEMSWAP_HOST_DEVICE constexpr uint64_t bytes(uint64_t var_capacity) const {
    return var + var_capacity * kUnitBytes;
  }
};

// Needs layout_fits(dtype, layout) and elements <= kMaxElements.
MEMSWAP_HOST_DEVICE constexpr Sections sections_of(Dtype dtype, Layout layout, uint64_t elements) {
  Sections sections{};
  sections.elements = elements;
  sections.blocks = static_cast<uint32_t>((elements + kBlockElements - 1) / kBlockElements);
  sections.tiles = (sections.blocks + kTileBlocks - 1) / kTileBlocks;
  sections.slab_bytes = slab_bytes(dtype, layout);
  sections.max_payload_units = max_payload_units(dtype, layout);
  sections.slabs = kHeaderBytes;
  sections.records = sections.slabs + uint64_t{sections.blocks} * sections.slab_bytes;
  sections.var = sections.records + uint64_t{sections.tiles} * kRecordBytes;
  return sections;
}

// Whether blocks of this mode may stand in a frame of this layout.
MEMSWAP_HOST_DEVICE constexpr bool mode_fits(Dtype dtype, Layout layout, uint32_t mode) {
  switch (layout) {
    case Layout::kDense:
      return mode >= kLq2 && mode < kFw2 + split_of(dtype).exponent_bits - 1u;
    case Layout::kUpcast:
      return mode >= kLq2 && mode <= kLiteral;
    case Layout::kSparse:
      return mode == kZeros || mode == kSignedZeros || mode == kLiteral;
    case Layout::kBits:
      return mode == kBitmap || mode == kLiteral;
    case Layout::kInts:
      return mode == kReference || mode == kLiteral;
    case Layout::kRaw:
      return mode == kLiteral;
  }
  return false;
}

// Whether the payload of a block in this mode begins with a bitmap, which may be packed.
MEMSWAP_HOST_DEVICE constexpr bool has_bitmap(uint32_t mode) {
  return mode == kZeros || mode == kSignedZeros || mode == kBitmap;
}

// Whether a record may say this of a block: its mode, its payload's size and the packed bit.
MEMSWAP_HOST_DEVICE constexpr bool block_fits(Dtype dtype, Layout layout, uint16_t block) {
  const uint32_t mode = Record::mode(block);
  return mode_fits(dtype, layout, mode) &&
         Record::units(block) <= max_payload_units(dtype, layout) &&
         (!Record::packed(block) || has_bitmap(mode));
}

// The sections of the frame in `frame_bytes` bytes behind `header`, if header and sizes are
// possible and agree. `overflow_units`: capacity of the arena that the frame may point into.
MEMSWAP_HOST_DEVICE constexpr bool validate(const Header& header, uint64_t frame_bytes,
                                            uint64_t overflow_units, Sections* sections) {
  if (frame_bytes < kHeaderBytes || header.magic != kMagic || header.version != kVersion ||
      !is_dtype(header.dtype) || header.layout > kLastLayout || header.elements > kMaxElements ||
      (header.flags & ~(kOrdered | kChecked)) != 0 || header.reserved[0] != 0 ||
      header.reserved[1] != 0 || header.reserved[2] != 0 || header.status != kOk) {
    return false;
  }
  const Dtype dtype = static_cast<Dtype>(header.dtype);
  const Layout layout = static_cast<Layout>(header.layout);
  if (!layout_fits(dtype, layout)) {
    return false;
  }
  *sections = sections_of(dtype, layout, header.elements);
  return header.blocks == sections->blocks && header.slab_bytes == sections->slab_bytes &&
         sections->var <= frame_bytes &&
         header.var_capacity <= (frame_bytes - sections->var) / kUnitBytes &&
         header.var_used <= header.var_capacity && header.overflow_used <= overflow_units;
}

}  // namespace memswap::frame
