// The counter-based generator ([Note: random numbers]).
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/TensorBase.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "backend.h"

namespace simdev {
namespace {

class CounterGenerator final : public c10::GeneratorImpl {
 public:
  explicit CounterGenerator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kDeviceType, device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "sim: a generator's state is ", kStateBytes, " bytes of uint8");
    std::memcpy(&seed_, state.data(), sizeof seed_);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof seed_);
    std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }
  CounterGenerator* clone_impl() const override {
    auto* clone = new CounterGenerator(device().index());
    clone->seed_ = seed_;
    clone->offset_ = offset_;
    return clone;
  }

 private:
  static constexpr int64_t kStateBytes = 16;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

uint64_t splitmix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) all->push_back(new_generator(i));
    return all;
  }();
  return generators->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

at::Generator new_generator(int device) {
  return at::make_generator<CounterGenerator>(device < 0 ? current_device()
                                                         : static_cast<c10::DeviceIndex>(device));
}

std::pair<uint64_t, uint64_t> generator_state(int device) {
  at::Generator generator = default_generator(device);
  const std::lock_guard lock(generator.mutex());
  return {generator.current_seed(), generator.get_offset()};
}

void set_generator_state(int device, uint64_t seed, uint64_t offset) {
  at::Generator generator = default_generator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
  generator.set_offset(offset);
}

uint64_t next_random_seed(const std::optional<at::Generator>& given) {
  at::Generator generator = given && given->defined() ? *given : default_generator(-1);
  const std::lock_guard lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 1);
  return splitmix64(generator.current_seed() + 0x9E3779B97F4A7C15ull * (offset + 1));
}

}  // namespace simdev
