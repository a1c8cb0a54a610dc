// Layout sparse to frames, with portable vectors.
#include "vector.h"
#include "vector_sparse_payload.h"
#include "vector_survivors.h"

MEMSWAP_VECTOR_BEGIN

namespace memswap::cpu::MEMSWAP_ISA {
namespace {

using frame::Dtype;

// One block after the other. With blocks in flight, as avx512_sparse.cpp has them, each step takes
// the others' cache, and costs more than what it would wait for (measured with AVX2).
template <Dtype kDtype>
class SparseEncoder {
  using Type = Float<kDtype>;
  static constexpr uint32_t kWidth = Type::kWidth;

 public:
  SparseEncoder(const EncodeParams& params, const uint8_t* elements, uint32_t count,
                uint8_t* payload, EncodedBlock* encoded)
      : params_(params), elements_(elements), count_(count), payload_(payload), encoded_(encoded) {}

  void run() {
    const uint32_t blocks = (count_ + frame::kBlockElements - 1) / frame::kBlockElements;
    for (uint32_t b = 0; b < blocks; ++b) {
      survivors_.find(elements_of(b));
      ask_quarter(b, 0);
      choose_center();
      ask_quarter(b, 1);
      encode_codes();
      ask_quarter(b, 2);
      if (survivors_.has_negative_zero()) {
        survivors_.list_signs(elements_of(b), signs_);
      }
      split_escapes2(escapes_, center_, first_.byte, deeper_);
      write(b);
      ask_quarter(b, 3);
    }
  }

 private:
  const uint8_t* elements_of(uint32_t b) const { return elements_ + b * Type::kBlockBytes; }

  void ask_quarter(uint32_t b, uint32_t quarter) const {
    ask_ahead<Type::kBlockBytes, Survivors<kWidth>::kLinesAhead>(params_, elements_, b, quarter);
  }

  // The symbols, what shares their bytes, and c2.
  void choose_center() {
    const uint32_t vectors = survivors_.vectors();
    Vector highest{};
    for (uint32_t i = 0; i < vectors; ++i) {
      const Vector top = survivors_.cut(kLanes * i);
      take_rest<Type>(top, i, rest_);
      const Vector symbol = move_bits<Type::kRestBits, 0, Type::kSymbolBits>(top);
      symbols_.vector[i] = symbol;
      highest = maximum(highest, symbol);
    }
    const Crowd crowd =
        crowd_of_survivors<Type::kSymbolBits>(symbols_, vectors, highest_of(highest));
    center_ = center_of(crowd, canonical::kLq2Eighths);
  }

  // The stream of L0 codes, and the escapes.
  void encode_codes() {
    const uint32_t vectors = survivors_.vectors();
    const uint32_t behind = vectors * kLanes - survivors_.count();
    if (behind != 0) {  // these have code 0 and become the last escapes, which do not count
      symbols_.vector[vectors - 1] |= only(~first_lanes(kLanes - behind), broadcast(center_));
    }
    const Vector first = broadcast(static_cast<uint8_t>(center_ - 1u));
    uint8_t* end = escapes_.symbol.byte;
    for (uint32_t i = 0; i < vectors; ++i) {
      const Vector symbol = symbols_.vector[i];
      const Vector below_limit = minimum(first - symbol, broadcast(3));
      store_symbols2(codes_.byte + kLanes / 4 * i, (below_limit + 1) & 3);
      end = append(end, mask_of(equal(below_limit, broadcast(3))), symbol);
    }
    escapes_.end_at(end - behind, center_);
  }

  void write(uint32_t b) {
    SparseRows<kWidth> rows{survivors_.count(),
                            survivors_.bitmap(),
                            {},
                            rest_,
                            codes_,
                            survivors_.has_negative_zero(),
                            signs_,
                            center_,
                            escapes_,
                            first_,
                            deeper_};
    for (uint32_t p = 0; p < Type::kBytePlanes; ++p) {
      rows.plane[p] = survivors_.plane(p);
    }
    encoded_[b] = write_sparse<kDtype, 7>(params_, elements_, count_, b, rows, payload_);
    payload_ += encoded_[b].units * frame::kUnitBytes;
  }

  const EncodeParams& params_;
  const uint8_t* const elements_;
  const uint32_t count_;
  uint8_t* payload_;
  EncodedBlock* const encoded_;
  Survivors<kWidth> survivors_;
  uint8_t center_ = 0;
  Row rest_[2];  // the R bits that share the top byte with E, as streams
  Bytes symbols_;
  Row codes_;
  AlignedRow signs_;  // of the zeros, a byte for each
  alignas(kRowAlignment) Escapes escapes_;
  Row first_;  // S1 of the escapes
  Escapes deeper_;
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

}  // namespace memswap::cpu::MEMSWAP_ISA

MEMSWAP_VECTOR_END
