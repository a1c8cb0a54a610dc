// Layouts dense and upcast.
#include <algorithm>

#include "vector.h"
#include "vector_floats.h"
#include "vector_literal.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

using frame::Dtype;

template <Dtype kDtype, bool kStreaming>
[[gnu::always_inline]] inline Range split_block(const uint8_t* elements, uint8_t* slab,
                                                uint8_t* plane1, Bytes& symbols) {
  if constexpr (Float<kDtype>::kWidth == 1) {
    return split_byte_floats<kDtype, kStreaming>(elements, slab, plane1, symbols);
  } else {
    return split_floats<kDtype, kStreaming>(elements, slab, plane1, symbols);
  }
}

template <Dtype kDtype, bool kStreaming>
[[gnu::noinline]] void join_block(uint8_t* out, const uint8_t* slab, const Symbols& symbols,
                                  bool asks_pages) {
  for_code(symbols.code, [&]<Code kCode>() {
    if constexpr (Float<kDtype>::kWidth == 1) {
      join_byte_floats<kDtype, kStreaming, kCode>(out, slab, symbols, asks_pages);
    } else {
      join_floats<kDtype, kStreaming, kCode>(out, slab, symbols, asks_pages);
    }
  });
}

// As HighHalves, of elements of kWidth bytes.
template <uint32_t kWidth>
inline bool take_high_halves(const uint8_t* elements, uint8_t* high) {
  Vector all{};
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    Vector v[kWidth / 2];
    for (uint32_t j = 0; j < kWidth / 2; ++j) {
      v[j] = load(elements + kLanes * (kWidth / 2 * i + j));
      all |= v[j];
    }
    if constexpr (kWidth == 8) {
      v[0] = odd_words(v[0], v[1]);
      v[1] = odd_words(v[2], v[3]);
    }
    store(high + kLanes * i, odd_halves(v[0], v[1]));
  }
  using Words = typename Elements<UnsignedOf<kWidth>>::Vector;
  const Words others = reinterpret_cast<Words>(all) << 16;
  return !any(mask_of(nonzero(reinterpret_cast<Vector>(others))));
}

// As HidesSurvivors, of elements of kWidth bytes.
template <uint32_t kWidth>
inline bool hides_survivors_of(const uint8_t* elements) {
  using Word = UnsignedOf<kWidth>;
  using Words = typename Elements<Word>::Vector;
  constexpr Word kMagnitude = static_cast<Word>(Word{0x7fff} << (8 * kWidth - 16));
  Words hidden{};
  for (uint32_t i = 0; i < kWidth * kVectors; ++i) {
    const Words words = reinterpret_cast<Words>(load(elements + kLanes * i));
    hidden |= words & reinterpret_cast<Words>((words & kMagnitude) == 0);
  }
  return any(mask_of(nonzero(reinterpret_cast<Vector>(hidden << 16))));
}

template <bool kStreaming>
inline void put_high_halves(uint8_t* elements, const uint8_t* high) {
  for (uint32_t i = 0; i < 2 * kVectors; ++i) {
    const Vector halves = load(high + kLanes * i);
    uint8_t* const to = elements + 2 * kLanes * i;
    store_line<kStreaming>(to, interleave_low_halves(Vector{}, halves));
    store_line<kStreaming>(to + kLanes, interleave_high_halves(Vector{}, halves));
  }
}

// How many bytes ahead of a block an encoder asks for lines: see [Note: asking ahead].
inline constexpr uint32_t kLinesAhead = 8192;

// [Note: blocks in flight]
// A block is encoded in five steps, each of which needs the end of the one before it: sums over all
// lanes, a division, stores that are loaded again. None of that is long, but a processor that has
// nothing else to do waits for all of it. So a step of one block is followed by another step of
// another block, which has had the time of a whole round to get ready. It also keeps memory busy
// all the time: lines that are asked for, and those written around the caches, come in small
// groups.
template <Dtype kDtype, bool kStreaming>
class DenseEncoder {
  using Type = Float<kDtype>;
  static constexpr bool kShort = is_short(Type::kSymbolBits);

 public:
  DenseEncoder(const EncodeParams& params, const uint8_t* elements, uint32_t count, uint8_t* slabs,
               uint8_t* payload, EncodedBlock* encoded)
      : params_(params),
        elements_(elements),
        count_(count),
        slabs_(slabs),
        payload_(payload),
        encoded_(encoded) {}

  void run() {
    const uint32_t blocks = (count_ + frame::kBlockElements - 1) / frame::kBlockElements;
    for (uint32_t round = 0; round < blocks + 4; ++round) {
      // Blocks before the first have numbers beyond the last: they wrap around.
      if (round < blocks) {
        split(round);
      }
      ask_quarter(round, 0);
      if (round - 1 < blocks) {
        measure(round - 1);
      }
      ask_quarter(round, 1);
      if (round - 2 < blocks) {
        choose(round - 2);
      }
      ask_quarter(round, 2);
      if (round - 3 < blocks) {
        write_low_plane(round - 3);
      }
      ask_quarter(round, 3);
      if (round - 4 < blocks) {
        write_payload(round - 4);
      }
    }
  }

 private:
  void split(uint32_t b) {
    uint8_t* slab = slabs_ + b * Type::kSlabBytes;
    if (kStreaming && params_.touches_pages) {
      touch_pages_ahead(slab, Type::kSlabBytes);
    }
    ranges_[b] = split_block<kDtype, kStreaming>(elements_ + b * Type::kBlockBytes, slab,
                                                 plane1_[b % 2], symbols_[b]);
  }

  void measure(uint32_t b) {
    if constexpr (Type::kRestBits == 3) {  // its last plane has been waiting for whole lines
      uint8_t* to = slabs_ + b * Type::kSlabBytes + Type::kRestBytes - kPlane1Bytes;
      copy_lines<kStreaming>(to, plane1_[b % 2], kPlane1Bytes);
    }
    if constexpr (kShort) {
      distances_[b] = distances_of_short(symbols_[b], ranges_[b]);
    } else if (!params_.fast) {
      const uint32_t maximum = ranges_[b].maximum;
      distances_[b] = ranges_[b].minimum > 0 ? distances_of<false>(symbols_[b], maximum)
                                             : distances_of<true>(symbols_[b], maximum);
    }
  }

  // A row of long blocks keeps the processor's own prefetcher busy, which does better alone than
  // with lines asked for. Measured with AVX-512.
  void ask_quarter(uint32_t b, uint32_t quarter) const {
    ask_ahead<Type::kBlockBytes, Type::kWidth <= 2 ? kLinesAhead : 0>(params_, elements_, b,
                                                                      quarter);
  }

  void choose(uint32_t b) {
    choices_[b] = choice_of(b, guess_);
    guess_ = guess_after(choices_[b]);
  }

  Choice choice_of(uint32_t b, uint32_t guess) const {
    return params_.fast
               ? choose_fast<Type::kSymbolBits>(symbols_[b], ranges_[b], params_.center)
               : choose_canonical<Type::kSymbolBits>(symbols_[b], ranges_[b], distances_[b], guess);
  }

  void write_low_plane(uint32_t b) {
    encode_low_plane<Type::kSymbolBits, kStreaming>(
        symbols_[b], choices_[b], slabs_ + b * Type::kSlabBytes + Type::kRestBytes,
        pending_[b % 2]);
  }

  void write_payload(uint32_t b) {
    Choice& choice = choices_[b];
    if (!encode_payload(symbols_[b], choice, pending_[b % 2], deeper_, payload_)) [[unlikely]] {
      encode_anew(b);
    }
    payload_ += choice.units * frame::kUnitBytes;
    const uint32_t there = std::min(count_ - b * frame::kBlockElements, frame::kBlockElements);
    encoded_[b] = {choice.mode, choice.units, there - choice.nonzero, choice.center,
                   choice.center2};
  }

  // Without a guess.
  [[gnu::noinline]] void encode_anew(uint32_t b) {
    choices_[b] = choice_of(b, kNoGuess);
    guess_ = guess_after(choices_[b]);
    write_low_plane(b);
    encode_payload(symbols_[b], choices_[b], pending_[b % 2], deeper_, payload_);
  }

  // Symbols are loaded while a row is stored, and at first a processor compares the low 12 bits of
  // their addresses alone: so the rows begin in the other half of a page than the symbols.
  alignas(kPageBytes) Bytes symbols_[frame::kTileBlocks];
  uint8_t apart_[frame::kBlockElements];
  Pending pending_[2];
  Escapes deeper_;
  Range ranges_[frame::kTileBlocks];
  Distances distances_[frame::kTileBlocks];
  Choice choices_[frame::kTileBlocks];
  alignas(kLanes) uint8_t plane1_[2][kPlane1Bytes];
  const EncodeParams& params_;
  const uint8_t* const elements_;
  const uint32_t count_;
  uint8_t* const slabs_;
  uint8_t* payload_;
  EncodedBlock* const encoded_;
  uint32_t guess_ = kNoGuess;
};

template <Dtype kDtype, bool kStreaming>
void encode_dense(const EncodeParams& params, const void* elements, uint32_t count, uint8_t* slabs,
                  uint8_t* payloads, EncodedBlock* encoded) {
  DenseEncoder<kDtype, kStreaming>(params, static_cast<const uint8_t*>(elements), count, slabs,
                                   payloads, encoded)
      .run();
}

template <Dtype kDtype>
inline bool read_symbols(Symbols& symbols, const uint8_t* slab, const uint8_t* payload,
                         const CodedBlock& block, bool asks_lines) {
  using Type = Float<kDtype>;
  if (asks_lines) {
    constexpr uint32_t kFirst = kPlanesAtOnce<Type> ? 0 : Type::kBytePlanes * frame::kBlockElements;
    ask_lines(slab + kFirst, Type::kSlabBytes - kFirst, kShortPlanesAhead<Type>);
  }
  return decode_symbols<InDense<kDtype>>(symbols, slab + Type::kRestBytes, payload, block);
}

// A block's escapes are stored in a row and loaded from anywhere in it, which has to wait until
// they, and all stores before them, are in the cache. So a block is joined only when the next one's
// have been read.
template <Dtype kDtype, bool kStreaming>
bool decode_dense(const DecodeParams& params, uint8_t* out, const uint8_t* slabs,
                  const uint8_t* payloads, const frame::Record& record, uint32_t first,
                  uint32_t count) {
  using Type = Float<kDtype>;
  Symbols symbols[2];
  for (uint32_t round = 0; round < count + 1; ++round) {
    if (round < count) {
      const CodedBlock block = coded_block(record, first + round);
      if (params.asks_pages) {  // of slabs, by join_block: payloads are too short for it
        ask_lines(payloads, block.units * frame::kUnitBytes, kPrefetchShortBytes);
      }
      if (!read_symbols<kDtype>(symbols[round % 2], slabs + round * Type::kSlabBytes, payloads,
                                block, !params.asks_pages)) {
        return false;
      }
      payloads += block.units * frame::kUnitBytes;
    }
    if (round != 0) {
      const uint32_t b = round - 1;
      uint8_t* const block = out + b * Type::kBlockBytes;
      if (kStreaming && params.touches_pages) {
        touch_pages_ahead(block, Type::kBlockBytes);
      }
      join_block<kDtype, kStreaming>(block, slabs + b * Type::kSlabBytes, symbols[b % 2],
                                     params.asks_pages);
    }
  }
  return true;
}

// The high halves of a block of float32.
struct alignas(kLineBytes) Halves {
  uint8_t byte[2 * frame::kBlockElements];
};

template <bool kStreaming>
EncodedBlock encode_upcast(const EncodeParams& params, const void* elements, uint32_t count,
                           uint8_t* slab, uint8_t* payload) {
  Halves high;
  if (!take_high_halves<4>(static_cast<const uint8_t*>(elements), high.byte)) {
    return encode_literal<kStreaming>(params, elements, count, slab, payload);
  }
  EncodedBlock encoded;
  encode_dense<Dtype::kBf16, kStreaming>(params, high.byte, count, slab, payload, &encoded);
  return encoded;
}

template <bool kStreaming>
bool decode_upcast(const DecodeParams& params, uint8_t* out, const uint8_t* slab,
                   const uint8_t* payload, const CodedBlock& block) {
  if (block.mode == frame::kLiteral) {
    return decode_literal<kStreaming>(params, out, slab, payload, block);
  }
  Halves high;
  Symbols symbols;
  if (!read_symbols<Dtype::kBf16>(symbols, slab, payload, block, !params.asks_pages)) {
    return false;
  }
  join_block<Dtype::kBf16, false>(high.byte, slab, symbols, false);  // decode_one_by_one has asked
  put_high_halves<kStreaming>(out, high.byte);
  return true;
}

}  // namespace

bool high_halves(uint32_t width, const void* elements, uint8_t* high) {
  const auto* from = static_cast<const uint8_t*>(elements);
  return width == 4 ? take_high_halves<4>(from, high) : take_high_halves<8>(from, high);
}

bool hides_survivors(uint32_t width, const void* elements) {
  const auto* from = static_cast<const uint8_t*>(elements);
  return width == 4 ? hides_survivors_of<4>(from) : hides_survivors_of<8>(from);
}

EncodeBlocks dense_encoder(const EncodeParams& params) {
  return for_float<EncodeBlocks>(params.dtype, params.streaming,
                                 []<Dtype kDtype, bool kStreaming>() -> EncodeBlocks {
                                   return &encode_dense<kDtype, kStreaming>;
                                 });
}

DecodeBlocks dense_decoder(const DecodeParams& params) {
  return for_float<DecodeBlocks>(params.dtype, params.streaming,
                                 []<Dtype kDtype, bool kStreaming>() -> DecodeBlocks {
                                   return &decode_dense<kDtype, kStreaming>;
                                 });
}

EncodeBlocks upcast_encoder(const EncodeParams& params) {
  return for_streaming<EncodeBlocks>(params.streaming, []<bool kStreaming>() -> EncodeBlocks {
    return &encode_one_by_one<encode_upcast<kStreaming>>;
  });
}

DecodeBlocks upcast_decoder(const DecodeParams& params) {
  return for_streaming<DecodeBlocks>(params.streaming, []<bool kStreaming>() -> DecodeBlocks {
    return &decode_one_by_one<decode_upcast<kStreaming>>;
  });
}

}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
