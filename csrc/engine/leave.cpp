// How a storage leaves: what is done as ordered, and what is done instead where that cannot be.
#include <string>
#include <utility>

#include "block_form.h"
#include "engine.h"
#include "frame_form.h"
#include "iteration.h"
#include "windows.h"
#include "work/without_gil.h"

namespace memswap {

const char* Engine::leave(const EntryPtr& entry, StorageRefPtr storage, LeaveOrder order) {
  if (schedule != Schedule::kBatches) {
    return send(entry, storage, order);
  }
  order.transfers->meet_stream(order.form);
  entry->storage = std::move(storage);
  entry->order = std::move(order);
  return nullptr;
}

const char* Engine::send(const EntryPtr& entry, const StorageRefPtr& storage,
                         const LeaveOrder& order) {
  Transfers& by = *order.transfers;
  if (order.form == Form::kBlock) {
    return send_raw(entry, storage, by);
  }
  const std::shared_ptr<FrameSender>& sender = by.frames(order.form);
  // That the plan of its iteration has for a frame; nothing: as many as it takes.
  const std::optional<int64_t> most_bytes =
      entry->iteration ? entry->iteration->frame_nbytes(entry->index) : std::nullopt;
  const char* reason = "no codec";
  if (sender) {
    const Expectation expectation = by.expectations->of(order.key, most_bytes);
    if (!expectation.fault.empty()) {
      reason = distrusted(expectation, *entry);
    } else if (!expectation.pays) {
      reason = "does not shrink";
    } else if (defers(*sender)) {
      windows->defer(entry, storage, order, expectation);
      return nullptr;
    } else if (encode(entry, storage, order, expectation)) {
      return nullptr;
    } else if (!most_bytes || !sender->works_ahead()) {
      reason = refused(*sender, *entry);
    }
  }
  if (most_bytes && by.works_ahead()) {
    entry->iteration->unfit = true;  // the plan has no room for it where it is
    return send_raw(entry, storage, by);
  }
  return order.form == Form::kFrame ? reason : send_raw(entry, storage, by);
}

bool Engine::encode(const EntryPtr& entry, const StorageRefPtr& storage, const LeaveOrder& order,
                    Expectation expectation) {
  FrameSender& sender = *order.transfers->frames(order.form);
  const ExpectationsPtr& expectations = order.transfers->expectations;
  std::optional<Leaving> leaving = sender.send(storage, expectation.options);
  if (!leaving && expectation.trial) {
    expectation = expectations->settled(expectation);
    leaving = sender.send(storage, expectation.options);
  }
  if (!leaving) {
    return false;
  }
  std::shared_ptr<FrameWatch> watch = static_cast<const FrameForm&>(*leaving->away).watch();
  entry->leave(std::move(*leaving));
  departing.add(entry.get());
  // Where nothing works ahead an encode has ended, unless it failed.
  if (sender.works_ahead() || reported(*watch)) {
    awaited_.push_back({expectations, std::move(expectation), std::move(watch), entry});
  }
  return true;
}

// The codec must not encode such a tensor: the reason, which is told in full once.
const char* Engine::distrusted(const Expectation& expectation, const Entry& entry) {
  const FrameOptions& options = expectation.options;
  ledger.tell_once("codec fault " + std::to_string(options.dtype) + " " +
                       std::to_string(options.shape.value_or(0)),
                   "a storage of " + std::to_string(entry.nbytes()) + " bytes on " +
                       entry.device().str() + " is not encoded: " + expectation.fault +
                       ". Training goes on with less memory saved.");
  return "codec failed its check";
}

std::optional<FrameReport> Engine::reported(FrameWatch& watch) {
  const WithoutGil without_gil;
  return watch.report();
}

void Engine::learn() {
  while (!awaited_.empty()) {
    const std::shared_ptr<FrameWatch> watch = awaited_.front().watch;
    const std::optional<FrameReport> report = reported(*watch);
    if (!report) {
      return;
    }
    const Awaited made = std::move(awaited_.front());
    awaited_.pop_front();
    made.expectations->learn(made.expectation, *report);
    ++ledger.counters.encoded_storages;
    ledger.counters.encoded_bytes += made.expectation.key.nbytes;
    ledger.counters.frame_bytes += static_cast<int64_t>(report->frame_nbytes());
    if (const EntryPtr entry = made.entry.lock()) {
      entry->count_away();
    }
  }
}

}  // namespace memswap
