// Bitmaps at the head of payloads, plain and packed: the oracle's, and damaged ones.
#include "emulated_codec.h"

namespace memswap::test {
namespace {

class Bitmaps : public Emulated {
 protected:
  static constexpr Dtype kDtypes[] = {Dtype::kBool, Dtype::kBf16, Dtype::kFp16,
                                      Dtype::kFp32, Dtype::kFp64, Dtype::kE4m3};

  static Layout layout_of(Dtype dtype) {
    return dtype == Dtype::kBool ? Layout::kBits : Layout::kSparse;
  }

  // One block whose bitmap is packed, 40 of its bytes as they are.
  struct Packed {
    Tensor tensor;
    Frame frame;
    Record record;

    uint8_t* payload() { return frame.bytes.data() + frame.sections().var; }
    uint32_t status_of(const Record& said) {
      memcpy(frame.bytes.data() + frame.sections().records, &said, sizeof(said));
      Tensor output(tensor.dtype, tensor.elements);
      const uint32_t status = decode(emulated(), frame, &output);
      EXPECT_TRUE(status != frame::kOk || output.buffer == tensor.buffer);
      return status;
    }
  };
  static Packed packed_block(Dtype dtype) {
    Tensor tensor({Kind::kMixedBytes, 40}, dtype, 1, 1024);
    Frame frame = encode(emulated(), tensor, {.layout = layout_of(dtype)});
    const Record record = frame.record(0);
    EXPECT_TRUE(Record::packed(record.block[0]));
    return {std::move(tensor), std::move(frame), record};
  }
};

TEST_F(Bitmaps, AreTheOraclesPlainAndPacked) {
  for (const Dtype dtype : kDtypes) {
    for (const Pattern pattern : kPatterns) {
      if (pattern.kind != Kind::kMixedBytes && pattern.kind != Kind::kCausal) {
        continue;
      }
      SCOPED_TRACE(describe(dtype, layout_of(dtype)) + " " + describe(pattern));
      const Tensor tensor = tensor_at(0, pattern, dtype, 3, 2 * 1024 + 700);
      ASSERT_NO_FATAL_FAILURE(expect_same_as_oracle(tensor, {.layout = layout_of(dtype)}));
    }
  }
}

TEST_F(Bitmaps, ThatSayAByteIsAllZerosAndAllOnesAreBadPayloads) {
  for (const Dtype dtype : kDtypes) {
    Packed packed = packed_block(dtype);
    for (uint32_t byte = 0; byte < frame::kBitmapBytes; byte += 5) {
      uint8_t& z = packed.payload()[byte / 8];
      uint8_t& f = packed.payload()[frame::kByteMapBytes + byte / 8];
      const uint8_t old_z = z, old_f = f;
      z &= static_cast<uint8_t>(~(1 << byte % 8));
      f &= static_cast<uint8_t>(~(1 << byte % 8));
      ASSERT_EQ(packed.status_of(packed.record), frame::kBadPayload) << "byte " << byte;
      z = old_z;
      f = old_f;
    }
    ASSERT_EQ(packed.status_of(packed.record), frame::kOk);
  }
}

TEST_F(Bitmaps, ThatPromiseMoreThanThereIsAreBadPayloads) {
  for (const Dtype dtype : kDtypes) {
    Packed packed = packed_block(dtype);
    const uint32_t mode = Record::mode(packed.record.block[0]);
    const uint32_t units = Record::units(packed.record.block[0]);
    for (const uint32_t others : {0u, 1u, 3u, 4u, units - 1, units + 1, 15u, 16u, 128u}) {
      for (const bool is_packed : {false, true}) {
        if (others != units) {
          Record record = packed.record;
          record.block[0] = Record::pack(mode, others, is_packed);
          ASSERT_NE(packed.status_of(record), frame::kOk) << others << " units";
          ASSERT_TRUE(emulator::errors.empty()) << emulator::errors[0];
        }
      }
    }
    memset(packed.payload(), 0xff, frame::kMapsBytes);  // 128 bytes as they are
    ASSERT_NE(packed.status_of(packed.record), frame::kOk);
  }
}

TEST_F(Bitmaps, MayBeLongerThanTheyNeedToBe) {
  Packed packed = packed_block(Dtype::kBool);
  constexpr uint32_t kUnits = (frame::kMapsBytes + frame::kBitmapBytes) / frame::kUnitBytes;
  Frame longer{GuardedBuffer(packed.frame.sections().bytes(kUnits)), GuardedBuffer()};
  Header header = packed.frame.header();
  header.var_capacity = header.var_used = kUnits;
  memcpy(longer.bytes.data(), &header, sizeof(header));
  packed.frame = std::move(longer);
  memset(packed.payload(), 0xff, frame::kMapsBytes);
  uint8_t* bytes = packed.payload() + frame::kMapsBytes;
  memset(bytes, 0, frame::kBitmapBytes);
  for (uint32_t e = 0; e < frame::kBlockElements; ++e) {
    bytes[e / 8] |= static_cast<uint8_t>(packed.tensor.buffer.data()[e] << e % 8);
  }
  Record record = packed.record;
  record.block[0] = Record::pack(frame::kBitmap, kUnits, true);
  ASSERT_EQ(packed.status_of(record), frame::kOk);
}

TEST_F(Bitmaps, ArePackedOnlyWhereThereAreAny) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp32, Dtype::kBool, Dtype::kInt16}) {
    for (const Layout layout : layouts_of(dtype)) {
      for (const Kind kind : {Kind::kBooleans, Kind::kNormal, Kind::kRandomBits}) {
        SCOPED_TRACE(describe(dtype, layout));
        const Tensor tensor({kind, 0}, dtype, 1, 1024);
        Frame frame = encode(emulated(), tensor, {.layout = layout, .checksum = false});
        Record record = frame.record(0);
        record.block[0] |= 1 << Record::kPackedBit;
        memcpy(frame.bytes.data() + frame.sections().records, &record, sizeof(record));
        Tensor output(tensor.dtype, tensor.elements);
        const uint32_t status = decode(emulated(), frame, &output);
        ASSERT_TRUE(emulator::errors.empty()) << emulator::errors[0];
        ASSERT_EQ((status & frame::kBadRecord) == 0,
                  frame::has_bitmap(Record::mode(record.block[0])));
      }
    }
  }
}

}  // namespace
}  // namespace memswap::test
