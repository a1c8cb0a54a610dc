// Shape sparse to frames, with AVX-512.
#include <algorithm>

#include "avx512.h"
#include "avx512_bitmap.h"
#include "avx512_exponents.h"
#include "avx512_lanes.h"
#include "avx512_literal.h"

MEMSWAP_AVX512_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using frame::Dtype;
using frame::Shape;

// Longest S1, S2 and E bytes of a block, and the vector behind them.
inline constexpr uint32_t kEscapeBytes = frame::kBlockElements / 8 * (2 + 4 + 8) + kLanes;

// Appends runs of bits to a stream.
class BitAppender {
 public:
  explicit BitAppender(uint8_t* out) : out_(out) {}

  // The low `count` bits of `bits`, the others being 0; count is at most 64.
  void append(uint64_t bits, uint32_t count) {
    pending_ |= bits << filled_;
    if (filled_ + count >= 64) {
      store64(out_, pending_);
      out_ += 8;
      pending_ = filled_ == 0 ? 0 : bits >> (64 - filled_);
      filled_ += count;
      filled_ -= 64;
    } else {
      filled_ += count;
    }
  }

  uint8_t* finish() {
    store64(out_, pending_);
    return out_ + bytes_of_bits(filled_);
  }

 private:
  uint8_t* out_;
  uint64_t pending_ = 0;
  uint32_t filled_ = 0;
};

// Writes `bytes` bytes, and up to 64 behind them. Returns the end.
inline uint8_t* append_row(uint8_t* out, const uint8_t* row, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += kLanes) {
    store(out + i, load(row + i));
  }
  return out + bytes;
}

// In steps, see [Note: blocks in flight]: here rows of survivors are stored wherever they end and
// then loaded again, which waits until they are in the cache.
template <Dtype kDtype>
class SparseEncoder {
  using Type = Float<kDtype>;
  static constexpr uint32_t kWidth = Type::kWidth;
  static constexpr uint32_t kElements = kElementLanes<kWidth>;  // of a vector

 public:
  SparseEncoder(const uint8_t* elements, uint32_t count, uint8_t* payload, EncodedBlock* encoded)
      : elements_(elements), count_(count), payload_(payload), encoded_(encoded) {}

  void run() {
    const uint32_t blocks = (count_ + frame::kBlockElements - 1) / frame::kBlockElements;
    for (uint32_t round = 0; round < blocks + 4; ++round) {
      // Blocks before the first have numbers beyond the last: they wrap around.
      if (round < blocks) {
        compact(elements_of(round), rows_[round % 2], blocks_[round]);
      }
      if (round - 1 < blocks) {
        split(rows_[(round - 1) % 2], blocks_[round - 1], planes_[(round - 1) % 4]);
      }
      if (round - 2 < blocks) {
        prefetch_block(round + 1);
        choose_center(planes_[(round - 2) % 4].symbols, blocks_[round - 2]);
      }
      if (round - 3 < blocks) {
        encode_codes(planes_[(round - 3) % 4].symbols, blocks_[round - 3], codes_[(round - 3) % 2]);
      }
      if (round - 4 < blocks) {
        write(round - 4);
      }
    }
  }

 private:
  struct Block {
    Bitmap bitmap;  // of the survivors
    uint32_t live;
    bool has_negative_zero;
    uint8_t center;

    uint32_t vectors() const { return (live + kLanes - 1) / kLanes; }
  };

  // The survivors, rotated, and zeros behind them.
  struct alignas(64) Survivors {
    uint8_t byte[Type::kBlockBytes + kWidth * kLanes];
  };

  // The R streams of the survivors but for the last one of 3 bits, and symbols with zeros behind.
  struct Planes {
    Row byte[kWidth];
    Row rest[2];
    Bytes symbols;
  };

  struct Codes {
    Row low;
    Escapes escapes;
  };

  const uint8_t* elements_of(uint32_t b) const { return elements_ + b * Type::kBlockBytes; }

  // Of this tile or the next.
  void prefetch_block(uint32_t b) const {
    for (uint32_t i = 0; i < Type::kBlockBytes; i += kLanes) {
      prefetch(elements_, b * Type::kBlockBytes + i);
    }
  }

  static void compact(const uint8_t* elements, Survivors& row, Block& block) {
    uint8_t* end = row.byte;
    uint64_t negative_zeros = 0;
    for (uint32_t i = 0; i < kVectors; ++i) {
      uint64_t word = 0;
      for (uint32_t j = 0; j < kWidth; ++j) {
        const Vector rotated = rotate_left<kWidth>(load(elements + kLanes * (kWidth * i + j)));
        const uint64_t survivors = survivors_of<kWidth>(rotated);
        negative_zeros |= negative_zeros_of<kWidth>(rotated);
        store(end, compress_lanes<kWidth>(survivors, rotated));
        end += kWidth * count_bits(survivors);
        word |= survivors << (kElements * j % 64);
      }
      block.bitmap.word[i] = word;
    }
    for (uint32_t j = 0; j < kWidth; ++j) {
      store(end + kLanes * j, _mm512_setzero_si512());
    }
    block.live = static_cast<uint32_t>(end - row.byte) / kWidth;
    block.has_negative_zero = negative_zeros != 0;
  }

  static void split(const Survivors& row, const Block& block, Planes& planes) {
    for (uint32_t i = 0; i < block.vectors(); ++i) {
      Vector v[kWidth];
      for (uint32_t j = 0; j < kWidth; ++j) {
        v[j] = load(row.byte + kLanes * (kWidth * i + j));
      }
      split_bytes<kWidth>(v);
      for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
        store(planes.byte[p].byte + kLanes * i, v[p]);
      }
      const Vector top = v[kWidth - 1];
      if constexpr (Type::kRestBits == 4) {
        store_symbols4(planes.rest[0].byte + kLanes / 2 * i, _mm512_and_si512(top, broadcast(15)));
      } else if constexpr (Type::kRestBits == 3) {
        store_symbols2(planes.rest[0].byte + kLanes / 4 * i, _mm512_and_si512(top, broadcast(3)));
        store64(planes.rest[1].byte + kLanes / 8 * i, _mm512_test_epi8_mask(top, broadcast(4)));
      }
      planes.symbols.vector[i] = Type::kRestBits == 0 ? top : shift_right<Type::kRestBits>(top);
    }
  }

  static void choose_center(const Bytes& symbols, Block& block) {
    const uint32_t vectors = block.vectors();
    const uint32_t maximum = range_of(symbols, vectors).maximum;
    Crowd crowd{maximum, distances_of<true>(symbols, vectors, maximum)};
    if (Type::kSymbolBits == canonical::kOutlierBits && may_have_outliers(crowd.distances)) {
      const uint32_t low = crowded_window(symbols, vectors);
      crowd = low != 0 ? crowd_of(symbols, vectors, low) : crowd;
    }
    block.center = center_of(crowd, 7);
  }

  // The stream of L0 codes, and the escapes.
  static void encode_codes(const Bytes& symbols, const Block& block, Codes& codes) {
    const Vector centers = broadcast(block.center);
    uint8_t* end = codes.escapes.symbol.byte;
    for (uint32_t i = 0; i < block.vectors(); ++i) {
      const Vector symbol = symbols.vector[i];
      const Vector value = _mm512_sub_epi8(centers, symbol);
      const __mmask64 live = first_lanes(block.live - kLanes * i);
      const __mmask64 coded =
          _mm512_mask_cmplt_epu8_mask(live, _mm512_sub_epi8(value, broadcast(1)), broadcast(3));
      store_symbols2(codes.low.byte + kLanes / 4 * i, _mm512_maskz_mov_epi8(coded, value));
      end = append(end, live & ~coded, symbol);
    }
    codes.escapes.count = static_cast<uint32_t>(end - codes.escapes.symbol.byte);
  }

  // A sign for every element that is 0.
  static uint8_t* append_signs(uint8_t* out, const uint8_t* elements, const Bitmap& bitmap) {
    BitAppender stream(out);
    for (uint32_t i = 0; i < kVectors; ++i) {
      uint64_t negative = 0;
      for (uint32_t j = 0; j < kWidth; ++j) {
        const Vector rotated = rotate_left<kWidth>(load(elements + kLanes * (kWidth * i + j)));
        negative |= negative_zeros_of<kWidth>(rotated) << (kElements * j % 64);
      }
      const uint64_t zeros = ~bitmap.word[i];
      stream.append(_pext_u64(negative, zeros), count_bits(zeros));
    }
    return stream.finish();
  }

  void write(uint32_t b) {
    const Block& block = blocks_[b];
    const Planes& planes = planes_[b % 4];
    const Codes& codes = codes_[b % 2];
    const uint32_t live = block.live;
    // Missing elements are zeros, too.
    const uint32_t zeros =
        std::min(count_ - b * frame::kBlockElements, frame::kBlockElements) - live;

    // All but the escapes always fits: codes and signs are fewer bits than the symbols.
    bool packed;
    uint8_t* end = encode_bitmap(block.bitmap, payload_, packed);
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      end = append_row(end, planes.byte[p].byte, live);
    }
    if constexpr (Type::kRestBits != 0) {
      constexpr uint32_t kFirstBits = Type::kRestBits == 4 ? 4 : 2;
      end = append_row(end, planes.rest[0].byte, bytes_of_bits(kFirstBits * live));
    }
    if constexpr (Type::kRestBits == 3) {
      end = append_row(end, planes.rest[1].byte, bytes_of_bits(live));
    }
    end = append_row(end, codes.low.byte, bytes_of_bits(2 * live));
    if (block.has_negative_zero) {
      end = append_signs(end, elements_of(b), block.bitmap);
    }
    uint32_t escape_bytes = 0;
    alignas(64) uint8_t escapes[kEscapeBytes];
    if (codes.escapes.count != 0) {
      const uint8_t* escapes_end = encode_escapes2(codes.escapes, block.center, escapes);
      escape_bytes = static_cast<uint32_t>(escapes_end - escapes);
    }
    const uint32_t units = units_of_bytes(static_cast<uint32_t>(end - payload_) + escape_bytes);
    EncodedBlock& encoded = encoded_[b];
    if (units >= frame::max_payload_units(kDtype, Shape::kSparse)) {
      encoded = encode_literal<false>(elements_of(b), kDtype, Shape::kSparse, nullptr, payload_);
      encoded.zeros = zeros;
    } else {
      store64(append_row(end, escapes, escape_bytes), 0);  // the rest of the last unit
      const uint32_t mode = block.has_negative_zero ? frame::kSignedZeros : frame::kZeros;
      encoded = {mode, units, zeros, block.center, block.center, packed};
    }
    payload_ += encoded.units * frame::kUnitBytes;
  }

  const uint8_t* const elements_;
  const uint32_t count_;
  uint8_t* payload_;
  EncodedBlock* const encoded_;
  Block blocks_[frame::kTileBlocks];
  Survivors rows_[2];
  Planes planes_[4];
  Codes codes_[2];
};

template <Dtype kDtype>
void encode_sparse(const EncodeParams&, const void* elements, uint32_t count, uint8_t*,
                   uint8_t* payloads, EncodedBlock* encoded) {
  SparseEncoder<kDtype>(static_cast<const uint8_t*>(elements), count, payloads, encoded).run();
}

}  // namespace

EncodeBlocks sparse_encoder(const EncodeParams& params) {
  return for_float<EncodeBlocks>(params.dtype, false, []<Dtype kDtype, bool>() -> EncodeBlocks {
    return &encode_sparse<kDtype>;
  });
}

}  // namespace memswap::cpu::avx512

MEMSWAP_AVX512_END
