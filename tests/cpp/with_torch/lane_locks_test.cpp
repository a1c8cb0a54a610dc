// [Note: No lock while holding the GIL] in csrc/lane/stream_lane.h, on a backend that needs the
// GIL in every event call.
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "fake_device.h"
#include "lane/device_streams.h"
#include "lane/stream_lane.h"
#include "storage/storage.h"

namespace memswap {
namespace {

using testing::GlobalLock;

// Ordinary memory, with the uses that were recorded.
class HostBlock final : public Block {
 public:
  explicit HostBlock(size_t nbytes) : bytes_(nbytes) {}
  size_t nbytes() const override { return bytes_.size(); }
  void shrink(size_t nbytes) override { bytes_.resize(nbytes); }
  void* data() const override { return const_cast<std::byte*>(bytes_.data()); }
  bool pinned() const override { return true; }
  size_t offset() const override { return 0; }
  void write(const void*) override {}
  void read(void*) override {}
  void used_by(TicketPtr) override {}
  Tickets uses() const override { return {}; }

 private:
  std::vector<std::byte> bytes_;
};

struct Call {
  std::string name;
  std::function<void(Ticket&)> on;
};
void PrintTo(const Call& call, std::ostream* out) { *out << call.name; }

// A thread may make each of these while it holds the GIL: the bindings let go of it for calls, but
// a destructor of Python's, of a block for instance, asks tickets with the lock held.
const Call kCalls[] = {
    {"wait", [](Ticket& ticket) { ticket.wait(); }},
    {"done", [](Ticket& ticket) { (void)ticket.done(); }},
    {"synchronize", [](Ticket& ticket) { ticket.synchronize(); }},
    {"abandon", [](Ticket& ticket) { ticket.abandon(); }},
    {"order_before",
     [](Ticket& ticket) {
       dynamic_cast<StreamTicket&>(ticket).order_before(
           c10::Stream(c10::Stream::DEFAULT, testing::kFakeDevice));
     }},
};

enum class Direction { kSend, kFetch };
void PrintTo(Direction direction, std::ostream* out) {
  *out << (direction == Direction::kSend ? "a send" : "a fetch");
}

class LaneLocks : public ::testing::TestWithParam<std::tuple<Call, Call, Direction>> {
 protected:
  void SetUp() override {
    GlobalLock::install();
    testing::events_have_ended = false;
  }
  void TearDown() override { testing::in_event_call = nullptr; }

  static TicketPtr start(Direction direction) {
    auto lane = std::make_shared<StreamLane>(testing::kFakeDevice, 0, 64);
    auto block = std::make_shared<HostBlock>(200);
    if (direction == Direction::kFetch) {
      return lane->fetch(block).second;
    }
    return lane->send(std::make_shared<StorageRef>(testing::fake_bytes(200).storage()), block);
  }
};

TEST_P(LaneLocks, ACallMadeWithTheGilDoesNotStopOneThatNeedsIt) {
  const auto& [inside, outside, direction] = GetParam();
  const TicketPtr ticket = start(direction);
  std::latch locked(1);  // the ticket's lock is held, and the backend is about to ask for the GIL
  std::latch armed(1);   // the other thread holds the GIL, and is about to ask for the ticket
  bool could_be_taken = true;
  const auto one = std::this_thread::get_id();
  testing::in_event_call = [&] {
    if (std::this_thread::get_id() != one) {
      EXPECT_FALSE(GlobalLock::held_here()) << "the backend was called with the GIL held";
      return;
    }
    locked.count_down();
    armed.wait();
    could_be_taken = GlobalLock::can_be_taken();
  };
  std::thread other([&, &outside = outside] {
    locked.wait();
    const GlobalLock gil;
    armed.count_down();
    outside.on(*ticket);
  });
  inside.on(*ticket);
  other.join();
  EXPECT_TRUE(could_be_taken) << outside.name << " waits with the GIL for a lock that "
                              << inside.name << " keeps until it has the GIL: a deadlock";
}

INSTANTIATE_TEST_SUITE_P(EveryPair, LaneLocks,
                         ::testing::Combine(::testing::ValuesIn(kCalls),
                                            ::testing::ValuesIn(kCalls),
                                            ::testing::Values(Direction::kSend, Direction::kFetch)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_and_" +
                                  std::get<1>(info.param).name +
                                  (std::get<2>(info.param) == Direction::kSend ? "_of_a_send"
                                                                               : "_of_a_fetch");
                         });

TEST_F(LaneLocks, ATicketThatIsDroppedWithTheGilCallsTheBackendWithoutIt) {
  for (const Direction direction : {Direction::kSend, Direction::kFetch}) {
    TicketPtr ticket = start(direction);
    int calls = 0;
    testing::in_event_call = [&] {
      ++calls;
      EXPECT_FALSE(GlobalLock::held_here());
    };
    const GlobalLock gil;
    if (direction == Direction::kFetch) {  // the lane itself keeps a send until it has ended
      ticket.reset();
    } else {
      ticket->abandon();
    }
    EXPECT_GT(calls, 0) << "nothing was ordered: the test says nothing";
    EXPECT_TRUE(GlobalLock::held_here());
    testing::in_event_call = nullptr;
  }
}

}  // namespace
}  // namespace memswap
