// LocalTensor and GlobalTensor: typed views that know their bounds and, in UB, their buffer's life.
#pragma once

#include <cstring>

#include "core.h"
#include "scalar_types.h"

namespace ascend_emulator {

template <class T>
const char* type_name() {
  if constexpr (std::is_same_v<T, half>)
    return "half";
  else if constexpr (std::is_same_v<T, bfloat16_t>)
    return "bfloat16_t";
  else if constexpr (std::is_same_v<T, float>)
    return "float";
  else if constexpr (std::is_same_v<T, int8_t>)
    return "int8_t";
  else if constexpr (std::is_same_v<T, uint8_t>)
    return "uint8_t";
  else if constexpr (std::is_same_v<T, int16_t>)
    return "int16_t";
  else if constexpr (std::is_same_v<T, uint16_t>)
    return "uint16_t";
  else if constexpr (std::is_same_v<T, int32_t>)
    return "int32_t";
  else if constexpr (std::is_same_v<T, uint32_t>)
    return "uint32_t";
  else if constexpr (std::is_same_v<T, int64_t>)
    return "int64_t";
  else
    return "uint64_t";
}

template <class T>
std::string call_name(const char* operation) {
  return std::string(operation) + "<" + type_name<T>() + ">";
}

}  // namespace ascend_emulator

namespace AscendC {

template <class T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;
  LocalTensor(int buffer, uint32_t generation, uint64_t begin, uint64_t bytes)
      : buffer_(buffer), generation_(generation), begin_(begin), bytes_(bytes) {}

  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(buffer_, generation_, begin_, bytes_);
  }

  T GetValue(uint32_t index) const {
    const std::string call = ascend_emulator::call_name<T>("LocalTensor.GetValue");
    const uint64_t address = element(call, index);
    T value;
    ascend_emulator::core().issue(
        PIPE_S, call,
        {ascend_emulator::access_range(ascend_emulator::Space::kUnified, false, address,
                                       address + sizeof(T))},
        [&] { std::memcpy(&value, ascend_emulator::core().ub(address), sizeof(T)); });
    return value;
  }

  template <class V>
  void SetValue(uint32_t index, V value) const {
    const std::string call = ascend_emulator::call_name<T>("LocalTensor.SetValue");
    const uint64_t address = element(call, index);
    const T converted = static_cast<T>(value);
    ascend_emulator::core().issue(
        PIPE_S, call,
        {ascend_emulator::access_range(ascend_emulator::Space::kUnified, true, address,
                                       address + sizeof(T))},
        [&] { std::memcpy(ascend_emulator::core().ub(address), &converted, sizeof(T)); });
  }

  LocalTensor operator[](uint32_t offset) const {
    if (offset * sizeof(T) > bytes_) {
      ascend_emulator::violate("unified bounds", "LocalTensor[]", "element ", offset, " of ",
                               GetSize());
    }
    return LocalTensor(buffer_, generation_, begin_ + offset * sizeof(T),
                       bytes_ - offset * sizeof(T));
  }

  uint64_t GetPhyAddr(uint32_t offset = 0) const { return begin_ + offset * sizeof(T); }
  uint32_t GetSize() const { return static_cast<uint32_t>(bytes_ / sizeof(T)); }
  uint32_t GetLength() const { return static_cast<uint32_t>(bytes_); }
  void SetSize(uint32_t elements) {
    if (elements * sizeof(T) > bytes_) {
      ascend_emulator::violate("unified bounds", "LocalTensor.SetSize", elements, " elements in ",
                               bytes_, " bytes");
    }
    bytes_ = elements * sizeof(T);
  }

  // Address of `bytes` bytes that an operation may touch now; raises otherwise.
  uint64_t use(const std::string& call, uint64_t offset, uint64_t bytes) const {
    if (buffer_ < 0) {
      ascend_emulator::violate("queue", call, "a tensor without a buffer");
    }
    const ascend_emulator::Buffer& buffer =
        ascend_emulator::core().buffers[static_cast<size_t>(buffer_)];
    if (buffer.generation != generation_) {
      ascend_emulator::violate("queue", call, "a tensor used after FreeTensor: generation ",
                               generation_, ", the buffer is at ", buffer.generation);
    }
    if (buffer.state == ascend_emulator::Buffer::State::kEnqueued) {
      ascend_emulator::violate("queue", call,
                               "a tensor used while it is enqueued, expected DeQue first");
    }
    if (offset + bytes > bytes_) {
      ascend_emulator::violate("unified bounds", call, "bytes ", offset, " to ", offset + bytes,
                               " of a tensor of ", bytes_, " bytes");
    }
    return begin_ + offset;
  }

  int buffer() const { return buffer_; }
  uint32_t generation() const { return generation_; }

 private:
  uint64_t element(const std::string& call, uint32_t index) const {
    const uint64_t address = use(call, index * sizeof(T), sizeof(T));
    if (address % sizeof(T) != 0) {
      ascend_emulator::violate("alignment", call, "address ", address, ", expected a multiple of ",
                               sizeof(T));
    }
    return address;
  }

  int buffer_ = -1;
  uint32_t generation_ = 0;
  uint64_t begin_ = 0;
  uint64_t bytes_ = 0;
};

enum class CacheMode : uint8_t { CACHE_MODE_DISABLE, CACHE_MODE_NORMAL };
enum class CacheRwMode : uint8_t { READ, WRITE, RW };
enum class CacheLine : uint8_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint8_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

template <class T>
class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(T* pointer, uint64_t elements) {
    begin_ = reinterpret_cast<uint64_t>(pointer);
    bytes_ = elements * sizeof(T);
  }
  void SetGlobalBuffer(T* pointer) {
    begin_ = reinterpret_cast<uint64_t>(pointer);
    bytes_ = ~uint64_t{0} - begin_;
  }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor tensor;
    if (offset * sizeof(T) > bytes_) {
      ascend_emulator::violate("global bounds", "GlobalTensor[]", "element ", offset, " of ",
                               GetSize());
    }
    tensor.begin_ = begin_ + offset * sizeof(T);
    tensor.bytes_ = bytes_ - offset * sizeof(T);
    return tensor;
  }
  uint64_t GetSize() const { return bytes_ / sizeof(T); }
  const T* GetPhyAddr(uint64_t offset = 0) const {
    return reinterpret_cast<const T*>(begin_ + offset * sizeof(T));
  }
  template <CacheRwMode mode = CacheRwMode::RW>
  void SetL2CacheHint(CacheMode) {}

  T GetValue(uint64_t index) const {
    ascend_emulator::Core& core = ascend_emulator::core();
    const std::string call = ascend_emulator::call_name<T>("GlobalTensor.GetValue");
    const uint64_t address = use(call, index * sizeof(T), sizeof(T));
    core.global_memory.note_read(call, address, sizeof(T), core.block);
    T value;
    core.issue(PIPE_S, call,
               {ascend_emulator::access_range(ascend_emulator::Space::kGlobal, false, address,
                                              address + sizeof(T))},
               [&] { std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof(T)); });
    return value;
  }

  void SetValue(uint64_t index, T value) {
    ascend_emulator::Core& core = ascend_emulator::core();
    const std::string call = ascend_emulator::call_name<T>("GlobalTensor.SetValue");
    const uint64_t address = use(call, index * sizeof(T), sizeof(T));
    core.global_memory.note_scalar_write(call, address, sizeof(T), core.block);
    core.issue(PIPE_S, call,
               {ascend_emulator::access_range(ascend_emulator::Space::kGlobal, true, address,
                                              address + sizeof(T))},
               [&] { std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(T)); });
  }

  uint64_t use(const std::string& call, uint64_t offset, uint64_t bytes) const {
    if (offset + bytes > bytes_) {
      ascend_emulator::violate("global bounds", call, "bytes ", offset, " to ", offset + bytes,
                               " of a tensor of ", bytes_, " bytes");
    }
    if ((begin_ + offset) % sizeof(T) != 0) {
      ascend_emulator::violate("alignment", call, "GM address ", begin_ + offset,
                               ", expected a multiple of ", sizeof(T));
    }
    return begin_ + offset;
  }

 private:
  uint64_t begin_ = 0;
  uint64_t bytes_ = 0;
};

template <class T, CacheLine line, DcciDst destination>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& tensor) {
  ascend_emulator::GlobalMemory& memory = ascend_emulator::core().global_memory;
  if (line == CacheLine::ENTIRE_DATA_CACHE) {
    memory.flush_all_lines();
  } else {
    memory.flush_line(reinterpret_cast<uint64_t>(tensor.GetPhyAddr()));
  }
}

}  // namespace AscendC
