// Which operator made which storage.
#include "engine/operator_log.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/square.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace memswap {
namespace {

KnownTensor known(const at::Tensor& tensor) { return *KnownTensor::of(tensor); }

std::string name_of(const OperatorCallPtr& call) {
  return call ? call->rule().op.operator_name().name : "nobody";
}

class InALog : public ::testing::Test {
 protected:
  void SetUp() override { log->enter(); }
  void TearDown() override { log->leave(); }

  std::string maker(const at::Tensor& tensor) const { return name_of(log->maker(known(tensor))); }

  const OperatorLogPtr log = std::make_shared<OperatorLog>(OperatorRules());
};

struct Listening final : EditListener {
  void before_edit() noexcept override { ++edits; }
  int edits = 0;
};

TEST_F(InALog, TheInnermostRepeatableOperatorIsTheMaker) {
  const at::Tensor x = at::ones({8});
  EXPECT_EQ(maker(at::silu(x)), "aten::silu");
  EXPECT_EQ(maker(x.to(at::kBFloat16)), "aten::_to_copy");  // `to` is made of it
  EXPECT_EQ(maker(at::square(x)), "aten::pow");
}

TEST_F(InALog, NobodyMadeWhatAViewAProductOrAGeneratorGave) {
  const at::Tensor x = at::ones({8, 8});
  EXPECT_EQ(maker(x.t()), "nobody");
  EXPECT_EQ(maker(at::mm(x, x)), "nobody");
  EXPECT_EQ(maker(at::dropout(x, 0.5, true)), "aten::mul");  // of a mask that nobody made
  EXPECT_EQ(maker(at::bernoulli(x, 0.5)), "nobody");
  EXPECT_EQ(maker(at::rand({8})), "nobody");
}

TEST_F(InALog, AViewHasTheMakerOfItsStorage) {
  const at::Tensor y = at::ones({4, 4}).exp();
  EXPECT_EQ(maker(y.t().slice(0, 1, 2)), "aten::exp");
}

TEST_F(InALog, AnInputIsHeldFromItsCallOnUntilItIsLetGo) {
  const auto forward = [&](const at::Tensor& stream) {
    const at::Tensor added = at::mm(stream, stream);
    const at::Tensor total = at::add(stream, added);
    return std::pair(log->maker(known(total)), known(added));
  };
  const at::Tensor x = at::ones({8, 8});
  log->clear();
  const uint64_t moment = log->moment_of(*forward(x).first);
  log->hold({{moment, {{.op = "aten::add", .input = 1, .nbytes = 256}}}});
  log->clear();
  const auto [call, added] = forward(x);
  EXPECT_TRUE(added.lock().defined());
  log->let_go(*call);
  EXPECT_FALSE(added.lock().defined());
  log->clear();
  const KnownTensor last = forward(x).second;
  EXPECT_TRUE(last.lock().defined());
  for (int calls = 0; calls < 80; ++calls) {
    at::exp(x);
  }
  EXPECT_FALSE(last.lock().defined()) << "nobody has asked for it";
  const KnownTensor late = forward(x).second;
  EXPECT_FALSE(late.lock().defined()) << "it is another moment";
  log->hold({{moment, {{.op = "aten::sub", .input = 1, .nbytes = 256}}}});
  log->clear();
  EXPECT_FALSE(forward(x).second.lock().defined()) << "it is another operator";
  log->hold({{moment, {{.op = "aten::add", .input = 1, .nbytes = 256}}}});
  log->clear();
  const KnownTensor dropped = forward(x).second;
  log->clear();
  EXPECT_FALSE(dropped.lock().defined()) << "the next forward has begun";
}

TEST_F(InALog, AnEditEndsWhatIsKnown) {
  at::Tensor x = at::ones({8}), y = at::exp(x), z = at::exp(x);
  const OperatorCallPtr call = log->maker(known(z));
  ASSERT_TRUE(call);
  y.mul_(2);
  EXPECT_EQ(maker(y), "nobody");
  EXPECT_FALSE(log->edited_since(*call, call->inputs()[0].tensor));
  x.view({2, 4}).add_(1);
  EXPECT_TRUE(log->edited_since(*call, call->inputs()[0].tensor));
}

TEST_F(InALog, AnEditThatHasACounterOfItsOwnIsSeen) {
  const at::Tensor x = at::ones({8}), y = at::exp(x);
  const OperatorCallPtr call = log->maker(known(y));
  x.detach().variable_data().add_(1);  // as `.data` does
  EXPECT_FALSE(call->inputs()[0].tensor.view.edited());
  EXPECT_TRUE(log->edited_since(*call, call->inputs()[0].tensor));
}

TEST_F(InALog, WhoListensHearsOfAnEditBeforeIt) {
  const at::Tensor x = at::ones({8});
  const auto listener = std::make_shared<Listening>();
  log->listen(known(x), listener);
  at::ones({8}).add_(1);
  EXPECT_EQ(listener->edits, 0);
  at::add_out(const_cast<at::Tensor&>(x), x, x);
  EXPECT_EQ(listener->edits, 1);
}

TEST_F(InALog, UnderAutocastTheMakerIsWhatTheCastsWereMadeFor) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor x = at::ones({8}, at::kBFloat16);
  const at::Tensor y = at::mse_loss(x, x);  // in float32, by autocast's rule
  const at::Tensor z = at::cat({x, at::ones({8})});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  const OperatorCallPtr call = log->maker(known(z));
  ASSERT_TRUE(call);
  ASSERT_EQ(call->inputs().size(), 2u);
  EXPECT_EQ(name_of(log->maker(call->inputs()[0].tensor)), "aten::_to_copy");
}

TEST_F(InALog, NoMemoryIsKept) {
  std::optional<KnownTensor> freed, made;
  {
    const at::Tensor x = at::ones({8});
    const at::Tensor y = at::exp(x);
    freed = known(x);
    made = known(y);
  }
  EXPECT_FALSE(freed->lock().defined());
  EXPECT_FALSE(made->lock().defined());
  EXPECT_EQ(name_of(log->maker(*made)), "aten::exp") << "it can still be made again";
}

TEST_F(InALog, WhatFailsMakesNothing) {
  const size_t before = log->size();
  EXPECT_THROW(at::add(at::ones({3}), at::ones({4})), c10::Error);
  EXPECT_FALSE(log->running());
  EXPECT_EQ(log->size(), before);
}

TEST_F(InALog, OperatorsOfOtherThreadsAndUnobservedOnesAreNotSeen) {
  at::Tensor x = at::ones({8}), y, z;
  std::thread([&] { y = at::exp(x); }).join();
  EXPECT_EQ(maker(y), "nobody");
  {
    const OperatorLog::Unobserved unobserved;
    z = at::exp(x);
  }
  EXPECT_EQ(maker(z), "nobody");
}

TEST_F(InALog, OfNestedLogsTheInnermostOneLearnsAndBothHearOfEdits) {
  const auto inner = std::make_shared<OperatorLog>(OperatorRules());
  at::Tensor x = at::ones({8});
  const auto listener = std::make_shared<Listening>();
  log->listen(known(x), listener);
  inner->enter();
  const at::Tensor y = at::exp(x);
  x.add_(1);
  inner->leave();
  EXPECT_EQ(name_of(inner->maker(known(y))), "aten::exp");
  EXPECT_EQ(maker(y), "nobody");
  EXPECT_EQ(listener->edits, 1);
  EXPECT_EQ(maker(at::exp(x)), "aten::exp");
}

TEST(OperatorLog, OutsideNothingIsSeenAndAThreadMayEnterSeveralTimes) {
  const auto log = std::make_shared<OperatorLog>(OperatorRules());
  const at::Tensor x = at::ones({8});
  log->enter();
  log->enter();
  log->leave();
  EXPECT_TRUE(log->inside());
  log->leave();
  EXPECT_FALSE(log->inside());
  const at::Tensor y = at::exp(x);
  EXPECT_FALSE(log->maker(known(y)));
  log->leave();  // nothing happens
}

TEST(OperatorRules, SayWhyAnOperatorIsNeverRunAgain) {
  const auto rule = [](const char* name, const char* overload, std::vector<std::string> more) {
    return OperatorRules(more).rule_of(
        c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
  };
  EXPECT_EQ(rule("aten::silu", "", {}).kind, OperatorKind::kRepeatable);
  EXPECT_EQ(rule("aten::silu_", "", {}).kind, OperatorKind::kEdits);
  EXPECT_EQ(rule("aten::silu", "out", {}).kind, OperatorKind::kEdits);
  EXPECT_EQ(rule("aten::mm", "", {}).kind, OperatorKind::kOther);
  EXPECT_EQ(rule("aten::mm", "", {"aten::mm"}).reason, "named by the user");
  EXPECT_EQ(rule("aten::mm", "", {"aten::mm"}).kind, OperatorKind::kRepeatable);
  for (const char* drawn : {"aten::native_dropout", "aten::rand_like", "aten::randn_like"}) {
    EXPECT_EQ(rule(drawn, "", {drawn}).kind, OperatorKind::kOther) << drawn;
  }
  EXPECT_NE(rule("aten::rrelu_with_noise", "", {"aten::rrelu_with_noise"}).kind,
            OperatorKind::kRepeatable);
  EXPECT_EQ(rule("aten::view", "", {"aten::view"}).reason, "returns a view");
  for (const char* shared : {"_c10d_functional::all_reduce", "_c10d_functional::wait_tensor",
                             "_c10d_functional::all_gather_into_tensor"}) {
    EXPECT_EQ(rule(shared, "", {shared}).reason, "communicates with other processes") << shared;
  }
  EXPECT_EQ(rule("aten::nonzero", "", {"aten::nonzero"}).kind, OperatorKind::kOther);
  EXPECT_EQ(rule("aten::equal", "", {"aten::equal"}).kind, OperatorKind::kOther);
}

TEST(OperatorRules, RefuseNamesOfAnotherForm) {
  for (const char* name : {"silu", "aten::", "::silu", "aten::silu.out"}) {
    EXPECT_THROW(OperatorRules({name}), std::invalid_argument) << name;
  }
}

}  // namespace
}  // namespace memswap
