// Transfers: a storage is sent as what it is told to, or the reason is said; and what encoders find
// out is taken in.
#include "engine/transfers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "codec/worker_codec_lane.h"
#include "lane/worker_lane.h"
#include "pool/host_slabs.h"
#include "pool/pool.h"

namespace memswap {
namespace {

constexpr int64_t kTensorBytes = 1 << 20;
constexpr size_t kSlabBytes = 4 << 20;
const c10::Device kCpu(c10::kCPU);
const TensorKey kTensor{"unit", 0, kTensorBytes, c10::ScalarType::Byte};

std::shared_ptr<Pool> new_pool() {
  return std::make_shared<Pool>(
      std::make_shared<BudgetedSlabs>(std::make_shared<OrdinarySlabs>(), kSlabBytes),
      PoolOptions{.slab_bytes = kSlabBytes, .alignment = 512});
}

// A codec without room, which notes the layouts that it was asked for.
class FullCodec final : public CodecLane {
 public:
  std::optional<Encoding> encode(StorageRefPtr, const FrameOptions& options) override {
    asked.push_back(*options.layout);
    return refuse("no room at all");
  }
  std::optional<Encoding> encode_to(StorageRefPtr storage, const FrameOptions& options,
                                    const std::shared_ptr<Lane>&,
                                    const std::shared_ptr<Pool>&) override {
    return encode(std::move(storage), options);
  }
  std::pair<StorageRefPtr, TicketPtr> decode(const EncodedStoragePtr&) override { return {}; }
  void settle() override {}
  size_t leaving_bytes() override { return 0; }
  void set_max_leaving_bytes(size_t bytes) override { bound = bytes; }

  std::vector<uint8_t> asked;
  size_t bound = 0;
};

class SentBy : public ::testing::Test {
 protected:
  std::unique_ptr<Transfers> by(std::shared_ptr<CodecLane> codec, ExpectationsPtr expectations) {
    auto made = std::make_unique<Transfers>(kCpu, std::move(expectations), Transfers::Traits{});
    made->set_blocks(std::make_shared<BlockSender>(lane, pool));
    if (codec) {
      made->set_frames(Form::kFrame, std::make_shared<FrameSender>(std::move(codec), false));
    }
    return made;
  }
  std::unique_ptr<Transfers> by_codec() {
    return by(std::make_shared<WorkerCodecLane>(0, new_pool(), nullptr),
              Expectations::of_device(kCpu, {}));
  }

  static StorageRefPtr storage_of(const at::Tensor& tensor) {
    return std::make_shared<StorageRef>(tensor.storage());
  }
  static Refused refused(std::variant<Leaving, Refused> sent) {
    return std::get<Refused>(std::move(sent));
  }

  const std::shared_ptr<Pool> pool = new_pool();
  const std::shared_ptr<WorkerLane> lane = std::make_shared<WorkerLane>(0, kSlabBytes);
};

at::Tensor noise() {
  at::Tensor tensor = at::empty({kTensorBytes}, at::kByte);
  std::mt19937 random(1);
  auto* const bytes = tensor.mutable_data_ptr<uint8_t>();
  for (int64_t index = 0; index < kTensorBytes; ++index) {
    bytes[index] = static_cast<uint8_t>(random());
  }
  return tensor;
}

TEST_F(SentBy, AFrameComesBackAndItsReportIsTakenInOnce) {
  const auto transfers = by_codec();
  const auto sent =
      transfers->send(Form::kFrame, storage_of(at::zeros({kTensorBytes}, at::kByte)), kTensor);
  ASSERT_TRUE(std::holds_alternative<Leaving>(sent));
  EXPECT_EQ(transfers->awaited_reports(), 1u);
  EXPECT_FALSE(transfers->expectations->sizes(kTensor));
  const auto encoded = transfers->take_report();
  ASSERT_TRUE(encoded);
  EXPECT_EQ(encoded->nbytes, kTensorBytes);
  EXPECT_LT(encoded->frame_nbytes, kTensorBytes / 10);
  EXPECT_TRUE(encoded->entry.expired());
  EXPECT_FALSE(transfers->take_report());
  EXPECT_TRUE(transfers->expectations->sizes(kTensor));
  const auto [storage, arrival] = std::get<Leaving>(sent).away->bring();
  arrival->wait();
  const auto* const bytes = static_cast<const char*>(storage->storage.data());
  EXPECT_EQ(std::string(bytes, kTensorBytes), std::string(kTensorBytes, '\0'));
}

TEST_F(SentBy, WhatDidNotShrinkStaysFromThenOn) {
  const auto transfers = by_codec();
  EXPECT_TRUE(
      std::holds_alternative<Leaving>(transfers->send(Form::kFrame, storage_of(noise()), kTensor)));
  transfers->learn();
  EXPECT_EQ(transfers->awaited_reports(), 0u);
  const Refused stays = refused(transfers->send(Form::kFrame, storage_of(noise()), kTensor));
  EXPECT_STREQ(stays.reason, "does not shrink");
  EXPECT_EQ(stays.why, "");
}

TEST_F(SentBy, WhatTheCodecMayNotEncodeStaysAndItIsSaidWhy) {
  const auto expectations = std::make_shared<Expectations>(
      Expectations::Device{.fault = [](uint8_t, uint8_t) { return "it gave other bits"; }},
      ExpectationLimits{});
  const auto codec = std::make_shared<FullCodec>();
  const auto transfers = by(codec, expectations);
  const StorageRefPtr storage = storage_of(at::zeros({kTensorBytes}, at::kByte));
  const Refused stays = refused(transfers->send(Form::kFrame, storage, kTensor));
  EXPECT_STREQ(stays.reason, "codec failed its check");
  EXPECT_EQ(stays.why, "it gave other bits");
  EXPECT_TRUE(codec->asked.empty());
}

TEST_F(SentBy, WithoutACodecOrRoomTheReasonIsSaid) {
  const auto transfers = by(nullptr, Expectations::of_device(kCpu, {}));
  const StorageRefPtr small = storage_of(at::zeros({kTensorBytes}, at::kByte));
  EXPECT_STREQ(refused(transfers->send(Form::kFrame, small, kTensor)).reason, "no codec");
  EXPECT_TRUE(std::holds_alternative<Leaving>(transfers->send(Form::kBlock, small, kTensor)));
  const StorageRefPtr large = storage_of(at::empty({2 * kSlabBytes}, at::kByte));
  const Refused full = refused(transfers->send(Form::kBlock, large, kTensor));
  EXPECT_STREQ(full.reason, reasons::kPool);
  EXPECT_NE(full.why.find("budget"), std::string::npos) << full.why;
}

TEST_F(SentBy, ASenderIsAskedForOnceAndOnlyWhenItIsNeeded) {
  Transfers transfers(kCpu, Expectations::of_device(kCpu, {}), {});
  std::vector<Form> asked;
  transfers.set_opens([&](Form form) {
    asked.push_back(form);
    if (form == Form::kBlock) {
      transfers.set_blocks(std::make_shared<BlockSender>(lane, pool));
    }
  });
  EXPECT_TRUE(asked.empty()) << "a pool is there for nothing";
  const StorageRefPtr storage = storage_of(at::zeros({kTensorBytes}, at::kByte));
  for (int times = 0; times < 2; ++times) {
    EXPECT_TRUE(std::holds_alternative<Leaving>(transfers.send(Form::kBlock, storage, kTensor)));
  }
  EXPECT_EQ(asked, (std::vector{Form::kBlock}));
  for (int times = 0; times < 2; ++times) {
    EXPECT_STREQ(refused(transfers.send(Form::kFrame, storage, kTensor)).reason, "no codec");
  }
  EXPECT_EQ(asked, (std::vector{Form::kBlock, Form::kFrame}));
}

TEST_F(SentBy, ALaneIsBoundedWheneverItIsOpened) {
  const auto early = std::make_shared<FullCodec>(), late = std::make_shared<FullCodec>();
  const auto transfers = by(early, Expectations::of_device(kCpu, {}));
  EXPECT_EQ(early->bound, 0u) << "no forward has begun";
  transfers->begin(1000, 1 << 20);
  EXPECT_EQ(early->bound, 1000u);
  transfers->set_frames(Form::kPooledFrame, std::make_shared<FrameSender>(late, false));
  EXPECT_EQ(late->bound, 1000u) << "a lane that is opened later may hold all of the device";
  transfers->begin(2000, 1 << 20);
  EXPECT_EQ(early->bound, 2000u);
  EXPECT_EQ(late->bound, 2000u);
}

// A tensor whose next frame is a trial: constants of floats may be integers.
TEST_F(SentBy, ATrialWithoutRoomIsAskedForInTheLayoutThatIsKnown) {
  const auto expectations =
      std::make_shared<Expectations>(Expectations::Device{}, ExpectationLimits{.trial_share = 1});
  const TensorKey floats{"unit", 0, kTensorBytes, c10::ScalarType::BFloat16};
  FrameFacts flat;
  flat.frame_nbytes = kTensorBytes / 2;
  flat.elements = kTensorBytes / 2;
  flat.blocks = flat.fw2_blocks = 512;
  expectations->learn(expectations->of(floats), flat);
  expectations->begin_iteration();
  const auto codec = std::make_shared<FullCodec>();
  const auto transfers = by(codec, expectations);
  const Refused full = refused(
      transfers->send(Form::kFrame, storage_of(at::zeros({kTensorBytes}, at::kByte)), floats));
  EXPECT_STREQ(full.reason, reasons::kCodecRoom);
  EXPECT_EQ(full.why, "no room at all");
  EXPECT_EQ(codec->asked, (std::vector{static_cast<uint8_t>(frame::Layout::kInts),
                                       static_cast<uint8_t>(frame::Layout::kDense)}));
  EXPECT_EQ(transfers->awaited_reports(), 0u);
}

}  // namespace
}  // namespace memswap
