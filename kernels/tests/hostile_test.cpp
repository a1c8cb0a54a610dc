// Damaged frames: an error, or the tensor as it was; never a byte outside the buffers.
#include "support.h"

namespace memswap::test {
namespace {

class Hostile : public CpuCodecTest {
 protected:
  // Two tiles, so that the second one has blocks that are missing.
  static constexpr uint64_t kElementCount = 8192 + 1024 + 100;

  template <typename Check>
  void for_each_frame(uint64_t elements, Check check) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32, Dtype::kE4m3, Dtype::kFp64,
                              Dtype::kBool, Dtype::kInt16, Dtype::kInt64}) {
      for (const Layout layout : layouts_of(dtype)) {
        SCOPED_TRACE(describe(dtype, layout));
        const Tensor tensor({Kind::kMixed, 0}, dtype, 33, elements);
        Frame frame = encode(codec(), tensor, {.layout = layout});
        check(tensor, frame);
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }

  // Frames are written with checksums, so that what is not an error is the tensor.
  void expect_error_or_tensor(const Frame& frame, const Tensor& tensor) {
    const uint32_t status = decode(codec(), frame, &output(tensor));
    if (status == frame::kOk) {
      ASSERT_TRUE(output(tensor).buffer == tensor.buffer) << "wrong elements without an error";
    }
  }

  Tensor& output(const Tensor& like) {
    if (!output_ || output_->dtype != like.dtype || output_->elements != like.elements) {
      output_.emplace(like.dtype, like.elements);
    }
    return *output_;
  }

 private:
  std::optional<Tensor> output_;
};

TEST_P(Hostile, EveryFlippedBitOfHeaderAndRecordsIsNoticedOrHarmless) {
  for_each_frame(kElementCount, [&](const Tensor& tensor, Frame& frame) {
    const Sections sections = frame.sections();
    for (uint64_t byte = 0; byte < sections.var;
         byte += byte + 1 == sections.slabs ? sections.records - sections.slabs + 1 : 1) {
      for (int bit = 0; bit < 8; ++bit) {
        frame.bytes.data()[byte] ^= static_cast<uint8_t>(1 << bit);
        expect_error_or_tensor(frame, tensor);
        frame.bytes.data()[byte] ^= static_cast<uint8_t>(1 << bit);
      }
    }
  });
}

TEST_P(Hostile, FlippedBitsOfSlabsAndPayloadsAreNoticedOrHarmless) {
  for_each_frame(3000, [&](const Tensor& tensor, Frame& frame) {
    const uint64_t end = frame.sections().var + frame.header().var_used * frame::kUnitBytes;
    for (uint64_t i = 0; i < 600; ++i) {
      const uint64_t bit = splitmix64(5, i) % (8 * (end - frame::kHeaderBytes));
      uint8_t& byte = frame.bytes.data()[frame::kHeaderBytes + bit / 8];
      byte ^= static_cast<uint8_t>(1 << bit % 8);
      expect_error_or_tensor(frame, tensor);
      byte ^= static_cast<uint8_t>(1 << bit % 8);
    }
  });
}

TEST_P(Hostile, TruncatedFramesAreErrors) {
  for_each_frame(1500, [&](const Tensor& tensor, Frame& frame) {
    for (uint64_t bytes = 0; bytes < frame.bytes.size(); bytes += bytes < 200 ? 1 : 61) {
      // A buffer of its own, so that a sanitizer sees every byte behind its end.
      Frame shorter{GuardedBuffer(bytes), GuardedBuffer()};
      memcpy(shorter.bytes.data(), frame.bytes.data(), bytes);
      ASSERT_NE(decode(codec(), shorter, &output(tensor)), frame::kOk) << bytes << " bytes";
    }
  });
}

TEST_P(Hostile, RandomRecordsStayInsideTheBuffers) {
  for_each_frame(kElementCount, [&](const Tensor& tensor, Frame& frame) {
    const Sections sections = frame.sections();
    for (uint64_t i = 0; i < 200; ++i) {
      Frame random{GuardedBuffer(frame.bytes.size()), GuardedBuffer(256)};
      memcpy(random.bytes.data(), frame.bytes.data(), frame.bytes.size());
      const uint64_t at = sections.records + splitmix64(i, 0) % (sections.tiles * sizeof(Record));
      for (uint64_t byte = at; byte < sections.var && byte < at + 4; ++byte) {
        random.bytes.data()[byte] = static_cast<uint8_t>(splitmix64(i, byte));
      }
      expect_error_or_tensor(random, tensor);
    }
  });
}

TEST_P(Hostile, AFrameOfAnotherTensorIsAnError) {
  const Tensor tensor({Kind::kNormal, 0}, Dtype::kBf16, 1, 2000);
  const Frame frame = encode(codec(), tensor, {});
  for (const auto& [dtype, elements] :
       {std::pair{Dtype::kFp16, 2000}, {Dtype::kBf16, 1999}, {Dtype::kBf16, 2001}}) {
    Tensor other(dtype, static_cast<uint64_t>(elements));
    EXPECT_EQ(decode(codec(), frame, &other), frame::kBadHeader);
  }
}

TEST_P(Hostile, EachKindOfDamageHasItsStatus) {
  const Tensor tensor({Kind::kOutliers, 6}, Dtype::kBf16, 1, 2000);
  const auto status_after = [&](auto damage) {
    Frame frame = encode(codec(), tensor, {});
    Record record = frame.record(0);
    damage(frame, record);
    memcpy(frame.bytes.data() + frame.sections().records, &record, sizeof(record));
    Tensor output(tensor.dtype, tensor.elements);
    return decode(codec(), frame, &output);
  };
  EXPECT_EQ(status_after([](Frame& frame, Record&) { frame.bytes.data()[0] ^= 1; }),
            frame::kBadHeader);
  EXPECT_EQ(status_after([](Frame&, Record& record) { record.block[0] |= 0xf000; }),
            frame::kBadRecord);
  EXPECT_EQ(status_after([](Frame&, Record& record) { record.block[7] = 1 << 12; }),
            frame::kBadRecord)
      << "a block behind the last one";
  EXPECT_EQ(status_after([](Frame&, Record& record) { record.base |= frame::kBaseInOverflow; }),
            frame::kBadRecord)
      << "there is no arena";
  EXPECT_EQ(status_after([](Frame&, Record& record) { record.base = 1 << 20; }), frame::kBadRecord);
  EXPECT_EQ(status_after([](Frame&, Record& record) { --record.block[0]; }), frame::kBadPayload);
  EXPECT_EQ(status_after([](Frame&, Record& record) { ++record.block[0]; }), frame::kBadPayload);
  EXPECT_EQ(status_after([](Frame&, Record& record) { ++record.checksum; }), frame::kBadChecksum);
  EXPECT_EQ(status_after([](Frame& frame, Record&) { frame.bytes.data()[200] ^= 1; }),
            frame::kBadChecksum);
}

TEST_P(Hostile, EveryModeRefusesAPayloadOfAnotherLength) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      for (const Pattern pattern : kPatterns) {
        SCOPED_TRACE(describe(dtype, layout) + " " + describe(pattern));
        const Tensor tensor(pattern, dtype, 1, 1024);
        Frame frame = encode(codec(), tensor, {.layout = layout, .checksum = false});
        const Record good = frame.record(0);
        const auto status_with = [&](uint32_t units) {
          Record record = good;
          record.block[0] =
              Record::pack(Record::mode(good.block[0]), units, Record::packed(good.block[0]));
          memcpy(frame.bytes.data() + frame.sections().records, &record, sizeof(record));
          return decode(codec(), frame, &output(tensor));
        };
        const uint32_t units = Record::units(good.block[0]);
        const uint32_t longest = frame.sections().max_payload_units;
        if (units > 0) {
          ASSERT_EQ(status_with(units - 1), frame::kBadPayload);
          ASSERT_EQ(status_with(0), frame::kBadPayload);
        }
        ASSERT_EQ(status_with(units + 1), units < longest ? frame::kBadPayload : frame::kBadRecord);
        ASSERT_EQ(status_with(units), frame::kOk);
      }
    }
  }
}

// A payload that begins with a bitmap may begin with a packed one; no other may.
TEST_P(Hostile, ThePackedBitWhereThereIsNoBitmapIsABadRecord) {
  for (const Dtype dtype : all_dtypes()) {
    for (const Layout layout : layouts_of(dtype)) {
      for (const Kind kind : {Kind::kBooleans, Kind::kNormal, Kind::kRandomBits}) {
        SCOPED_TRACE(describe(dtype, layout));
        const Tensor tensor({kind, 0}, dtype, 1, 1024);
        Frame frame = encode(codec(), tensor, {.layout = layout, .checksum = false});
        Record record = frame.record(0);
        record.block[0] |= 1 << Record::kPackedBit;
        memcpy(frame.bytes.data() + frame.sections().records, &record, sizeof(record));
        const uint32_t status = decode(codec(), frame, &output(tensor));
        ASSERT_EQ((status & frame::kBadRecord) == 0,
                  frame::has_bitmap(Record::mode(record.block[0])));
      }
    }
  }
}

class PackedBitmaps : public Hostile {
 protected:
  struct Packed {
    Tensor tensor;
    Frame frame;
    Record record;

    uint8_t* payload() { return frame.bytes.data() + frame.sections().var; }
  };

  // One block whose bitmap is packed, 40 of its bytes as they are.
  Packed packed_block(Dtype dtype) {
    Tensor tensor({Kind::kMixedBytes, 40}, dtype, 1, 1024);
    const Layout layout = dtype == Dtype::kBool ? Layout::kBits : Layout::kSparse;
    Frame frame = encode(codec(), tensor, {.layout = layout});
    const Record record = frame.record(0);
    EXPECT_TRUE(Record::packed(record.block[0]));
    return {std::move(tensor), std::move(frame), record};
  }

  uint32_t status_of(Packed& packed, const Record& record) {
    memcpy(packed.frame.bytes.data() + packed.frame.sections().records, &record, sizeof(record));
    return decode(codec(), packed.frame, &output(packed.tensor));
  }

  static constexpr Dtype kDtypes[] = {Dtype::kBool, Dtype::kBf16, Dtype::kFp16,
                                      Dtype::kFp32, Dtype::kFp64, Dtype::kE4m3};
};

TEST_P(PackedBitmaps, AByteThatIsSaidToBeAllZerosAndAllOnesIsABadPayload) {
  for (const Dtype dtype : kDtypes) {
    Packed packed = packed_block(dtype);
    for (uint32_t byte = 0; byte < frame::kBitmapBytes; ++byte) {
      uint8_t& z = packed.payload()[byte / 8];
      uint8_t& f = packed.payload()[frame::kByteMapBytes + byte / 8];
      const uint8_t old_z = z, old_f = f;
      z &= static_cast<uint8_t>(~(1 << byte % 8));
      f &= static_cast<uint8_t>(~(1 << byte % 8));
      ASSERT_EQ(status_of(packed, packed.record), frame::kBadPayload) << "byte " << byte;
      z = old_z;
      f = old_f;
    }
    ASSERT_EQ(status_of(packed, packed.record), frame::kOk);
    ASSERT_TRUE(output(packed.tensor).buffer == packed.tensor.buffer);
  }
}

// Of a byte that is neither all zeros nor all ones, Z and F are set; of the others, one of them.
TEST_P(PackedBitmaps, AMapThatPromisesMoreOrFewerBytesIsNoticedByTheLength) {
  Packed packed = packed_block(Dtype::kBool);
  uint32_t units = Record::units(packed.record.block[0]);
  ASSERT_EQ(units, (frame::kMapsBytes + 40) / frame::kUnitBytes);
  for (uint32_t byte = 0; byte < frame::kBitmapBytes; ++byte) {
    uint8_t& z = packed.payload()[byte / 8];
    uint8_t& f = packed.payload()[frame::kByteMapBytes + byte / 8];
    const uint8_t old_z = z, old_f = f, bit = static_cast<uint8_t>(1 << byte % 8);
    if ((z & f & bit) == 0) {  // one more: 41 bytes need another unit
      z |= bit;
      f |= bit;
      ASSERT_EQ(status_of(packed, packed.record), frame::kBadPayload) << "byte " << byte;
    }
    z = old_z;
    f = old_f;
  }
  Record record = packed.record;
  for (const uint32_t others : {units - 1, units + 1, 4u, 3u, 2u, 1u, 0u, 16u, 128u}) {
    record.block[0] = Record::pack(frame::kBitmap, others, true);
    ASSERT_EQ(status_of(packed, record), frame::kBadPayload) << others << " units";
  }
}

TEST_P(PackedBitmaps, ReadAsPlainOnesAreErrors) {
  for (const Dtype dtype : kDtypes) {
    Packed packed = packed_block(dtype);
    Record record = packed.record;
    record.block[0] ^= 1 << Record::kPackedBit;
    ASSERT_NE(status_of(packed, record), frame::kOk);
  }
}

// Decoders do not ask for the shortest form.
TEST_P(PackedBitmaps, BytesThatNeedNotBeThereAreRead) {
  Packed packed = packed_block(Dtype::kBool);
  const uint32_t units = (frame::kMapsBytes + frame::kBitmapBytes) / frame::kUnitBytes;
  Frame longer{GuardedBuffer(packed.frame.sections().bytes(units)), GuardedBuffer()};
  memcpy(longer.bytes.data(), packed.frame.bytes.data(), packed.frame.sections().var);
  Header header = packed.frame.header();
  header.var_capacity = units;
  header.var_used = units;
  memcpy(longer.bytes.data(), &header, sizeof(header));
  uint8_t* payload = longer.bytes.data() + longer.sections().var;
  memset(payload, 255, frame::kMapsBytes);
  for (uint32_t e = 0; e < frame::kBlockElements; ++e) {
    uint8_t& byte = payload[frame::kMapsBytes + e / 8];
    byte = static_cast<uint8_t>((e % 8 == 0 ? 0 : byte) | packed.tensor.buffer.data()[e] << e % 8);
  }
  packed.frame = std::move(longer);
  Record record = packed.record;
  record.block[0] = Record::pack(frame::kBitmap, units, true);
  ASSERT_EQ(status_of(packed, record), frame::kOk);
  ASSERT_TRUE(output(packed.tensor).buffer == packed.tensor.buffer);
}

TEST_P(Hostile, WithoutVerifyChecksumsAreNotLookedAt) {
  const Tensor tensor({Kind::kNormal, 0}, Dtype::kBf16, 1, 2000);
  Frame frame = encode(codec(), tensor, {});
  Record record = frame.record(0);
  ++record.checksum;
  memcpy(frame.bytes.data() + frame.sections().records, &record, sizeof(record));
  Tensor output(tensor.dtype, tensor.elements);
  uint32_t status = 0;
  memswap_decode_job job = decode_job(frame, &output, &status);
  job.verify = 0;
  ASSERT_EQ(codec().decode(&job, nullptr), MEMSWAP_CODEC_OK);
  EXPECT_EQ(status, frame::kOk);
  EXPECT_TRUE(output.buffer == tensor.buffer);
}

TEST_P(Hostile, StatusBitsAreAdded) {
  const Tensor tensor({Kind::kNormal, 0}, Dtype::kBf16, 1, 2000);
  Frame frame = encode(codec(), tensor, {});
  frame.bytes.data()[0] ^= 1;
  Tensor output(tensor.dtype, tensor.elements);
  uint32_t status = 1u << 31;
  const memswap_decode_job job = decode_job(frame, &output, &status);
  ASSERT_EQ(codec().decode(&job, nullptr), MEMSWAP_CODEC_OK);
  EXPECT_EQ(status, 1u << 31 | frame::kBadHeader);
}

MEMSWAP_FOR_EACH_INSTRUCTION_SET(Hostile);
MEMSWAP_FOR_EACH_INSTRUCTION_SET(PackedBitmaps);

}  // namespace
}  // namespace memswap::test
