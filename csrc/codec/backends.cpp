#include "backends.h"

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>

namespace memswap {
namespace {

constexpr auto kTypes = static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

// Read at every encode, from any thread; written once per backend.
struct Table {
  Table() {
    entries[static_cast<size_t>(c10::DeviceType::CPU)] = memswap_codec_cpu();
#if defined(MEMSWAP_WITH_CUDA_CODEC)
    entries[static_cast<size_t>(c10::DeviceType::CUDA)] = memswap_codec_cuda();
#endif
#if defined(MEMSWAP_WITH_ASCEND_CODEC)
    // torch_npu's device type; a build with CANN is for no other device of that type.
    entries[static_cast<size_t>(c10::DeviceType::PrivateUse1)] = memswap_codec_ascend();
#endif
  }
  std::array<std::atomic<const memswap_codec*>, kTypes> entries{};
};

Table& table() {
  static Table known;
  return known;
}

}  // namespace

const memswap_codec* codec_of(c10::DeviceType type) {
  return table().entries[static_cast<size_t>(type)].load(std::memory_order_acquire);
}

void register_codec(c10::DeviceType type, const memswap_codec* codec) {
  if (codec == nullptr || codec->version != MEMSWAP_CODEC_VERSION) {
    throw std::invalid_argument("register_codec: expected a memswap_codec of version " +
                                std::to_string(MEMSWAP_CODEC_VERSION) + ", found " +
                                (codec ? std::to_string(codec->version) : "none"));
  }
  const memswap_codec* found = nullptr;
  auto& entry = table().entries[static_cast<size_t>(type)];
  if (!entry.compare_exchange_strong(found, codec, std::memory_order_acq_rel) && found != codec) {
    throw std::invalid_argument("register_codec: " + c10::DeviceTypeName(type) +
                                " is served by codec '" + found->name + "' already");
  }
}

void check_codec(const memswap_codec& codec, int code, const std::string& attempted) {
  if (code != MEMSWAP_CODEC_OK) {
    throw std::runtime_error("memswap: codec '" + std::string(codec.name) + "' did not " +
                             attempted + ": " + codec.message(code));
  }
}

}  // namespace memswap
