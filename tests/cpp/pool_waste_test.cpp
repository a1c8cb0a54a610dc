// What a pool takes from the system beyond what training asks it for.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <vector>

#include "pool/pool.h"

namespace memswap {
namespace {

// Slabs of which only the size is real: a whole model's activations fit any test machine.
class NoMemory final : public Slab {
 public:
  explicit NoMemory(size_t size) : size_(size) {}
  size_t size() const override { return size_; }
  void* data() const override { return nullptr; }
  void write(size_t, const void*, size_t) override {}
  void read(size_t, void*, size_t) override {}

 private:
  size_t size_;
};

class NoMemorySlabs final : public SlabSource {
 public:
  SlabResult acquire(size_t nbytes) override { return {std::make_unique<NoMemory>(nbytes), {}}; }
};

// Storages that a Llama-3-8B block saves (hidden 4096, feed-forward 14336, 8 key-value heads of
// 128), in bytes: bf16 activations, fp32 norm and softmax statistics.
std::vector<size_t> llama_block(size_t tokens) {
  const size_t hidden = tokens * 4096 * 2;
  const size_t key_value = tokens * 8 * 128 * 2;
  const size_t feed_forward = tokens * 14336 * 2;
  const size_t norm = tokens * 4;
  return {hidden, norm,   hidden, hidden, key_value,    key_value,    hidden,       32 * norm,
          hidden, hidden, norm,   hidden, feed_forward, feed_forward, feed_forward, feed_forward};
}

struct Model {
  int layers;
  std::vector<size_t> tokens;  // of one layer after the other, over and over
};

class PoolWaste : public ::testing::TestWithParam<Model> {};

TEST_P(PoolWaste, StaysSmallOverAWholeModel) {
  const auto& [layers, tokens] = GetParam();
  Pool pool(std::make_shared<NoMemorySlabs>());
  std::vector<BlockPtr> blocks;
  size_t powers_of_two = 0;
  for (int layer = 0; layer < layers; ++layer) {
    for (const size_t nbytes : llama_block(tokens[layer % tokens.size()])) {
      blocks.push_back(pool.allocate(nbytes));
      powers_of_two += std::bit_ceil(nbytes);
    }
  }
  const auto statistics = pool.statistics();
  const auto asked = static_cast<double>(statistics.in_use_bytes);
  const double rounding = static_cast<double>(statistics.waste_bytes) / asked;
  const double holes =
      static_cast<double>(statistics.free_bytes - statistics.largest_free_bytes) / asked;
  const double ahead = static_cast<double>(statistics.largest_free_bytes) / asked;
  std::printf(
      "%.2f GiB asked; rounding %.4f %%, holes %.2f %%, grown ahead %.2f %%; "
      "rounded to powers of two: %.1f %%\n",
      asked / (size_t{1} << 30), 100 * rounding, 100 * holes, 100 * ahead,
      100 * (static_cast<double>(powers_of_two) / asked - 1));
  EXPECT_LE(rounding, 0.001);
  EXPECT_LE(rounding + holes, 0.03) << "pinned memory that no tensor can use";
  EXPECT_LE(ahead, 0.06) << "the last slab is much longer than needed";
}

INSTANTIATE_TEST_SUITE_P(Models, PoolWaste,
                         ::testing::Values(Model{8, {8192}}, Model{8, {5000}},
                                           Model{8, {8192, 5000, 3333, 6111}}, Model{32, {8192}},
                                           Model{32, {5000}}, Model{32, {8192, 5000, 3333, 6111}}));

}  // namespace
}  // namespace memswap
