#include "data.h"

#include <cmath>
#include <cstring>
#include <random>

namespace memswap::bench {

namespace {

using frame::Dtype;

constexpr size_t kRow = 2048;  // channels, or keys of an attention row

// Rounds towards zero: what the low bits are does not matter here.
uint64_t to_bits(Dtype dtype, float value) {
  uint32_t single;
  memcpy(&single, &value, sizeof single);
  const uint32_t sign = single >> 31;
  const int exponent = static_cast<int>(single >> 23 & 255) - 127;
  const uint32_t mantissa = single & 0x7fffff;
  const auto small = [&](int exponent_bits, int mantissa_bits) -> uint64_t {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int biased = exponent + bias;
    if (biased <= 0) {
      return uint64_t{sign} << (exponent_bits + mantissa_bits);
    }
    const int largest = (1 << exponent_bits) - 2;
    return uint64_t{sign} << (exponent_bits + mantissa_bits) |
           static_cast<uint64_t>(biased < largest ? biased : largest) << mantissa_bits |
           mantissa >> (23 - mantissa_bits);
  };
  switch (dtype) {
    case Dtype::kBf16:
      return single >> 16;
    case Dtype::kFp16:
      return small(5, 10);
    case Dtype::kE4m3:
      return small(4, 3);
    case Dtype::kE5m2:
      return small(5, 2);
    case Dtype::kFp64: {
      const double wide = value;
      uint64_t bits;
      memcpy(&bits, &wide, sizeof bits);
      return bits;
    }
    default:
      return single;
  }
}

class Generator {
 public:
  explicit Generator(Kind kind) : kind_(kind) {
    for (float& scale : scales_) {
      scale = std::exp2(1.5f * normal_(random_));
    }
  }

  float value(size_t i) {
    switch (kind_) {
      case Kind::kActivations: {
        const float x = normal_(random_) * scales_[i % kRow];
        return i / kRow % 4 == 0 ? x * normal_(random_) : x;  // a quarter: gated products
      }
      case Kind::kSoftmax:
        return i % kRow > i / kRow % kRow ? 0.0f : std::exp(1.5f * normal_(random_) - 7.0f);
      case Kind::kDropout: {
        const float x = normal_(random_);
        return (random_() & 1) != 0 ? x * 0.0f : x * 2.0f;
      }
      default:
        return normal_(random_);
    }
  }

  uint64_t integer(size_t i) {
    switch (kind_) {
      case Kind::kMask:
        return i % kRow > i / kRow % kRow;
      case Kind::kTokens:
        return random_() % 50257;
      default:
        return random_();
    }
  }

 private:
  Kind kind_;
  std::mt19937_64 random_{1};
  std::normal_distribution<float> normal_;
  float scales_[kRow];
};

double entropy_of(const std::vector<uint64_t>& counts, size_t total) {
  double bits = 0;
  for (const uint64_t count : counts) {
    if (count != 0) {
      const double share = static_cast<double>(count) / static_cast<double>(total);
      bits -= share * std::log2(share);
    }
  }
  return bits;
}

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kNormal:
      return "normal";
    case Kind::kActivations:
      return "activations";
    case Kind::kSoftmax:
      return "softmax";
    case Kind::kDropout:
      return "dropout";
    case Kind::kUpcast:
      return "upcast";
    case Kind::kMask:
      return "mask";
    case Kind::kTokens:
      return "tokens";
    case Kind::kRandom:
      return "random";
  }
  return "";
}

std::vector<uint8_t> make_tensor(Dtype dtype, Kind kind, size_t bytes) {
  const uint32_t width = frame::width_of(dtype);
  // Drawing is slow: a few million elements, repeated.
  const size_t distinct = std::min<size_t>(bytes, size_t{8} << 20);
  std::vector<uint8_t> tensor(bytes);
  Generator generator(kind);
  const bool is_float =
      frame::split_of(dtype).exponent_bits != 0 && kind != Kind::kRandom && kind != Kind::kMask;
  for (size_t i = 0; i * width < distinct; ++i) {
    uint64_t element = is_float ? to_bits(dtype, generator.value(i)) : generator.integer(i);
    if (kind == Kind::kUpcast) {
      element &= 0xffff0000;
    }
    memcpy(tensor.data() + i * width, &element, width);
  }
  for (size_t done = distinct; done < bytes; done += distinct) {
    memcpy(tensor.data() + done, tensor.data(), std::min(distinct, bytes - done));
  }
  return tensor;
}

double entropy_ratio(Dtype dtype, const std::vector<uint8_t>& tensor) {
  const frame::Split split = frame::split_of(dtype);
  const size_t elements = tensor.size() / split.width;
  const double raw_bits = 8.0 * split.width;
  std::vector<uint64_t> counts(259);
  if (split.exponent_bits == 0) {
    if (split.width != 1) {
      return 0;
    }
    for (const uint8_t byte : tensor) {
      ++counts[byte];
    }
    return raw_bits / entropy_of(counts, elements);
  }
  const uint32_t bits = 8 * split.width;
  const uint64_t sign = uint64_t{1} << (bits - 1);
  for (size_t i = 0; i < elements; ++i) {
    uint64_t element = 0;
    memcpy(&element, tensor.data() + i * split.width, split.width);
    if ((element & ~sign) == 0) {
      ++counts[element == 0 ? 256 : 257];
    } else {
      ++counts[(element & ~sign) >> (bits - 1 - split.exponent_bits)];
    }
  }
  const uint64_t zeros = counts[256] + counts[257];
  const double present = 1.0 - static_cast<double>(zeros) / static_cast<double>(elements);
  return raw_bits / (entropy_of(counts, elements) + present * (bits - split.exponent_bits));
}

}  // namespace memswap::bench
