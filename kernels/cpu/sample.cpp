#include "memswap/sample.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
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
// So where layout dense has chosen LQ2, what layout sparse takes is known without an encode, and
// where it has chosen another mode, layout sparse takes no less. An encode would be half of what
// most floats cost here.
//
// [Note: high halves] E of float32 and float64 is in their upper 16 bits, where bfloat16 has it. So
// a block of them becomes what the block of bfloat16 does that has these bits, apart from byte
// planes, whose size is known: in layout dense always, in layout upcast where all other bits are 0,
// and in layout sparse where that block has zeros in the same places. Encoding bfloat16 costs a
// half to a third.
//
// [Note: bytes in doubt] Where what a layout takes has only been bounded, it is counted by an
// encode if the choice depends on it. Layouts dense and upcast are not encoded where layout sparse
// takes less than their slabs alone.
struct Bounds {
  uint64_t least = 0, most = 0;
};

// How many bits layout ints needs at least for each element of a block, as far as the upper bytes
// of the first few tell. It leaves a block as it is where its elements, as unsigned numbers, span
// half of their range or more: then these are all bits, and of most floats that shows soon. `block`
// is whole.
uint32_t bits_at_a_glance(const uint8_t* block, uint32_t width) {
  constexpr uint32_t kElements = 64;
  const uint32_t bytes = std::min<uint32_t>(width, sizeof(uint16_t));
  uint32_t least = UINT32_MAX, most = 0;
  for (const uint8_t* element = block; element < block + kElements * width; element += width) {
    uint16_t top = 0;
    memcpy(&top, element + width - bytes, bytes);
    least = std::min<uint32_t>(least, top);
    most = std::max<uint32_t>(most, top);
    if (most - least > 0x80u << 8 * (bytes - 1)) {
      return 8 * width;
    }
  }
  const uint32_t span = most - least;
  return span < 2 ? 0 : static_cast<uint32_t>(std::bit_width(span - 1)) + 8 * (width - bytes);
}

constexpr uint64_t bytes_of_units(uint64_t units) { return units * frame::kUnitBytes; }
constexpr uint64_t whole_units(uint64_t bytes) {
  return bytes_of_units((bytes + frame::kUnitBytes - 1) / frame::kUnitBytes);
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

  // Of the t-th sampled blocks of a tile's number: what they take in every layout.
  void measure(uint32_t t, const Workspaces& workspaces, size_t task) {
    const Tile tile = tile_of(t);
    if (is_float_ && width_ >= sizeof(uint32_t) && tile.is_whole) {
      measure_high_halves(tile, {workspaces, task});
    } else {
      measure_elements(tile, {workspaces, task});
    }
  }

  // See [Note: bytes in doubt]. Of equals, layout sparse is never chosen.
  bool is_in_doubt(Layout layout) const {
    if (!frame::layout_fits(dtype_, layout)) {
      return false;
    }
    const Bounds its = bytes_of(layout);
    Bounds others{raw_bytes(), raw_bytes()};
    for (const Layout other : kTried) {
      if (other != layout && frame::layout_fits(dtype_, other)) {
        others.least = std::min(others.least, bytes_of(other).least);
        others.most = std::min(others.most, bytes_of(other).most);
      }
    }
    const bool may_win =
        layout == Layout::kSparse ? its.least < others.most : its.least <= others.most;
    return its.least != its.most && may_win && its.most >= others.least;
  }

  void settle(Layout layout, uint32_t t, const Workspaces& workspaces, size_t task) {
    Bounds& bounds = doubtful(layout, t);
    if (bounds.most != 0) {
      bounds = {};
      measure_as(layout, tile_of(t), {workspaces, task});
    }
  }

  // Without a doubt.
  Layout shortest() const {
    Layout best = Layout::kRaw;
    uint64_t least = raw_bytes();
    for (const Layout layout : kTried) {
      if (frame::layout_fits(dtype_, layout) && bytes_of(layout).least < least) {
        best = layout;
        least = bytes_of(layout).least;
      }
    }
    return best;
  }

 private:
  struct Tile {
    uint32_t number;
    uint32_t blocks;
    uint32_t elements;  // that are there
    bool is_whole;      // what a tensor's last block lacks is zeros that no encode counts
  };
  struct Room {
    const Workspaces& workspaces;
    size_t task;
    uint8_t* elements() const { return workspaces.elements(task); }
  };
  using EncodedTile = std::array<EncodedBlock, frame::kTileBlocks>;

  uint64_t number_of(const Tile& tile, uint32_t i) const {
    return memswap_sample_block(elements_, tile.number * frame::kTileBlocks + i);
  }

  Tile tile_of(uint32_t t) const {
    Tile tile{t, std::min(frame::kTileBlocks, count_ - t * frame::kTileBlocks), 0, false};
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      tile.elements += there(number_of(tile, i));
    }
    tile.is_whole = tile.elements == tile.blocks * frame::kBlockElements;
    return tile;
  }

  uint32_t there(uint64_t block) const {
    return static_cast<uint32_t>(
        std::min<uint64_t>(frame::kBlockElements, elements_ - block * frame::kBlockElements));
  }

  const uint8_t* block_at(const Tile& tile, uint32_t i) const {
    const uint64_t at = copied_out_ ? tile.number * frame::kTileBlocks + i : number_of(tile, i);
    return input_ + at * block_bytes_;
  }

  void copy(const Tile& tile, uint8_t* elements) const {
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      memcpy(elements + i * block_bytes_, block_at(tile, i), there(number_of(tile, i)) * width_);
    }
    memset(elements + tile.elements * width_, 0,
           tile.blocks * block_bytes_ - tile.elements * width_);
  }

  static EncodedTile encode(Dtype dtype, Layout layout, const Tile& tile, const Room& room) {
    const EncodeParams params{dtype, layout, false, 0, false};
    EncodedTile encoded;
    blocks_of(best_isa())
        ->encoder(params)(params, room.elements(), tile.elements, room.workspaces.slabs(room.task),
                          room.workspaces.payloads(room.task), encoded.data());
    return encoded;
  }

  void measure_elements(const Tile& tile, const Room& room) {
    copy(tile, room.elements());
    bool is_sparse_known = false;
    for (const Layout layout : kTried) {
      if (!frame::layout_fits(dtype_, layout) || (layout == Layout::kSparse && is_sparse_known)) {
        continue;
      }
      if (layout == Layout::kInts && is_float_ && tile.is_whole) {
        add_bounds(layout, tile, bound_ints(tile));
        continue;
      }
      const EncodedTile encoded = encode(dtype_, layout, tile, room);
      add(layout, bytes_of(tile, layout, encoded));
      if (layout == Layout::kDense && tile.is_whole) {
        is_sparse_known = bound_sparse_without_zeros(tile, encoded);
      }
    }
  }

  // See [Note: high halves].
  void measure_high_halves(const Tile& tile, const Room& room) {
    constexpr uint32_t kHalvesBytes = frame::kBlockElements * sizeof(uint16_t);
    bool is_upcast[frame::kTileBlocks];
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      is_upcast[i] =
          blocks_of(best_isa())
              ->high_halves(width_, block_at(tile, i), room.elements() + kHalvesBytes * i);
    }
    if (!is_sparse_at_a_glance(tile, room.elements()) ||
        !measure_sparse_alone(tile, room, is_upcast)) {
      const EncodedTile dense = encode(Dtype::kBf16, Layout::kDense, tile, room);
      add(Layout::kDense, bytes_of(tile, Layout::kDense, dense));
      if (frame::layout_fits(dtype_, Layout::kUpcast)) {
        for (uint32_t i = 0; i < tile.blocks; ++i) {
          add(Layout::kUpcast, is_upcast[i] ? bytes_of(Layout::kUpcast, dense[i]) : block_bytes_);
        }
      }
      if (!bound_sparse_without_zeros(tile, dense)) {
        add_bounds(Layout::kSparse, tile, bound_sparse(tile, room));
      }
    }
    add_bounds(Layout::kInts, tile, bound_ints(tile));
  }

  // False if layout dense or upcast may be shorter.
  bool measure_sparse_alone(const Tile& tile, const Room& room, const bool* is_upcast) {
    const uint64_t raw = tile.blocks * block_bytes_;
    const Bounds sparse = bound_sparse(tile, room);
    const Bounds dense{tile.blocks * frame::slab_bytes(dtype_, Layout::kDense), raw};
    Bounds upcast{0, raw};
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      upcast.least += is_upcast[i] ? frame::slab_bytes(dtype_, Layout::kUpcast) : block_bytes_;
    }
    if (sparse.most >= std::min(dense.least, upcast.least)) {
      return false;
    }
    add_bounds(Layout::kSparse, tile, sparse);
    add_bounds(Layout::kDense, tile, dense);
    add_bounds(Layout::kUpcast, tile, upcast);
    return true;
  }

  // By an encode of the elements themselves.
  void measure_as(Layout layout, const Tile& tile, const Room& room) {
    copy(tile, room.elements());
    add(layout, bytes_of(tile, layout, encode(dtype_, layout, tile, room)));
  }

  // Whether some elements are zeros, by one in 64 of a tile's upper halves.
  static bool is_sparse_at_a_glance(const Tile& tile, const uint8_t* halves) {
    constexpr uint32_t kStep = 64, kOneIn = 8;
    const uint32_t looks = tile.blocks * frame::kBlockElements / kStep;
    uint32_t zeros = 0;
    for (uint32_t i = 0; i < looks; ++i) {
      uint16_t half;
      memcpy(&half, halves + sizeof(half) * kStep * i, sizeof(half));
      zeros += static_cast<uint16_t>(half << 1) == 0 ? 1 : 0;
    }
    return zeros * kOneIn >= looks;
  }

  // False if there is an E of 0. See [Note: sparse without zeros].
  bool bound_sparse_without_zeros(const Tile& tile, const EncodedTile& dense) {
    Bounds bounds;
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      if (dense[i].zeros != 0) {
        return false;
      }
      const uint64_t least =
          std::min(bytes_of(Layout::kDense, dense[i]) + frame::kMapsBytes, block_bytes_);
      bounds.least += least;
      bounds.most += dense[i].mode == frame::kLq2 ? least : block_bytes_;
    }
    add_bounds(Layout::kSparse, tile, bounds);
    return true;
  }

  // By the high halves in layout sparse, whose payloads were rounded up to units before the other
  // planes' bytes were added.
  Bounds bound_sparse(const Tile& tile, const Room& room) const {
    const EncodedTile halves = encode(Dtype::kBf16, Layout::kSparse, tile, room);
    Bounds bounds;
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      if (blocks_of(best_isa())->hides_survivors(width_, block_at(tile, i))) {
        return {0, tile.blocks * block_bytes_};
      }
      const bool is_literal = halves[i].mode == frame::kLiteral;
      const uint64_t most = bytes_of_units(halves[i].units);
      const uint64_t others =
          (frame::kBlockElements - halves[i].zeros) * (width_ - sizeof(uint16_t));
      bounds.least += std::min(whole_units(most - (frame::kUnitBytes - 1) + others), block_bytes_);
      bounds.most += is_literal ? block_bytes_ : std::min(whole_units(most + others), block_bytes_);
    }
    return bounds;
  }

  Bounds bound_ints(const Tile& tile) const {
    Bounds bounds{0, tile.blocks * block_bytes_};
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      bounds.least += frame::kBlockElements / 8 * bits_at_a_glance(block_at(tile, i), width_);
    }
    return bounds;
  }

  uint64_t bytes_of(Layout layout, const EncodedBlock& block) const {
    return frame::slab_bytes(dtype_, layout) + bytes_of_units(block.units);
  }
  uint64_t bytes_of(const Tile& tile, Layout layout, const EncodedTile& encoded) const {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < tile.blocks; ++i) {
      bytes += bytes_of(layout, encoded[i]);
    }
    return bytes;
  }

  void add(Layout layout, uint64_t bytes) {
    sizes_[static_cast<size_t>(layout)].fetch_add(bytes, std::memory_order_relaxed);
  }
  void add_bounds(Layout layout, const Tile& tile, const Bounds& bounds) {
    if (bounds.least == bounds.most) {
      add(layout, bounds.least);
    } else {
      doubtful(layout, tile.number) = bounds;
    }
  }
  Bounds& doubtful(Layout layout, uint32_t t) { return doubtful_[static_cast<size_t>(layout)][t]; }

  Bounds bytes_of(Layout layout) const {
    const auto at = static_cast<size_t>(layout);
    const uint64_t known = sizes_[at].load(std::memory_order_relaxed);
    Bounds all{known, known};
    for (uint32_t t = 0; t < tiles(); ++t) {
      all.least += doubtful_[at][t].least;
      all.most += doubtful_[at][t].most;
    }
    return all;
  }
  uint64_t raw_bytes() const { return uint64_t{count_} * frame::slab_bytes(dtype_, Layout::kRaw); }

  const uint8_t* const input_;
  const uint64_t elements_;
  const Dtype dtype_;
  const bool copied_out_;
  const uint32_t count_;
  const uint32_t width_ = frame::width_of(dtype_);
  const uint64_t block_bytes_ = uint64_t{frame::kBlockElements} * width_;
  const bool is_float_ = frame::split_of(dtype_).exponent_bits != 0;
  Sizes sizes_{};  // but for what is in doubt, which is there by tile
  std::array<std::array<Bounds, kMostSamples / frame::kTileBlocks>, kLayouts> doubtful_{};
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
  const auto run = [&](auto measure) {
    ChunkQueue queue(sampler.tiles());
    auto work = [&](size_t task) {
      for (uint32_t tile; queue.take(&tile);) {
        measure(tile, task);
      }
    };
    run_tasks(where, tasks, work);
  };
  run([&](uint32_t tile, size_t task) { sampler.measure(tile, workspaces, task); });
  for (const Layout layout : {Layout::kDense, Layout::kUpcast, Layout::kInts, Layout::kSparse}) {
    if (sampler.is_in_doubt(layout)) {
      run([&](uint32_t tile, size_t task) { sampler.settle(layout, tile, workspaces, task); });
    }
  }
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
