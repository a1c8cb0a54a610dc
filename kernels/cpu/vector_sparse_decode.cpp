// Frames to layout sparse.
#include "vector.h"
#include "vector_bitmap.h"
#include "vector_floats.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

using frame::Dtype;

// Where a block's streams are.
struct Streams {
  Bitmap bitmap;
  bool literal;   // there are none
  bool in_rows;   // zeros come in rows: the bitmap is packed
  uint32_t live;  // survivors
  uint8_t center;
  const uint8_t* planes;  // byte planes, one behind the other
  const uint8_t* rest[2];
  const uint8_t* codes;
  const uint8_t* signs;  // NULL: every zero is +0
  const uint8_t* escapes;
  const uint8_t* end;

  uint32_t vectors() const { return (live + kLanes - 1) / kLanes; }
};

// False if the payload ends before its streams; escapes are not looked at yet.
template <Dtype kDtype>
inline bool find_streams(Streams& streams, const uint8_t* payload, const CodedBlock& block) {
  using Type = Float<kDtype>;
  streams.in_rows = block.packed;
  streams.end = payload + block.units * frame::kUnitBytes;
  const uint8_t* at = decode_bitmap(streams.bitmap, block.packed, payload, streams.end);
  if (at == nullptr) {
    return false;
  }
  const uint32_t live = streams.bitmap.count();
  const uint32_t plane_bytes = Type::kBytePlanes * live;
  const uint32_t first_bytes =
      Type::kRestBits == 0 ? 0 : bytes_of_bits((Type::kRestBits == 4 ? 4 : 2) * live);
  const uint32_t second_bytes = Type::kRestBits == 3 ? bytes_of_bits(live) : 0;
  const uint32_t code_bytes = bytes_of_bits(2 * live);
  const bool has_signs = block.mode == frame::kSignedZeros;
  const uint32_t sign_bytes = has_signs ? bytes_of_bits(frame::kBlockElements - live) : 0;
  if (plane_bytes + first_bytes + second_bytes + code_bytes + sign_bytes >
      static_cast<size_t>(streams.end - at)) {
    return false;
  }
  streams.live = live;
  streams.planes = at;
  streams.rest[0] = streams.planes + plane_bytes;
  streams.rest[1] = streams.rest[0] + first_bytes;
  streams.codes = streams.rest[1] + second_bytes;
  streams.signs = has_signs ? streams.codes + code_bytes : nullptr;
  streams.escapes = streams.codes + code_bytes + sign_bytes;
  return true;
}

// How many of a stream's symbols of 2 bits are 0.
inline uint32_t count_zeros2(const uint8_t* stream, uint32_t symbols) {
  const Vector lowest = broadcast(0x55);
  Sums counts{};
  const uint32_t bytes = symbols / 4;
  for (uint32_t i = 0; i < bytes; i += kLanes) {
    const Lanes there = first_lanes(bytes - i);
    counts = add_zero_fields2(counts, only(there, load(stream + i)) | only(~there, lowest));
  }
  const uint32_t last = stream[bytes];
  const uint32_t in_last = (1u << symbols % 4 * 2) - 1;
  return total(counts) +
         static_cast<uint32_t>(__builtin_popcount(~(last | last >> 1) & 0x55 & in_last));
}

// In steps, see [Note: blocks in flight]: rows are stored and then loaded from anywhere in them,
// which has to wait until they, and all stores before them, are in the cache.
template <Dtype kDtype, bool kStreaming>
class SparseDecoder {
  using Type = Float<kDtype>;
  static constexpr uint32_t kWidth = Type::kWidth;

 public:
  SparseDecoder(const DecodeParams& params, uint8_t* out) : params_(params), out_(out) {}

  // As DecodeBlocks.
  bool run(const uint8_t* slabs, const uint8_t* payloads, const frame::Record& record,
           uint32_t first, uint32_t count) {
    for (uint32_t round = 0; round < count + 2; ++round) {
      // Blocks before the first have numbers beyond the last: they wrap around.
      if (round < count) {
        const CodedBlock block = coded_block(record, first + round);
        if (!read(round, slabs, payloads, block)) {
          return false;
        }
        payloads += block.units * frame::kUnitBytes;
      }
      if (round - 1 < count) {
        join_tops(round - 1);
      }
      if (round - 2 < count) {
        write(round - 2);
      }
    }
    return true;
  }

 private:
  enum class Zeros { kSigned, kInRows, kScattered };

  // The block's streams, and its escapes in a row. A literal block is decoded, and has no streams.
  bool read(uint32_t b, const uint8_t* slab, const uint8_t* payload, const CodedBlock& block) {
    const uint32_t payload_bytes = block.units * frame::kUnitBytes;
    if (params_.asks_pages) {
      ask_pages(payload, payload_bytes);
    } else {
      ask_lines(payload, payload_bytes, kPrefetchShortBytes);
    }
    Streams& streams = streams_[b];
    streams.literal = block.mode == frame::kLiteral;
    if (streams.literal) {
      return decode_literal<kStreaming>(params_, output(b), slab, payload, block);
    }
    if (!find_streams<kDtype>(streams, payload, block)) {
      return false;
    }
    streams.center = block.center;
    const uint8_t* last = decode_escapes2<InRotated<kDtype>>(
        streams.escapes, streams.end, count_zeros2(streams.codes, streams.live), block.center,
        escapes_[b % 2]);
    return last != nullptr && streams.end - last < frame::kUnitBytes;
  }

  // The survivors' top bytes, one after another.
  void join_tops(uint32_t b) {
    const Streams& streams = streams_[b];
    if (streams.literal) {
      return;
    }
    const Vector table = code_table<Code::kLq2, InRotated<kDtype>>(streams.center);
    const uint8_t* next_escape = escapes_[b % 2].byte;
    uint8_t* tops = tops_[b % 2].byte;
    for (uint32_t i = 0; i < streams.vectors(); ++i) {
      const Vector code = load_symbols2(streams.codes + kLanes / 4 * i);
      const Expansion escapes(equal(code, Vector{}));  // behind the last survivor: of any bytes
      Vector top = escapes.take_over(look_up(table, code), next_escape);
      if constexpr (Type::kRestBits == 4) {
        top |= load_symbols4(streams.rest[0] + kLanes / 2 * i);
      } else if constexpr (Type::kRestBits == 3) {
        top |= load_symbols2(streams.rest[0] + kLanes / 4 * i);
        top = set_bit<2>(top, load_lanes(streams.rest[1] + kLanes / 8 * i));
      }
      store(tops + kLanes * i, top);
    }
  }

  void write(uint32_t b) {
    const Streams& streams = streams_[b];
    if (streams.literal) {
      return;
    }
    uint8_t* const out = output(b);
    const uint8_t* const tops = tops_[b % 2].byte;
    if (streams.signs != nullptr) {
      spread<Zeros::kSigned>(out, streams, tops);
    } else if (kLooksAtMasks && streams.in_rows) {
      spread<Zeros::kInRows>(out, streams, tops);
    } else {
      spread<Zeros::kScattered>(out, streams, tops);
    }
  }

  // Where a block goes that is written next.
  uint8_t* output(uint32_t b) const {
    uint8_t* const out = out_ + b * Type::kBlockBytes;
    if (kStreaming && params_.touches_pages) {
      touch_pages_ahead(out, Type::kBlockBytes);
    }
    return out;
  }

  // The survivors' bytes to their places among zeros, plane by plane, and then the bytes to
  // elements.
  template <Zeros kZeros>
  static void spread(uint8_t* out, const Streams& streams, const uint8_t* tops) {
    const uint8_t* next[kWidth];  // by byte of the rotated survivor
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      next[p] = streams.planes + streams.live * p;
    }
    next[kWidth - 1] = tops;
    uint32_t zeros = 0;
    for (uint32_t i = 0; i < kVectors; ++i) {
      const uint8_t* const chosen = streams.bitmap.byte + kLanes / 8 * i;
      uint8_t* const to = out + kLanes * kWidth * i;
      if constexpr (kZeros == Zeros::kInRows) {
        const Mask mask = load_mask(chosen);
        if (!any(mask)) {
          for (uint32_t p = 0; p < kWidth; ++p) {
            store_line<kStreaming>(to + kLanes * p, Vector{});
          }
          continue;
        }
        if (!any(~mask)) {
          Vector v[kWidth];
          for (uint32_t p = 0; p < kWidth; ++p) {
            v[p] = load(next[p]);
            next[p] += kLanes;
          }
          store_rotated<kWidth, kStreaming>(to, v);
          continue;
        }
      }
      const Lanes survivors = load_lanes(chosen);
      const Expansion expansion(survivors);
      Vector v[kWidth];
      for (uint32_t p = 0; p < kWidth; ++p) {
        if (kZeros == Zeros::kSigned && p == 0) {
          // The rotated +0 is 0, and -0 is 1.
          const Lanes negative = spread_bits(streams.signs, zeros, ~survivors);
          v[0] = expansion.take_over(only(negative, broadcast(1)), next[0]);
          zeros += kLanes - expansion.count();
        } else {
          v[p] = expansion.take(next[p]);
        }
      }
      store_rotated<kWidth, kStreaming>(to, v);
    }
  }

  AlignedRow escapes_[2];
  AlignedRow tops_[2];
  Streams streams_[frame::kTileBlocks];
  const DecodeParams& params_;
  uint8_t* const out_;
};

template <Dtype kDtype, bool kStreaming>
bool decode_sparse(const DecodeParams& params, uint8_t* out, const uint8_t* slabs,
                   const uint8_t* payloads, const frame::Record& record, uint32_t first,
                   uint32_t count) {
  return SparseDecoder<kDtype, kStreaming>(params, out).run(slabs, payloads, record, first, count);
}

}  // namespace

DecodeBlocks sparse_decoder(const DecodeParams& params) {
  return for_float<DecodeBlocks>(params.dtype, params.streaming,
                                 []<Dtype kDtype, bool kStreaming>() -> DecodeBlocks {
                                   return &decode_sparse<kDtype, kStreaming>;
                                 });
}

}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
