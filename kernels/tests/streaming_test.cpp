// From which size on output is written around the caches: a share of the last cache that the system
// tells, whatever else it tells.
#include "../cpu/streaming.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace memswap::cpu {
namespace {

class Caches : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "/cachesXXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void add(int index, const char* level, const char* type, const char* size) {
    const std::filesystem::path cache = folder_ / ("index" + std::to_string(index));
    std::filesystem::create_directory(cache);
    std::ofstream(cache / "level") << level << "\n";
    std::ofstream(cache / "type") << type << "\n";
    std::ofstream(cache / "size") << size << "\n";
  }
  uint64_t bytes() const { return last_cache_bytes(folder_.c_str()); }

  std::filesystem::path folder_;
};

TEST_F(Caches, TheLastOneForDataCounts) {
  add(0, "1", "Data", "48K");
  add(1, "1", "Instruction", "32K");
  EXPECT_EQ(bytes(), 48u << 10) << "an instruction cache holds no tensor";
  add(2, "2", "Unified", "1024K");
  EXPECT_EQ(bytes(), 1u << 20);
  add(3, "3", "Unified", "96M");
  EXPECT_EQ(bytes(), 96u << 20);
}

TEST_F(Caches, ASystemThatTellsNothingGetsTheUsualLimit) {
  EXPECT_EQ(bytes(), 0u);
  EXPECT_EQ(streaming_bytes_for(bytes()), kUsualStreamingBytes);
  add(0, "1", "Data", "");
  EXPECT_EQ(streaming_bytes_for(bytes()), kUsualStreamingBytes);
}

TEST(Streaming, TheLimitIsAShareOfTheCacheWithinBounds) {
  EXPECT_EQ(streaming_bytes_for(48u << 20), 8u << 20);
  EXPECT_EQ(streaming_bytes_for(1u << 20), kLeastStreamingBytes);
  EXPECT_EQ(streaming_bytes_for(uint64_t{4} << 30), kMostStreamingBytes);
}

TEST(Streaming, ThisMachineHasALimit) {
  EXPECT_GE(streaming_bytes(), kLeastStreamingBytes);
  EXPECT_LE(streaming_bytes(), kMostStreamingBytes);
}

}  // namespace
}  // namespace memswap::cpu
