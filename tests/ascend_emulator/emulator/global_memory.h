// Device memory: allocations with guard bytes, and what each byte has been through.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "footprint.h"
#include "shadow.h"
#include "violation.h"

namespace ascend_emulator {

class GlobalMemory {
 public:
  static constexpr uint64_t kGuardBytes = 512;
  static constexpr uint8_t kGuard = 0xa5;
  static constexpr uint64_t kScalarLineBytes = 64;  // of a core's scalar cache

  // Contents are indeterminate until the host or a kernel writes them.
  uint8_t* allocate(uint64_t bytes) {
    auto allocation = std::make_unique<Allocation>();
    allocation->bytes = bytes;
    allocation->memory.assign(bytes + 3 * kGuardBytes, kGuard);
    const uint64_t raw = reinterpret_cast<uint64_t>(allocation->memory.data());
    const uint64_t begin = (raw + 2 * kGuardBytes - 1) / kGuardBytes * kGuardBytes;
    allocation->begin = begin;
    allocation->initialized = Shadow<uint8_t>(bytes, 0);
    allocation->writer = Shadow<int>(bytes, kNobody);
    allocation->reader = Shadow<int>(bytes, kNobody);
    uint8_t* pointer = reinterpret_cast<uint8_t*>(begin);
    for (uint64_t i = 0; i < bytes; ++i) {
      pointer[i] = static_cast<uint8_t>(0xd5 + 37 * i);
    }
    allocations_[begin] = std::move(allocation);
    return pointer;
  }

  uint8_t* upload(const void* data, uint64_t bytes) {
    uint8_t* pointer = allocate(bytes);
    write(pointer, data, bytes);
    return pointer;
  }

  void write(uint8_t* pointer, const void* data, uint64_t bytes) {
    if (bytes == 0) {
      return;
    }
    Allocation& allocation = find("host write", reinterpret_cast<uint64_t>(pointer), bytes);
    std::memcpy(pointer, data, bytes);
    const uint64_t begin = offset(allocation, pointer);
    for (uint64_t i = begin; i < begin + bytes; ++i) {
      allocation.initialized.at(i) = 1;
    }
  }

  void clear(uint8_t* pointer, uint64_t bytes) {
    const std::vector<uint8_t> zeros(bytes, 0);
    write(pointer, zeros.data(), bytes);
  }

  // Fails where a byte was never written: a copy to the host would carry garbage.
  std::vector<uint8_t> download(const uint8_t* pointer, uint64_t bytes) {
    if (bytes == 0) {
      return {};
    }
    Allocation& allocation = find("host read", reinterpret_cast<uint64_t>(pointer), bytes);
    const uint64_t begin = offset(allocation, pointer);
    for (uint64_t i = 0; i < bytes; ++i) {
      if (!allocation.initialized.get(begin + i)) {
        violate("uninitialized", "host read", "GM byte ", i, " was never written");
      }
    }
    return std::vector<uint8_t>(pointer, pointer + bytes);
  }

  void free_all() {
    check_guards("free");
    allocations_.clear();
  }

  // Memory of somebody else, all of it written, until take_back(). What is an allocation already
  // stays one.
  void lend(void* pointer, uint64_t bytes) {
    const uint64_t begin = reinterpret_cast<uint64_t>(pointer);
    const auto after = allocations_.upper_bound(begin);
    if (after != allocations_.begin()) {
      const Allocation& before = *std::prev(after)->second;
      if (begin < before.begin + before.bytes) {
        return;
      }
    }
    auto allocation = std::make_unique<Allocation>();
    allocation->begin = begin;
    allocation->bytes = bytes;
    allocation->lent = true;
    allocation->initialized = Shadow<uint8_t>(bytes, 1);
    allocation->writer = Shadow<int>(bytes, kNobody);
    allocation->reader = Shadow<int>(bytes, kNobody);
    allocations_[begin] = std::move(allocation);
  }

  void take_back() {
    for (auto it = allocations_.begin(); it != allocations_.end();) {
      it = it->second->lent ? allocations_.erase(it) : std::next(it);
    }
  }

  // After a kernel that was rejected: forgets everything, whatever it left behind.
  void reset() {
    allocations_.clear();
    lines_.clear();
    dirty_.clear();
  }

  void begin_launch() {
    for (auto& [address, allocation] : allocations_) {
      (void)address;
      allocation->writer.clear();
      allocation->reader.clear();
    }
    lines_.clear();
  }

  void check_guards(const char* call) const {
    for (const auto& [address, allocation] : allocations_) {
      const uint8_t* begin = reinterpret_cast<const uint8_t*>(address);
      for (uint64_t i = 0; i < kGuardBytes && !allocation->lent; ++i) {
        if (*(begin - 1 - i) != kGuard || begin[allocation->bytes + i] != kGuard) {
          violate("global bounds", call, "a guard byte beside a GM allocation of ",
                  allocation->bytes, " bytes was overwritten");
        }
      }
    }
  }

  void note_read(const std::string& call, uint64_t address, uint64_t bytes, int block) {
    Allocation& allocation = find(call, address, bytes);
    const uint64_t begin = address - allocation.begin;
    for (uint64_t i = begin; i < begin + bytes; ++i) {
      if (!allocation.initialized.get(i)) {
        violate("uninitialized", call, "reads GM byte ", i, " of an allocation of ",
                allocation.bytes, " bytes, which nothing has written");
      }
      if (const int writer = allocation.writer.get(i); writer != kNobody && writer != block) {
        violate("cross-block race", call, "block ", block, " reads GM byte ", i, ", which ",
                who(writer), " writes in the same launch");
      }
      int& reader = allocation.reader.at(i);
      reader = reader == kNobody || reader == block ? block : kSeveral;
    }
  }

  void note_write(const std::string& call, uint64_t address, uint64_t bytes, int block,
                  Atomic atomic) {
    Allocation& allocation = find(call, address, bytes);
    const uint64_t begin = address - allocation.begin;
    const int as = atomic == Atomic::kNone  ? block
                   : atomic == Atomic::kAdd ? kAtomicAdd
                                            : kAtomicMax;
    for (uint64_t i = begin; i < begin + bytes; ++i) {
      int& writer = allocation.writer.at(i);
      const int reader = allocation.reader.get(i);
      if (reader != kNobody && reader != block) {
        violate("cross-block race", call, "block ", block, " writes GM byte ", i, ", which ",
                who(reader), " reads in the same launch");
      }
      if (writer != kNobody && writer != as) {
        violate("cross-block race", call, "block ", block, " writes GM byte ", i, ", which ",
                who(writer), " writes in the same launch; found ",
                atomic == Atomic::kNone ? "a plain store" : who(as),
                ", expected one block per byte or atomics of one kind");
      }
      if (atomic != Atomic::kNone && !allocation.initialized.get(i)) {
        violate("uninitialized", call, "combines with GM byte ", i, ", which nothing has written");
      }
      writer = as;
      if (!allocation.initialized.get(i)) {
        allocation.initialized.at(i) = 1;
      }
    }
    for (uint64_t line = address / kScalarLineBytes; line * kScalarLineBytes < address + bytes;
         ++line) {
      const auto found = lines_.find(line);
      if (found != lines_.end() && found->second != block) {
        violate("scalar cache line", call, "block ", block, " writes the 64-byte line at GM byte ",
                line * kScalarLineBytes - allocation.begin, ", which block ", found->second,
                " keeps in its scalar cache");
      }
    }
  }

  void note_scalar_write(const std::string& call, uint64_t address, uint64_t bytes, int block) {
    note_write(call, address, bytes, block, Atomic::kNone);
    Allocation& allocation = find(call, address, bytes);
    const uint64_t line = address / kScalarLineBytes;
    for (uint64_t i = 0; i < kScalarLineBytes; ++i) {
      const uint64_t byte = line * kScalarLineBytes + i;
      if (byte < allocation.begin || byte >= allocation.begin + allocation.bytes) {
        continue;
      }
      const int writer = allocation.writer.get(byte - allocation.begin);
      if (writer != kNobody && writer != block) {
        violate("scalar cache line", call, "block ", block,
                " stores into the 64-byte line at GM byte ",
                line * kScalarLineBytes - allocation.begin, ", which ", who(writer), " writes too");
      }
    }
    lines_[line] = block;
    dirty_.insert(line);
  }

  void flush_line(uint64_t address) { dirty_.erase(address / kScalarLineBytes); }
  void flush_all_lines() { dirty_.clear(); }

  void check_flushed(int block) const {
    if (!dirty_.empty()) {
      violate("scalar cache line", "GlobalTensor.SetValue", "block ", block, " ended with ",
              dirty_.size(),
              " dirty scalar cache lines, expected DataCacheCleanAndInvalid for each");
    }
  }

 private:
  static constexpr int kNobody = -1;
  static constexpr int kSeveral = -2;
  static constexpr int kAtomicAdd = -3;
  static constexpr int kAtomicMax = -4;

  struct Allocation {
    uint64_t begin;
    uint64_t bytes;
    bool lent = false;
    std::vector<uint8_t> memory;
    Shadow<uint8_t> initialized;
    Shadow<int> writer;  // block of this launch
    Shadow<int> reader;
  };

  static std::string who(int block) {
    return block == kSeveral     ? "several blocks"
           : block == kAtomicAdd ? "an atomic add"
           : block == kAtomicMax ? "an atomic maximum"
                                 : "block " + std::to_string(block);
  }

  static uint64_t offset(const Allocation& allocation, const uint8_t* pointer) {
    return reinterpret_cast<uint64_t>(pointer) - allocation.begin;
  }

  Allocation& find(const std::string& call, uint64_t address, uint64_t bytes) {
    auto found = allocations_.upper_bound(address);
    if (found == allocations_.begin()) {
      violate("global bounds", call, "address ", address, " is in no GM allocation");
    }
    Allocation& allocation = *(--found)->second;
    const uint64_t end = allocation.begin + allocation.bytes;
    if (address + bytes > end) {
      violate("global bounds", call, "bytes ", address - allocation.begin, " to ",
              address - allocation.begin + bytes, " of a GM allocation of ", allocation.bytes,
              " bytes");
    }
    return allocation;
  }

  std::map<uint64_t, std::unique_ptr<Allocation>> allocations_;
  std::map<uint64_t, int> lines_;
  std::set<uint64_t> dirty_;
};

}  // namespace ascend_emulator
