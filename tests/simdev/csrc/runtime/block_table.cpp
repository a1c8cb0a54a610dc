#include <sys/mman.h>

#include <cstring>
#include <iterator>

#include "memory.h"

namespace simdev {

Block& BlockTable::map(size_t bytes, bool pinned) {
  void* pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pointer == MAP_FAILED) throw Error("sim: the host has no memory left to simulate with");
  std::memset(pointer, kPoison, bytes);
  auto block = std::make_unique<Block>();
  block->begin = reinterpret_cast<uintptr_t>(pointer);
  block->bytes = bytes;
  block->pinned = pinned;
  return *blocks_.emplace(block->begin, std::move(block)).first->second;
}

void BlockTable::unmap(Block& block) {
  munmap(block.pointer(), block.bytes);
  blocks_.erase(block.begin);
}

Block* BlockTable::find(uintptr_t address) {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second.get();
  return address < block->begin + block->bytes ? block : nullptr;
}

void BlockTable::begin_life(Block& block, size_t requested) {
  block.live = true;
  block.requested = requested;
  block.serial = ++serial_;
  block.accesses.clear();
  block.used_by.clear();
}

std::vector<LiveBlock> BlockTable::live(uint64_t after_serial) const {
  std::vector<LiveBlock> found;
  for (const auto& [begin, block] : blocks_)
    if (block->live && block->serial > after_serial)
      found.push_back({block->requested, block->serial, block->pinned, block->stream});
  return found;
}

}  // namespace simdev
