// How a storage leaves that is not swapped at once (save.cpp): as a frame, or when its batch is
// told to go; what is done instead where that cannot be, and what encoders report.
#include <string>
#include <utility>
#include <variant>

#include "block_form.h"
#include "engine.h"
#include "frame_form.h"
#include "iteration.h"
#include "reasons.h"
#include "windows.h"

namespace memswap {

Reason Engine::leave(const EntryPtr& entry, StorageRefPtr storage, LeaveOrder order) {
  if (schedule != Schedule::kBatches) {
    return send(entry, storage, order);
  }
  order.transfers->meet_stream(order.form);
  entry->hold(std::move(storage), std::move(order));
  return nullptr;
}

Reason Engine::send(const EntryPtr& entry, const StorageRefPtr& storage, const LeaveOrder& order) {
  Transfers& by = *order.transfers;
  if (order.form == Form::kBlock) {
    return send_raw(entry, storage, by);
  }
  // Bytes that the iteration's plan has for the frame; nothing: as many as it takes.
  const std::optional<int64_t> most_bytes =
      entry->iteration() ? entry->iteration()->frame_nbytes(entry->index()) : std::nullopt;
  const auto expected = by.expect(order.form, order.key, most_bytes);
  if (const auto* const expectation = std::get_if<Expectation>(&expected)) {
    if (defers(*by.frames(order.form))) {
      windows->defer(entry, storage, order, *expectation);
      return nullptr;
    }
    return send_frame(entry, storage, order, *expectation);
  }
  const Reason reason = declined(std::get<Refused>(expected), *entry);
  return send_unencoded(entry, storage, order, most_bytes && by.works_ahead(), reason);
}

// What has no frame, for a reason. `planned`: a plan has no more room for it where it is.
Reason Engine::send_unencoded(const EntryPtr& entry, const StorageRefPtr& storage,
                              const LeaveOrder& order, bool planned, Reason reason) {
  if (planned) {
    entry->iteration()->course.note_unfit();
  }
  const bool leaves = planned || order.form != Form::kFrame;
  return leaves ? send_raw(entry, storage, *order.transfers) : reason;
}

Reason Engine::send_frame(const EntryPtr& entry, const StorageRefPtr& storage,
                          const LeaveOrder& order, const Expectation& expectation) {
  Transfers& by = *order.transfers;
  if (std::optional<Leaving> leaving = by.encode(order.form, storage, expectation, entry)) {
    depart(*entry, std::move(*leaving));
    return nullptr;
  }
  const bool planned = expectation.most_bytes && by.works_ahead();
  if (!planned) {
    tell_refused(*by.frames(order.form), *entry, order.form);
  }
  return send_unencoded(entry, storage, order, planned, reasons::kCodecRoom);
}

// An accelerator's first frames have guessed lengths, so the room that they were short of at first
// is counted and not told. What a later iteration is short of as well, is.
void Engine::tell_refused(const FrameSender& sender, const Entry& entry, Form form) {
  if (sender.arena_was_full() && !short_again(entry.iteration())) {
    return;
  }
  if (form == Form::kFrame) {
    refused(reasons::kCodecRoom, sender.why_refused(), entry);
  } else {
    ledger.tell_once("swapped raw", "a storage of " + std::to_string(entry.nbytes()) +
                                        " bytes on " + entry.device().str() +
                                        " is swapped as it is: " + sender.why_refused() +
                                        ". Training goes on with more bytes in the pool.");
  }
}

bool Engine::short_again(const IterationPtr& shortage) {
  if (!first_short_) {
    first_short_ = shortage;
  }
  return first_short_->lock() != shortage;
}

// There is no frame of such a tensor: the reason, of which each thing that there is to say is told
// once.
Reason Engine::declined(const Refused& refused, const Entry& entry) {
  if (!refused.why.empty()) {
    ledger.tell_once(refused.why, "a storage of " + std::to_string(entry.nbytes()) + " bytes on " +
                                      entry.device().str() + " is not encoded: " + refused.why +
                                      ". Training goes on with less memory saved.");
  }
  return refused.reason;
}

void Engine::learn() {
  for (const auto& [device, by] : devices_) {
    while (const auto encoded = by ? by->take_report() : std::nullopt) {
      ++ledger.counters.encoded_storages;
      ledger.counters.encoded_bytes += encoded->nbytes;
      ledger.counters.frame_bytes += encoded->frame_nbytes;
      if (const EntryPtr entry = encoded->entry.lock()) {
        entry->count_away();
      }
    }
  }
}

}  // namespace memswap
