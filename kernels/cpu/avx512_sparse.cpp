// Layout sparse to frames, with AVX-512, which appends bytes as fast as elements: so planes are cut
// first and compacted each by itself, where vector_sparse.cpp compacts elements. Measured
// (docs/benchmarks.md).
#define MEMSWAP_VECTOR_AVX512
#include "vector.h"
#include "vector_bitmap.h"
#include "vector_floats.h"
#include "vector_sparse_payload.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::avx512 {
namespace {

using frame::Dtype;

// In steps, see [Note: blocks in flight]: rows are stored wherever they end and then loaded again,
// which has to wait until they are in the cache. That holds of the escapes' own escapes as well.
template <Dtype kDtype>
class SparseEncoder {
  using Type = Float<kDtype>;
  static constexpr uint32_t kWidth = Type::kWidth;
  // Bytes ahead of a block. Measured: see [Note: asking ahead].
  static constexpr uint32_t kLinesAhead = 12288;

 public:
  SparseEncoder(const EncodeParams& params, const uint8_t* elements, uint32_t count,
                uint8_t* payload, EncodedBlock* encoded)
      : params_(params), elements_(elements), count_(count), payload_(payload), encoded_(encoded) {}

  void run() {
    const uint32_t blocks = (count_ + frame::kBlockElements - 1) / frame::kBlockElements;
    for (uint32_t round = 0; round < blocks + 4; ++round) {
      // Blocks before the first have numbers beyond the last: they wrap around.
      if (round < blocks) {
        compress(elements_ + round * Type::kBlockBytes, blocks_[round % 5]);
      }
      ask_quarter(round, 0);
      if (round - 1 < blocks) {
        choose_center(blocks_[(round - 1) % 5]);
      }
      ask_quarter(round, 1);
      if (round - 2 < blocks) {
        encode_codes(blocks_[(round - 2) % 5]);
        list_signs(blocks_[(round - 2) % 5]);
      }
      ask_quarter(round, 2);
      if (round - 3 < blocks) {
        Block& block = blocks_[(round - 3) % 5];
        split_escapes2(block.escapes, block.center, block.first.byte, block.deeper);
      }
      if (round - 4 < blocks) {
        write(round - 4, blocks_[(round - 4) % 5]);
      }
      ask_quarter(round, 3);
    }
  }

 private:
  struct Block {
    Bitmap bitmap;    // of the survivors
    Bitmap negative;  // of those that are -0
    bool has_negative_zero;
    uint32_t live;     // survivors
    uint32_t maximum;  // symbol
    uint8_t center;
    AlignedRow plane[kWidth];  // by byte of the rotated survivor, and zeros behind the last one
    Row rest[2];
    Bytes symbols;
    Row codes;
    AlignedRow signs;  // of the zeros, a byte for each
    alignas(kRowAlignment) Escapes escapes;
    Row first;  // S1 of the escapes
    Escapes deeper;

    uint32_t vectors() const { return (live + kLanes - 1) / kLanes; }
  };

  void ask_quarter(uint32_t b, uint32_t quarter) const {
    ask_ahead<Type::kBlockBytes, kLinesAhead>(params_, elements_, b, quarter);
  }

  static void compress(const uint8_t* elements, Block& block) {
    uint32_t live = 0;
    Lanes any_negative = 0;
    Vector highest = Vector{};
    for (uint32_t i = 0; i < kVectors; ++i) {
      Vector v[kWidth];
      for (uint32_t j = 0; j < kWidth; ++j) {
        v[j] = rotate_left<kWidth>(load(elements + kLanes * (kWidth * i + j)));
      }
      split_bytes<kWidth>(v);
      highest = maximum(highest, v[kWidth - 1]);
      // The rotated +0 is 0, and -0 is 1.
      Vector magnitude = v[0] & 0xfe;
      for (uint32_t p = 1; p < kWidth; ++p) {
        magnitude |= v[p];
      }
      const Lanes survivors = nonzero(magnitude);
      const Lanes negative = mask_of_bit<0>(v[0]) & ~survivors;
      store_mask(block.bitmap.byte + kLanes / 8 * i, survivors);
      store_mask(block.negative.byte + kLanes / 8 * i, negative);
      any_negative |= negative;
      for (uint32_t p = 0; p < kWidth; ++p) {
        append(block.plane[p].byte + live, survivors, v[p]);
      }
      live += count_of(survivors);
    }
    for (Row& plane : block.plane) {
      store(plane.byte + live, Vector{});
    }
    block.live = live;
    block.has_negative_zero = any_negative != 0;
    block.maximum = highest_of(highest) >> Type::kRestBits;
  }

  // The symbols, what shares their bytes, and c2.
  static void choose_center(Block& block) {
    const uint32_t vectors = block.vectors();
    for (uint32_t i = 0; i < vectors; ++i) {
      const Vector top = load(block.plane[kWidth - 1].byte + kLanes * i);
      take_rest<Type>(top, i, block.rest);
      block.symbols.vector[i] = move_bits<Type::kRestBits, 0, Type::kSymbolBits>(top);
    }
    const Crowd crowd =
        crowd_of_survivors<Type::kSymbolBits>(block.symbols, vectors, block.maximum);
    block.center = center_of(crowd, canonical::kLq2Eighths);
  }

  // The stream of L0 codes, and the escapes.
  static void encode_codes(Block& block) {
    const Vector centers = broadcast(block.center);
    uint8_t* end = block.escapes.symbol.byte;
    for (uint32_t i = 0; i < block.vectors(); ++i) {
      const Vector symbol = block.symbols.vector[i];
      const Vector value = centers - symbol;
      const Lanes live = first_lanes(block.live - kLanes * i);
      const Lanes coded = less(value - 1, broadcast(3)) & live;
      store_symbols2(block.codes.byte + kLanes / 4 * i, only(coded, value));
      end = append(end, live & ~coded, symbol);
    }
    block.escapes.end_at(end, block.center);
  }

  // A sign for every element that is 0: first as bytes in a row, as those are appended without a
  // thought of what is in a word already; then as bits.
  static void list_signs(Block& block) {
    if (!block.has_negative_zero) {
      return;
    }
    uint8_t* end = block.signs.byte;
    for (uint32_t i = 0; i < kVectors; ++i) {
      const Lanes zeros = ~load_lanes(block.bitmap.byte + kLanes / 8 * i);
      const Lanes negative = load_lanes(block.negative.byte + kLanes / 8 * i);
      end = append(end, zeros, only(negative, broadcast(1)));
    }
    store(end, Vector{});
  }

  void write(uint32_t b, const Block& block) {
    SparseRows<kWidth> rows{block.live,  block.bitmap, {},
                            block.rest,  block.codes,  block.has_negative_zero,
                            block.signs, block.center, block.escapes,
                            block.first, block.deeper};
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      rows.plane[p] = block.plane[p].byte;
    }
    encoded_[b] = write_sparse<kDtype, 0>(params_, elements_, count_, b, rows, payload_);
    payload_ += encoded_[b].units * frame::kUnitBytes;
  }

  const EncodeParams& params_;
  const uint8_t* const elements_;
  const uint32_t count_;
  uint8_t* payload_;
  EncodedBlock* const encoded_;
  Block blocks_[5];
};

template <Dtype kDtype>
void encode_sparse(const EncodeParams& params, const void* elements, uint32_t count, uint8_t*,
                   uint8_t* payloads, EncodedBlock* encoded) {
  SparseEncoder<kDtype>(params, static_cast<const uint8_t*>(elements), count, payloads, encoded)
      .run();
}

}  // namespace

EncodeBlocks sparse_encoder(const EncodeParams& params) {
  return for_float<EncodeBlocks>(params.dtype, false, []<Dtype kDtype, bool>() -> EncodeBlocks {
    return &encode_sparse<kDtype>;
  });
}

}  // namespace memswap::cpu::avx512

MEMSWAP_VECTOR_END
