#include "self_check.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "backends.h"
#include "lane/device_streams.h"
#include "memswap/frame.h"
#include "tensors.h"

namespace memswap {
namespace {

using frame::Dtype;
using frame::Layout;

// A tile, and one of a whole block and a part of one.
constexpr int64_t kElements = frame::kTileElements + frame::kBlockElements + 700;

// splitmix64, as in the codec's own tests.
uint64_t random_word(uint64_t i) {
  uint64_t z = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

using Element = uint64_t (*)(uint64_t i);

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

// Blocks around 0, around the least signed integer, from that one on, and a slope: distances and
// sums pass both ends of the range.
template <uint32_t bits>
uint64_t integer_bits(uint64_t i) {
  constexpr uint64_t most = bits == 8 ? 60 : 20000;
  const uint64_t kind = i / frame::kBlockElements % 4;
  if (kind == 3) {
    return (i - 700) * UINT64_C(0x100000001) + random_word(i) % 99;
  }
  const uint64_t middle = kind == 0 ? 0 : uint64_t{1} << (bits - 1);
  return middle - (kind == 2 ? 0 : most / 2) + random_word(i) % most;
}

// Masks: random ones, and in runs.
uint64_t mask_bits(uint64_t i) {
  return (i / frame::kBlockElements % 2 == 0 ? random_word(i) : i / 700) & 1;
}

// bfloat16 in float32, but for one element.
uint64_t upcast_bits(uint64_t i) { return float_bits<8, 7>(i) << 16 | (i == 5000 ? 1 : 0); }

struct Elements {
  const char* name;
  Dtype dtype;
  at::ScalarType type;
  Element dense, sparse, integers;
};

template <uint32_t exponent_bits, uint32_t mantissa_bits>
constexpr Elements floats(const char* name, Dtype dtype, at::ScalarType type) {
  return {name,
          dtype,
          type,
          &float_bits<exponent_bits, mantissa_bits>,
          &sparse_bits<exponent_bits, mantissa_bits>,
          &integer_bits<1 + exponent_bits + mantissa_bits>};
}

template <uint32_t bits>
constexpr Elements others(const char* name, Dtype dtype, at::ScalarType type) {
  return {name, dtype, type, nullptr, nullptr, &integer_bits<bits>};
}

// Dtypes 16 to 19, of which torch has none on every device, have the kernels of the unsigned ones.
constexpr std::array kDtypes = {
    floats<8, 7>("bfloat16", Dtype::kBf16, at::kBFloat16),
    floats<5, 10>("float16", Dtype::kFp16, at::kHalf),
    floats<8, 23>("float32", Dtype::kFp32, at::kFloat),
    floats<11, 52>("float64", Dtype::kFp64, at::kDouble),
    floats<4, 3>("float8_e4m3fn", Dtype::kE4m3, at::kFloat8_e4m3fn),
    floats<5, 2>("float8_e5m2", Dtype::kE5m2, at::kFloat8_e5m2),
    others<8>("bool", Dtype::kBool, at::kBool),
    others<8>("int8", Dtype::kInt8, at::kChar),
    others<8>("uint8", Dtype::kUint8, at::kByte),
    others<16>("int16", Dtype::kInt16, at::kShort),
    others<16>("uint16", Dtype::kUint16, at::kUInt16),
    others<32>("int32", Dtype::kInt32, at::kInt),
    others<32>("uint32", Dtype::kUint32, at::kUInt32),
    others<64>("int64", Dtype::kInt64, at::kLong),
    others<64>("uint64", Dtype::kUint64, at::kUInt64),
};

// The dtype whose verdict serves `dtype`.
Dtype checked_as(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBits8:
      return Dtype::kUint8;
    case Dtype::kBits16:
      return Dtype::kUint16;
    case Dtype::kBits32:
      return Dtype::kUint32;
    case Dtype::kBits64:
      return Dtype::kUint64;
    default:
      return dtype;
  }
}

struct LayoutName {
  Layout layout;
  const char* name;
};
constexpr std::array kLayouts = {
    LayoutName{Layout::kDense, "dense"}, LayoutName{Layout::kSparse, "sparse"},
    LayoutName{Layout::kBits, "bits"},   LayoutName{Layout::kInts, "ints"},
    LayoutName{Layout::kRaw, "raw"},     LayoutName{Layout::kUpcast, "upcast"},
};
static_assert(kLayouts.size() == static_cast<size_t>(frame::kLastLayout) + 1);

Element element_of(const Elements& elements, Layout layout) {
  switch (layout) {
    case Layout::kDense:
      return elements.dense;
    case Layout::kSparse:
      return elements.sparse;
    case Layout::kUpcast:
      return &upcast_bits;
    case Layout::kBits:
      return &mask_bits;
    case Layout::kInts:
      return elements.integers;
    default:
      return &random_word;
  }
}

// The elements as bytes, which every device can be given.
at::Tensor make(Dtype dtype, Element element) {
  const auto width = static_cast<int64_t>(frame::width_of(dtype));
  at::Tensor tensor = at::empty({kElements * width}, at::TensorOptions().dtype(at::kByte));
  auto* to = static_cast<std::byte*>(tensor.mutable_data_ptr());
  for (int64_t i = 0; i < kElements; ++i) {
    const uint64_t bits = element(static_cast<uint64_t>(i));
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

// What went wrong with a sample of a dtype and a layout; empty if nothing did.
std::string fault_of(const memswap_codec& codec, c10::Device device, const Elements& elements,
                     Layout layout) {
  const at::Tensor original = make(elements.dtype, element_of(elements, layout));
  const at::Tensor frame =
      encode_with(codec, original.to(device), static_cast<int64_t>(elements.dtype),
                  static_cast<int64_t>(layout), /*checksum=*/true);
  const at::Tensor on_host = frame.cpu();
  const at::Tensor back = decode_with(codec, frame, {kElements}, elements.type,
                                      /*check_decode=*/true);
  if (!same_bits(back.view(at::kByte).cpu(), original)) {
    return "what it encoded and decoded is not what it was given";
  }
  // The frame leaves the device as well (ENCODE_SWAP to another codec, Frame.to_bytes).
  if (!same_bits(decode_tensor(portable_frame(on_host), {kElements}, elements.type, true),
                 original)) {
    return "the CPU's decoder does not read its frames";
  }
  return "";
}

std::string failed(const memswap_codec& codec, c10::Device device) {
  return "codec '" + std::string(codec.name) + "' failed its self-check on " + device.str();
}

constexpr const char* kReport =
    "please report it, with the versions of driver and toolkit, and see `python -m memswap info`";

// What a check of one codec on one device found: where nothing is said, nothing is wrong.
class Verdict {
 public:
  Verdict(const memswap_codec& codec, c10::Device device) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const WithoutModes without_modes;
    const c10::DeviceGuard guard(device);
    std::vector<std::pair<std::string, std::string>> alike;  // a fault, and what has it
    for (const Elements& elements : kDtypes) {
      if (!exists_on(device, elements.type)) {
        continue;
      }
      for (const auto& [layout, name] : kLayouts) {
        if (frame::layout_fits(elements.dtype, layout)) {
          note(codec, device, elements, layout, name, alike);
        }
      }
    }
    for (const auto& [fault, names] : alike) {
      summary_.push_back(failed(codec, device) + " for " + names + ": " + fault);
    }
  }

  std::string of(Dtype dtype, Layout layout) const {
    const auto found = faults_.find({checked_as(dtype), layout});
    return found == faults_.end() ? "" : found->second;
  }

  const std::vector<std::string>& summary() const { return summary_; }

 private:
  // Goes on behind one that failed: which they are says what is wrong.
  void note(const memswap_codec& codec, c10::Device device, const Elements& elements, Layout layout,
            const char* layout_name, std::vector<std::pair<std::string, std::string>>& alike) {
    std::string fault;
    try {
      fault = fault_of(codec, device, elements, layout);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (fault.empty()) {
      return;
    }
    const std::string name = std::string(elements.name) + " " + layout_name;
    faults_[{elements.dtype, layout}] = failed(codec, device) + " for " + name + ": " + fault +
                                        ". Nothing of that dtype and layout is encoded on this "
                                        "device; " +
                                        kReport;
    const auto known = std::find_if(alike.begin(), alike.end(),
                                    [&](const auto& other) { return other.first == fault; });
    if (known == alike.end()) {
      alike.emplace_back(fault, name);
    } else {
      known->second += ", " + name;
    }
  }

  std::map<std::pair<Dtype, Layout>, std::string> faults_;
  std::vector<std::string> summary_;
};

// Of this process: they are about libraries and hardware, not about a model.
struct Verdicts {
  std::mutex mutex;
  std::map<std::pair<const memswap_codec*, c10::DeviceIndex>, std::unique_ptr<const Verdict>> known;
};

Verdicts& verdicts() {
  static Verdicts all;
  return all;
}

// Throws c10::OutOfMemoryError where there was none for the check: asked again, it checks again.
const Verdict& verdict(const memswap_codec& codec, c10::Device device) {
  Verdicts& all = verdicts();
  const std::pair key(&codec, device.index());
  {
    const std::lock_guard lock(all.mutex);
    if (const auto found = all.known.find(key); found != all.known.end()) {
      return *found->second;
    }
  }
  // Two threads may both check; they find the same.
  auto found = std::make_unique<const Verdict>(codec, device);
  const std::lock_guard lock(all.mutex);
  return *all.known.emplace(key, std::move(found)).first->second;
}

std::string no_memory(const memswap_codec& codec, c10::Device device) {
  return "codec '" + std::string(codec.name) + "' found no memory on " + device.str() +
         " for its self-check";
}

}  // namespace

std::string distrust(const memswap_codec& codec, c10::Device device, uint8_t dtype,
                     uint8_t layout) {
  if (codec.check_first == 0) {
    return "";
  }
  try {
    return verdict(codec, device).of(static_cast<Dtype>(dtype), static_cast<Layout>(layout));
  } catch (const c10::OutOfMemoryError&) {
    return no_memory(codec, device);
  }
}

std::string codec_fault(c10::Device device, uint8_t dtype, uint8_t layout) {
  const memswap_codec* const codec = codec_of(device.type());
  return codec ? distrust(*codec, device, dtype, layout) : "no codec serves the device";
}

std::vector<std::string> codec_faults(c10::Device device) {
  const memswap_codec* const codec = codec_of(device.type());
  if (codec == nullptr || codec->check_first == 0) {
    return {};
  }
  try {
    return verdict(*codec, device).summary();
  } catch (const c10::OutOfMemoryError&) {
    return {no_memory(*codec, device)};
  }
}

}  // namespace memswap
