// memswap_codec_cuda(), run by the emulator, and comparisons with the CPU codec.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>

#include "emulator.h"
#include "memswap/codec.h"
#include "support.h"  // kernels/tests

namespace memswap::test {

// What every encode is given, unless a test says otherwise.
inline bool has_workspace = true;
inline std::vector<frame::Header>& workspace() {
  static std::vector<frame::Header> slots(
      memswap_codec_cuda()->workspace_bytes / sizeof(frame::Header) + 1);
  return slots;
}

// Tells the emulator what the job may touch, then hands it on.
inline int emulated_encode(const memswap_encode_job* job, const memswap_launch* launch) {
  std::deque<emulator::Registered> buffers;
  const Dtype dtype = static_cast<Dtype>(job->dtype);
  const Sections sections =
      frame::sections_of(dtype, static_cast<Layout>(job->layout), job->elements);
  buffers.emplace_back(job->input, job->elements * frame::width_of(dtype), "the tensor");
  buffers.emplace_back(job->frame, sections.bytes(job->var_capacity), "the frame");
  if (job->overflow != nullptr) {
    buffers.emplace_back(job->overflow, job->overflow_capacity * frame::kUnitBytes, "the arena");
    buffers.emplace_back(job->overflow_cursor, sizeof(uint64_t), "the arena's cursor");
  }
  if (job->report != nullptr) {
    buffers.emplace_back(job->report, frame::kHeaderBytes, "the report");
  }
  memswap_launch where = launch != nullptr ? *launch : memswap_launch{};
  if (has_workspace) {
    void* slots = workspace().data();
    size_t bytes = workspace().size() * sizeof(frame::Header);
    where.workspace =
        std::align(frame::kAlignmentBytes, memswap_codec_cuda()->workspace_bytes, slots, bytes);
    buffers.emplace_back(where.workspace, memswap_codec_cuda()->workspace_bytes, "the workspace",
                         true);
  }
  const int code = memswap_codec_cuda()->encode(job, &where);
  const auto* bytes = reinterpret_cast<const uint8_t*>(workspace().data());
  if (std::any_of(bytes, bytes + workspace().size() * sizeof(frame::Header),
                  [](uint8_t byte) { return byte != 0; })) {
    emulator::errors.push_back("the workspace is not 0 after an encode");
    std::fill(workspace().begin(), workspace().end(), frame::Header{});
  }
  return code;
}

inline int emulated_decode(const memswap_decode_job* job, const memswap_launch* launch) {
  std::deque<emulator::Registered> buffers;
  const Dtype dtype = static_cast<Dtype>(job->dtype);
  buffers.emplace_back(job->output, job->elements * frame::width_of(dtype), "the tensor");
  buffers.emplace_back(job->frame, job->frame_bytes, "the frame");
  buffers.emplace_back(job->status, sizeof(uint32_t), "the status");
  if (job->overflow != nullptr) {
    buffers.emplace_back(job->overflow, job->overflow_capacity * frame::kUnitBytes, "the arena");
  }
  return memswap_codec_cuda()->decode(job, launch);
}

inline const memswap_codec& emulated() {
  static const memswap_codec codec = {MEMSWAP_CODEC_VERSION,
                                      "emulated",
                                      &emulated_encode,
                                      &emulated_decode,
                                      memswap_codec_cuda()->message,
                                      1,
                                      0,
                                      0,
                                      1,
                                      1};
  return codec;
}

inline const memswap_codec& oracle() { return *memswap_codec_cpu_with("scalar"); }

class Emulated : public testing::Test {
 protected:
  void SetUp() override {
    emulator::machine = {};
    emulator::errors.clear();
    emulator::launches.clear();
    emulator::skipped_site = {};
    has_workspace = true;
  }
  void TearDown() override {
    for (const std::string& error : emulator::errors) {
      ADD_FAILURE() << error;
    }
  }
};

// A tensor whose first byte is `offset` bytes behind a multiple of 128.
inline Tensor tensor_at(uint32_t offset, Pattern pattern, Dtype dtype, uint64_t seed,
                        uint64_t elements) {
  Tensor tensor(dtype, 0);
  tensor.elements = elements;
  tensor.buffer = GuardedBuffer(elements * frame::width_of(dtype), offset);
  fill(pattern, dtype, seed, 0, elements, tensor.buffer.data());
  return tensor;
}

inline const uint8_t* payload_of(const Frame& frame, const Record& record) {
  const uint8_t* area = record.base & frame::kBaseInOverflow
                            ? frame.overflow.data()
                            : frame.bytes.data() + frame.sections().var;
  return area + uint64_t{record.base & ~frame::kBaseInOverflow} * frame::kUnitBytes;
}

// Everything but the bases, and what follows from them, is the same.
inline void expect_same_frame(const Frame& expected, const Frame& found) {
  const Header want = expected.header(), have = found.header();
  ASSERT_EQ(have.magic, want.magic);
  ASSERT_EQ(have.version, want.version);
  ASSERT_EQ(have.dtype, want.dtype);
  ASSERT_EQ(have.layout, want.layout);
  ASSERT_EQ(have.flags, want.flags & ~frame::kOrdered);
  ASSERT_EQ(have.status, want.status);
  ASSERT_EQ(have.elements, want.elements);
  ASSERT_EQ(have.blocks, want.blocks);
  ASSERT_EQ(have.slab_bytes, want.slab_bytes);
  ASSERT_EQ(have.zeros, want.zeros);
  ASSERT_EQ(have.center_sum, want.center_sum);
  for (uint32_t i = 0; i < frame::kModeCounts; ++i) {
    ASSERT_EQ(have.mode_count[i], want.mode_count[i]) << "blocks of mode " << i + 1;
  }
  const Sections sections = expected.sections();
  for (uint32_t tile = 0; tile < sections.tiles; ++tile) {
    const Record want_record = expected.record(tile), have_record = found.record(tile);
    uint32_t units = 0;
    for (uint32_t i = 0; i < frame::kTileBlocks; ++i) {
      SCOPED_TRACE("block " + std::to_string(tile * frame::kTileBlocks + i));
      ASSERT_EQ(Record::mode(have_record.block[i]), Record::mode(want_record.block[i]));
      ASSERT_EQ(Record::units(have_record.block[i]), Record::units(want_record.block[i]));
      ASSERT_EQ(have_record.center[i], want_record.center[i]);
      const uint32_t size = Record::units(want_record.block[i]);
      ASSERT_EQ(memcmp(payload_of(expected, want_record) + units * frame::kUnitBytes,
                       payload_of(found, have_record) + units * frame::kUnitBytes,
                       size * frame::kUnitBytes),
                0)
          << "another payload in mode " << Record::mode(want_record.block[i]);
      units += size;
    }
    ASSERT_EQ(have_record.checksum, want_record.checksum) << "tile " << tile;
  }
  for (uint64_t byte = sections.slabs; byte < sections.records; ++byte) {
    ASSERT_EQ(found.bytes.data()[byte], expected.bytes.data()[byte])
        << "byte " << (byte - sections.slabs) % sections.slab_bytes << " of the slab of block "
        << (byte - sections.slabs) / sections.slab_bytes;
  }
}

// Encodes on both sides, and decodes each frame on the emulator.
inline void expect_same_as_oracle(const Tensor& tensor, const EncodeOptions& options) {
  const Frame expected = encode(oracle(), tensor, options);
  const Frame found = encode(emulated(), tensor, options);
  ASSERT_TRUE(emulator::errors.empty()) << emulator::errors[0];
  ASSERT_NO_FATAL_FAILURE(expect_same_frame(expected, found));
  for (const Frame* frame : {&expected, &found}) {
    Tensor output =
        tensor_at(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tensor.buffer.data()) % 128),
                  {Kind::kRandomBits, 0}, tensor.dtype, 99, tensor.elements);
    ASSERT_EQ(decode(emulated(), *frame, &output), frame::kOk);
    ASSERT_TRUE(emulator::errors.empty()) << emulator::errors[0];
    ASSERT_TRUE(output.buffer == tensor.buffer) << "the decoded tensor is another one";
  }
}

}  // namespace memswap::test
