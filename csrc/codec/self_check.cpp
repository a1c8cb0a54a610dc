#include "self_check.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "lane/device_streams.h"
#include "memswap/frame.h"
#include "tensors.h"

namespace memswap {
namespace {

using frame::Dtype;
using frame::Shape;

// Two tiles and a part of a block.
constexpr int64_t kElements = 2 * frame::kTileElements + 700;

// splitmix64, as in the codec's own tests.
uint64_t random_word(uint64_t i) {
  uint64_t z = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

struct Sample {
  const char* name;
  Dtype dtype;
  Shape shape;
  at::ScalarType type;
  uint64_t (*element)(uint64_t i);
};

// A float of `exponent_bits` and `mantissa_bits`: octaves below a largest one, each half as likely,
// and one in 64 elements of any bits at all.
template <uint32_t exponent_bits, uint32_t mantissa_bits>
uint64_t float_bits(uint64_t i) {
  const uint64_t word = random_word(i);
  if (word % 64 == 0) {
    return word >> 8;
  }
  uint64_t exponent = (uint64_t{1} << (exponent_bits - 1)) - 1;
  for (uint64_t coins = word >> 32 | 1 << 12; (coins & 1) == 0 && exponent > 0; coins >>= 1) {
    --exponent;
  }
  const uint64_t mantissa = random_word(~i) & ((uint64_t{1} << mantissa_bits) - 1);
  return (word >> 6 & 1) << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa;
}

// Zeros of both signs, and whole blocks of +0.
template <uint32_t exponent_bits, uint32_t mantissa_bits>
uint64_t sparse_bits(uint64_t i) {
  const uint64_t word = random_word(i + kElements);
  const bool zero = i / frame::kBlockElements % 4 == 3 || word % 3 != 0;
  return zero ? (word >> 20 & i / 4096 % 2) << (exponent_bits + mantissa_bits)
              : float_bits<exponent_bits, mantissa_bits>(i);
}

// Blocks around 0, around the least signed integer, and from that one on: distances and sums pass
// both ends of the range.
template <uint32_t bits>
uint64_t integer_bits(uint64_t i) {
  constexpr uint64_t most = bits == 8 ? 60 : 20000;
  const uint64_t kind = i / frame::kBlockElements % 3;
  const uint64_t middle = kind == 0 ? 0 : uint64_t{1} << (bits - 1);
  return middle - (kind == 2 ? 0 : most / 2) + random_word(i) % most;
}

// One per kernel that a backend may have: the shapes of every dtype.
constexpr std::array kSamples = {
    Sample{"bfloat16, dense", Dtype::kBf16, Shape::kDense, at::kBFloat16, &float_bits<8, 7>},
    Sample{"float16, dense", Dtype::kFp16, Shape::kDense, at::kHalf, &float_bits<5, 10>},
    Sample{"float32, dense", Dtype::kFp32, Shape::kDense, at::kFloat, &float_bits<8, 23>},
    Sample{"float64, dense", Dtype::kFp64, Shape::kDense, at::kDouble, &float_bits<11, 52>},
    Sample{"float8_e4m3fn, dense", Dtype::kE4m3, Shape::kDense, at::kFloat8_e4m3fn,
           &float_bits<4, 3>},
    Sample{"float8_e5m2, dense", Dtype::kE5m2, Shape::kDense, at::kFloat8_e5m2, &float_bits<5, 2>},
    Sample{"bfloat16, sparse", Dtype::kBf16, Shape::kSparse, at::kBFloat16, &sparse_bits<8, 7>},
    Sample{"float16, sparse", Dtype::kFp16, Shape::kSparse, at::kHalf, &sparse_bits<5, 10>},
    Sample{"float32, sparse", Dtype::kFp32, Shape::kSparse, at::kFloat, &sparse_bits<8, 23>},
    Sample{"float64, sparse", Dtype::kFp64, Shape::kSparse, at::kDouble, &sparse_bits<11, 52>},
    Sample{"float8_e4m3fn, sparse", Dtype::kE4m3, Shape::kSparse, at::kFloat8_e4m3fn,
           &sparse_bits<4, 3>},
    Sample{"float8_e5m2, sparse", Dtype::kE5m2, Shape::kSparse, at::kFloat8_e5m2,
           &sparse_bits<5, 2>},
    Sample{"float32, upcast", Dtype::kFp32, Shape::kUpcast, at::kFloat,
           [](uint64_t i) { return float_bits<8, 7>(i) << 16 | (i == 5000 ? 1 : 0); }},
    Sample{"bool, bits", Dtype::kBool, Shape::kBits, at::kBool,
           [](uint64_t i) { return random_word(i) & 1; }},
    Sample{"bool in runs, bits", Dtype::kBool, Shape::kBits, at::kBool,
           [](uint64_t i) { return i / 700 & 1; }},
    Sample{"int8, ints", Dtype::kInt8, Shape::kInts, at::kChar, &integer_bits<8>},
    Sample{"uint8, ints", Dtype::kUint8, Shape::kInts, at::kByte, &integer_bits<8>},
    Sample{"int16, ints", Dtype::kInt16, Shape::kInts, at::kShort, &integer_bits<16>},
    Sample{"uint16, ints", Dtype::kUint16, Shape::kInts, at::kUInt16, &integer_bits<16>},
    Sample{"int32, ints", Dtype::kInt32, Shape::kInts, at::kInt, &integer_bits<32>},
    Sample{"uint32, ints", Dtype::kUint32, Shape::kInts, at::kUInt32, &integer_bits<32>},
    Sample{"int64, ints", Dtype::kInt64, Shape::kInts, at::kLong,
           [](uint64_t i) { return (i - 700) * UINT64_C(0x100000001) + random_word(i) % 99; }},
    Sample{"int64 at its ends, ints", Dtype::kInt64, Shape::kInts, at::kLong, &integer_bits<64>},
    Sample{"uint64, ints", Dtype::kUint64, Shape::kInts, at::kUInt64, &integer_bits<64>},
    Sample{"uint8, raw", Dtype::kUint8, Shape::kRaw, at::kByte, &random_word},
    Sample{"int16, raw", Dtype::kInt16, Shape::kRaw, at::kShort, &random_word},
    Sample{"int32, raw", Dtype::kInt32, Shape::kRaw, at::kInt, &random_word},
    Sample{"int64, raw", Dtype::kInt64, Shape::kRaw, at::kLong, &random_word},
};

// The sample's elements as bytes, which every device can be given.
at::Tensor make(const Sample& sample) {
  const auto width = static_cast<int64_t>(frame::width_of(sample.dtype));
  at::Tensor tensor = at::empty({kElements * width}, at::TensorOptions().dtype(at::kByte));
  auto* to = static_cast<std::byte*>(tensor.mutable_data_ptr());
  for (int64_t i = 0; i < kElements; ++i) {
    const uint64_t bits = sample.element(static_cast<uint64_t>(i));
    std::memcpy(to + i * width, &bits, static_cast<size_t>(width));
  }
  return tensor;
}

// Nobody has tensors of a dtype that the device does not know (float8 on some).
bool exists_on(c10::Device device, at::ScalarType type) {
  try {
    at::empty({1}, at::TensorOptions(device).dtype(type));
    return true;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception&) {
    return false;
  }
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// What went wrong with a sample; empty if nothing did.
std::string fault_of(const memswap_codec& codec, c10::Device device, const Sample& sample) {
  const at::Tensor original = make(sample);
  const auto dtype = static_cast<int64_t>(sample.dtype);
  const auto shape = static_cast<int64_t>(sample.shape);
  const at::Tensor frame = encode_with(codec, original.to(device), dtype, shape, /*checksum=*/true);
  const at::Tensor on_host = frame.cpu();
  const at::Tensor back =
      decode_with(codec, frame, {kElements}, sample.type, /*check_decode=*/true);
  if (!same_bits(back.view(at::kByte).cpu(), original)) {
    return "what it encoded and decoded is not what it was given";
  }
  // The frame leaves the device as well (ENCODE_SWAP to another codec, Frame.to_bytes).
  if (!same_bits(decode_tensor(portable_frame(on_host), {kElements}, sample.type, true),
                 original)) {
    return "the CPU's decoder does not read its frames";
  }
  return "";
}

// All samples, also behind one that failed: which they are says what is wrong.
std::string find_fault(const memswap_codec& codec, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutModes without_modes;
  const c10::DeviceGuard guard(device);
  std::string first, others;
  for (const Sample& sample : kSamples) {
    std::string fault;
    try {
      if (!exists_on(device, sample.type)) {
        continue;
      }
      fault = fault_of(codec, device, sample);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (fault.empty()) {
      continue;
    }
    if (first.empty()) {
      first = "(" + std::string(sample.name) + "): " + fault;
    } else {
      others += (others.empty() ? "" : "; ") + std::string(sample.name);
    }
  }
  if (first.empty()) {
    return "";
  }
  return "codec '" + std::string(codec.name) + "' failed its self-check on " + device.str() + " " +
         first + (others.empty() ? "" : ". It failed for these as well: " + others) +
         ". Nothing is encoded on this device; please report it, with the versions of driver and "
         "toolkit";
}

struct Verdicts {
  std::mutex mutex;
  std::map<std::pair<const memswap_codec*, c10::DeviceIndex>, std::string> known;
};

// Of this process: they are about libraries and hardware, not about a model.
Verdicts& verdicts() {
  static Verdicts all;
  return all;
}

}  // namespace

std::string distrust(const memswap_codec& codec, c10::Device device) {
  if (codec.check_first == 0) {
    return "";
  }
  Verdicts& all = verdicts();
  const std::pair key(&codec, device.index());
  {
    const std::lock_guard lock(all.mutex);
    if (const auto found = all.known.find(key); found != all.known.end()) {
      return found->second;
    }
  }
  // Two threads may both check; they find the same.
  std::string fault;
  try {
    fault = find_fault(codec, device);
  } catch (const c10::OutOfMemoryError&) {
    // Says nothing about the codec: asked again, it checks again.
    return "codec '" + std::string(codec.name) + "' found no memory on " + device.str() +
           " for its self-check";
  }
  const std::lock_guard lock(all.mutex);
  return all.known.emplace(key, std::move(fault)).first->second;
}

}  // namespace memswap
