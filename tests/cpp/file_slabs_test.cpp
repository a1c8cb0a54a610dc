#include "pool/file_slabs.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <system_error>
#include <vector>

#include "work/ticket.h"

namespace memswap {
namespace {

class FileSlabsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "memswap-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path directory_;
};

TEST_F(FileSlabsTest, LeavesNoName) {
  FileSlabs source(directory_);
  FileSlabs beside(directory_ / "prefix");
  const auto slab = source.acquire(1 << 20);
  const auto other = beside.acquire(1 << 20);
  EXPECT_TRUE(std::filesystem::is_empty(directory_)) << "a crash would leave a file behind";
}

TEST_F(FileSlabsTest, SaysWhereNoFileCanBeMade) {
  try {
    FileSlabs source(directory_ / "missing" / "file");
    FAIL() << "a directory that does not exist was taken";
  } catch (const std::system_error& error) {
    EXPECT_NE(std::string(error.what()).find("missing"), std::string::npos) << error.what();
    EXPECT_EQ(error.code().value(), ENOENT);
  }
}

TEST_F(FileSlabsTest, BringsBackEveryByteAtAnyLengthAndAlignment) {
  FileSlabs source(directory_);
  const auto result = source.acquire(8 << 20);
  std::mt19937 random(1);
  for (const size_t nbytes :
       {1UL, 511UL, 512UL, 4095UL, 4096UL, 4097UL, 1048576UL, 1048577UL, 3145728UL, 3145729UL}) {
    for (const size_t shift : {0UL, 1UL, 512UL}) {
      void* memory = std::aligned_alloc(4096, 4 << 20);
      const std::unique_ptr<void, decltype(&std::free)> owned(memory, &std::free);
      auto* bytes = static_cast<unsigned char*>(memory) + shift;
      for (size_t i = 0; i < nbytes; ++i) {
        bytes[i] = static_cast<unsigned char>(random());
      }
      result.slab->write(4096 * 3, bytes, nbytes);
      std::vector<unsigned char> back(nbytes);
      result.slab->read(4096 * 3, back.data(), nbytes);
      EXPECT_TRUE(std::equal(back.begin(), back.end(), bytes))
          << nbytes << " bytes, shift " << shift;
      std::fill(bytes, bytes + nbytes, static_cast<unsigned char>(0));
      result.slab->read(4096 * 3, bytes, nbytes);
      EXPECT_TRUE(std::equal(back.begin(), back.end(), bytes))
          << nbytes << " bytes, shift " << shift;
    }
  }
}

TEST_F(FileSlabsTest, ExtentsDoNotOverlapAndTheirSpaceIsUsedAgain) {
  FileSlabs source(directory_);
  auto first = source.acquire(1 << 20);
  auto second = source.acquire(1 << 20);
  const std::vector<char> ones(1 << 20, 1);
  const std::vector<char> twos(1 << 20, 2);
  first.slab->write(0, ones.data(), ones.size());
  second.slab->write(0, twos.data(), twos.size());
  std::vector<char> back(1 << 20);
  first.slab->read(0, back.data(), back.size());
  EXPECT_EQ(back, ones);
  first.slab.reset();
  auto third = source.acquire(1 << 20);
  third.slab->write(0, ones.data(), ones.size());
  second.slab->read(0, back.data(), back.size());
  EXPECT_EQ(back, twos) << "a returned extent was given out over a live one";
}

TEST_F(FileSlabsTest, SlabsOutliveTheSource) {
  auto source = std::make_unique<FileSlabs>(directory_);
  const auto result = source->acquire(4096);
  source.reset();
  const char text[16] = "still here";
  result.slab->write(0, text, sizeof(text));
  char back[16] = {};
  result.slab->read(0, back, sizeof(back));
  EXPECT_STREQ(back, text);
}

}  // namespace
}  // namespace memswap
