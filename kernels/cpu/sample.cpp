#include "memswap/sample.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <new>

#include "codec.h"
#include "tasks.h"

namespace memswap::cpu {

namespace {

using frame::Dtype;
using frame::Layout;

// One block in so many, within these bounds. Measured: 24 tell a tensor's zeros well enough where
// they come in rows; more than 512 tell nothing new.
constexpr uint64_t kBlocksPerSample = 256;
constexpr uint64_t kLeastSamples = 24;
constexpr uint64_t kMostSamples = 512;

// Fastest first. Raw is not tried: its size is known.
constexpr Layout kTried[] = {Layout::kDense, Layout::kBits, Layout::kUpcast, Layout::kInts,
                             Layout::kSparse};
constexpr size_t kLayouts = frame::kLastLayout + 1;

// [Note: sparse without zeros] Of a block in which no E is 0, layout sparse makes what mode LQ2 of
// layout dense makes, and the maps of a bitmap without zeros; or a literal, if that is no longer.
// So where layout dense has chosen LQ2, what layout sparse takes is known without an encode, which
// would be half of what most floats cost here.
bool has_no_zeros(const EncodedBlock& dense) {
  return dense.zeros == 0 && dense.mode == frame::kLq2;
}

uint64_t sparse_bytes_without_zeros(uint32_t dense_bytes, uint32_t block_bytes) {
  return std::min(dense_bytes + frame::kMapsBytes, block_bytes);
}

// [Note: literals at a glance] Layout ints leaves a block as it is where its elements, as unsigned
// numbers, span half of their range or more, and layout upcast where a low half is not 0. Of most
// floats the first few elements say so. `block` is whole, of elements that are floats.
bool is_literal_at_a_glance(Layout layout, const uint8_t* block, uint32_t width) {
  if (layout != Layout::kUpcast && layout != Layout::kInts) {
    return false;
  }
  constexpr uint32_t kElements = 64;
  uint8_t least = 0xff, most = 0;
  for (const uint8_t* element = block; element < block + kElements * width; element += width) {
    least = std::min(least, element[width - 1]);
    most = std::max(most, element[width - 1]);
    if (layout == Layout::kUpcast ? element[0] != 0 : most - least > 0x80) {
      return true;
    }
  }
  return false;
}

constexpr uint64_t block_count(uint64_t elements) {
  return elements / frame::kBlockElements + (elements % frame::kBlockElements != 0 ? 1 : 0);
}

// A number's bits, mixed: the finalizer of splitmix64 (Steele, Lea, Flood 2014).
constexpr uint64_t mixed(uint64_t number) {
  number = (number + 1) * 0x9e3779b97f4a7c15;
  number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9;
  number = (number ^ number >> 27) * 0x94d049bb133111eb;
  return number ^ number >> 31;
}

// Bytes of what was sampled, by layout.
using Sizes = std::array<std::atomic<uint64_t>, kLayouts>;

// Memory of the tasks: for each a tile of elements, and what its blocks become.
class Workspaces {
 public:
  Workspaces(size_t tasks, uint32_t width)
      : part_bytes_((frame::kTileElements * width + kSlackBytes + kAlignment - 1) / kAlignment *
                    kAlignment),
        task_bytes_((3 * part_bytes_ + kEncoderSlackBytes + kAlignment - 1) / kAlignment *
                    kAlignment),
        memory_(new (std::align_val_t{kAlignment}, std::nothrow) uint8_t[tasks * task_bytes_]) {}

  explicit operator bool() const { return memory_ != nullptr; }
  uint8_t* elements(size_t task) const { return memory_.get() + task * task_bytes_; }
  uint8_t* slabs(size_t task) const { return elements(task) + part_bytes_; }
  uint8_t* payloads(size_t task) const { return slabs(task) + part_bytes_; }

 private:
  static constexpr size_t kAlignment = frame::kAlignmentBytes;
  struct Free {
    void operator()(uint8_t* memory) const {
      ::operator delete[](memory, std::align_val_t{kAlignment});
    }
  };

  const size_t part_bytes_;
  const size_t task_bytes_;
  const std::unique_ptr<uint8_t[], Free> memory_;
};

class Sampler {
 public:
  Sampler(const void* input, uint64_t elements, Dtype dtype, bool copied_out)
      : input_(static_cast<const uint8_t*>(input)),
        elements_(elements),
        dtype_(dtype),
        copied_out_(copied_out),
        count_(memswap_sample_count(elements)) {}

  uint32_t tiles() const { return (count_ + frame::kTileBlocks - 1) / frame::kTileBlocks; }

  // The t-th sampled blocks of a tile's number, in every layout whose size is not known without.
  void encode_tile(uint32_t t, const Workspaces& workspaces, size_t task) {
    uint8_t* const elements = workspaces.elements(task);
    const uint32_t first = t * frame::kTileBlocks;
    const uint32_t blocks = std::min(frame::kTileBlocks, count_ - first);
    const uint32_t width = frame::width_of(dtype_);
    const uint32_t block_bytes = frame::kBlockElements * width;
    uint32_t here = 0;
    for (uint32_t i = 0; i < blocks; ++i) {
      const uint64_t block = memswap_sample_block(elements_, first + i);
      const uint64_t at = copied_out_ ? first + i : block;
      const auto there = static_cast<uint32_t>(
          std::min<uint64_t>(frame::kBlockElements, elements_ - block * frame::kBlockElements));
      memcpy(elements + i * block_bytes, input_ + at * block_bytes, there * width);
      here += there;
    }
    memset(elements + here * width, 0, blocks * block_bytes - here * width);
    // What a tensor's last block lacks is zeros that no encode counts.
    const bool is_whole = here == blocks * frame::kBlockElements;
    const bool is_float = frame::split_of(dtype_).exponent_bits != 0;
    bool is_sparse_known = false;
    for (const Layout layout : kTried) {
      if (!frame::layout_fits(dtype_, layout) || (layout == Layout::kSparse && is_sparse_known)) {
        continue;
      }
      if (is_whole && is_float && is_all_literal(layout, elements, blocks)) {
        add(layout, uint64_t{blocks} * block_bytes);
        continue;
      }
      const EncodeParams params{dtype_, layout, false, 0, false};
      EncodedBlock encoded[frame::kTileBlocks];
      blocks_of(best_isa())
          ->encoder(params)(params, elements, here, workspaces.slabs(task),
                            workspaces.payloads(task), encoded);
      uint64_t bytes = 0;
      uint64_t sparse_bytes = 0;
      for (uint32_t i = 0; i < blocks; ++i) {
        const uint32_t taken =
            frame::slab_bytes(dtype_, layout) + encoded[i].units * frame::kUnitBytes;
        bytes += taken;
        sparse_bytes += sparse_bytes_without_zeros(taken, block_bytes);
      }
      add(layout, bytes);
      if (layout == Layout::kDense && is_whole &&
          std::all_of(encoded, encoded + blocks, &has_no_zeros)) {
        is_sparse_known = true;
        add(Layout::kSparse, sparse_bytes);
      }
    }
  }

  Layout shortest() const {
    Layout best = Layout::kRaw;
    uint64_t least = uint64_t{count_} * frame::slab_bytes(dtype_, Layout::kRaw);
    for (const Layout layout : kTried) {
      const uint64_t bytes = sizes_[static_cast<size_t>(layout)].load(std::memory_order_relaxed);
      if (frame::layout_fits(dtype_, layout) && bytes < least) {
        best = layout;
        least = bytes;
      }
    }
    return best;
  }

 private:
  bool is_all_literal(Layout layout, const uint8_t* elements, uint32_t blocks) const {
    const uint32_t width = frame::width_of(dtype_);
    for (uint32_t i = 0; i < blocks; ++i) {
      const uint8_t* const block = elements + i * frame::kBlockElements * width;
      if (!is_literal_at_a_glance(layout, block, width)) {
        return false;
      }
    }
    return true;
  }

  void add(Layout layout, uint64_t bytes) {
    sizes_[static_cast<size_t>(layout)].fetch_add(bytes, std::memory_order_relaxed);
  }

  const uint8_t* const input_;
  const uint64_t elements_;
  const Dtype dtype_;
  const bool copied_out_;
  const uint32_t count_;
  Sizes sizes_{};
};

uint8_t choose(const void* input, uint64_t elements, uint8_t dtype, const memswap_launch* launch,
               bool copied_out) {
  Sampler sampler(input, elements, static_cast<Dtype>(dtype), copied_out);
  const memswap_launch where = launch != nullptr ? *launch : memswap_launch{};
  const size_t tasks = tasks_for(where, sampler.tiles());
  const Workspaces workspaces(tasks, frame::width_of(static_cast<Dtype>(dtype)));
  if (!workspaces) {
    return static_cast<uint8_t>(Layout::kRaw);  // an encode of it needs the least memory
  }
  ChunkQueue queue(sampler.tiles());
  auto work = [&](size_t task) {
    for (uint32_t tile; queue.take(&tile);) {
      sampler.encode_tile(tile, workspaces, task);
    }
  };
  run_tasks(where, tasks, work);
  return static_cast<uint8_t>(sampler.shortest());
}

}  // namespace

}  // namespace memswap::cpu

uint32_t memswap_sample_count(uint64_t elements) {
  using namespace memswap::cpu;
  const uint64_t blocks = block_count(elements);
  const uint64_t wanted = std::clamp(blocks / kBlocksPerSample, kLeastSamples, kMostSamples);
  return static_cast<uint32_t>(std::min(blocks, wanted));
}

uint64_t memswap_sample_block(uint64_t elements, uint32_t i) {
  using namespace memswap::cpu;
  const uint64_t count = memswap_sample_count(elements);
  if (count == block_count(elements)) {
    return i;
  }
  const uint64_t whole = elements / memswap::frame::kBlockElements;
  const uint64_t from = i * whole / count;
  const uint64_t until = (i + 1) * whole / count;
  return from + mixed(i) % (until - from);
}

uint8_t memswap_choose_layout(const void* input, uint64_t elements, uint8_t dtype,
                              const memswap_launch* launch) {
  return memswap::cpu::choose(input, elements, dtype, launch, false);
}

uint8_t memswap_choose_layout_of_sample(const void* sample, uint64_t elements, uint8_t dtype,
                                        const memswap_launch* launch) {
  return memswap::cpu::choose(sample, elements, dtype, launch, true);
}
