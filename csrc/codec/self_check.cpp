#include "self_check.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "../device_streams.h"
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
  for (uint64_t coins = word >> 32 | 1 << 12; (coins & 1) == 0; coins >>= 1) {
    --exponent;
  }
  const uint64_t mantissa = random_word(~i) & ((uint64_t{1} << mantissa_bits) - 1);
  return (word >> 6 & 1) << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa;
}

// Zeros of both signs, and whole blocks of +0.
uint64_t sparse_bits(uint64_t i) {
  const uint64_t word = random_word(i + kElements);
  const bool zero = i / frame::kBlockElements % 4 == 3 || word % 3 != 0;
  return zero ? (word >> 20 & i / 4096 % 2) << 15 : float_bits<8, 7>(i);
}

constexpr std::array kSamples = {
    Sample{"bfloat16, dense", Dtype::kBf16, Shape::kDense, at::kBFloat16, &float_bits<8, 7>},
    Sample{"float16, dense", Dtype::kFp16, Shape::kDense, at::kHalf, &float_bits<5, 10>},
    Sample{"float32, dense", Dtype::kFp32, Shape::kDense, at::kFloat, &float_bits<8, 23>},
    Sample{"bfloat16, sparse", Dtype::kBf16, Shape::kSparse, at::kBFloat16, &sparse_bits},
    Sample{"float32, upcast", Dtype::kFp32, Shape::kUpcast, at::kFloat,
           [](uint64_t i) { return float_bits<8, 7>(i) << 16 | (i == 5000 ? 1 : 0); }},
    Sample{"bool, bits", Dtype::kBool, Shape::kBits, at::kBool,
           [](uint64_t i) { return random_word(i) & 1; }},
    Sample{"int32, ints", Dtype::kInt32, Shape::kInts, at::kInt,
           [](uint64_t i) { return i / 100 * 977 - 3000 + random_word(i) % 2000; }},
    Sample{"int64, ints", Dtype::kInt64, Shape::kInts, at::kLong,
           [](uint64_t i) { return (i - 700) * UINT64_C(0x100000001) + random_word(i) % 99; }},
    Sample{"uint8, raw", Dtype::kUint8, Shape::kRaw, at::kByte, &random_word},
};

at::Tensor make(const Sample& sample) {
  at::Tensor tensor = at::empty({kElements}, at::TensorOptions().dtype(sample.type));
  auto* to = static_cast<std::byte*>(tensor.mutable_data_ptr());
  const size_t width = tensor.itemsize();
  for (int64_t i = 0; i < kElements; ++i) {
    const uint64_t bits = sample.element(static_cast<uint64_t>(i));
    std::memcpy(to + i * width, &bits, width);
  }
  return tensor;
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
  if (!same_bits(decode_with(codec, frame, {kElements}, sample.type, /*check_decode=*/true).cpu(),
                 original)) {
    return "what it encoded and decoded is not what it was given";
  }
  // The frame leaves the device as well (ENCODE_SWAP to another codec, Frame.to_bytes).
  if (!same_bits(decode_tensor(portable_frame(on_host), {kElements}, sample.type, true),
                 original)) {
    return "the CPU's decoder does not read its frames";
  }
  return "";
}

std::string find_fault(const memswap_codec& codec, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutModes without_modes;
  const c10::DeviceGuard guard(device);
  for (const Sample& sample : kSamples) {
    std::string fault;
    try {
      fault = fault_of(codec, device, sample);
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (!fault.empty()) {
      return "codec '" + std::string(codec.name) + "' failed its self-check on " + device.str() +
             " (" + sample.name + "): " + fault +
             ". Nothing is encoded on this device; please report it, with the versions of driver "
             "and toolkit";
    }
  }
  return "";
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
  std::string fault = find_fault(codec, device);
  const std::lock_guard lock(all.mutex);
  return all.known.emplace(key, std::move(fault)).first->second;
}

}  // namespace memswap
