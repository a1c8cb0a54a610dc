#include "transfers.h"

#include "reasons.h"
#include "work/without_gil.h"

namespace memswap {

namespace {

std::optional<FrameReport> reported(FrameWatch& watch) {
  const WithoutGil without_gil;
  return watch.report();
}

}  // namespace

std::variant<Expectation, Refused> Transfers::expect(Form form, const TensorKey& key,
                                                     std::optional<int64_t> most_bytes) {
  if (!frames(form)) {
    return Refused{reasons::kNoCodec, {}};
  }
  Expectation expectation = expectations->of(key, most_bytes);
  if (!expectation.fault.empty()) {
    return Refused{reasons::kCodecFault, std::move(expectation.fault)};
  }
  if (!expectation.pays) {
    return Refused{reasons::kDoesNotShrink, {}};
  }
  return expectation;
}

std::variant<Leaving, Refused> Transfers::send(Form form, const StorageRefPtr& storage,
                                               const TensorKey& key) {
  if (form == Form::kBlock) {
    if (std::optional<Leaving> leaving = blocks()->send(storage)) {
      return std::move(*leaving);
    }
    return Refused{reasons::kPool, blocks()->why_refused()};
  }
  std::variant<Expectation, Refused> expected = expect(form, key);
  if (Refused* const refused = std::get_if<Refused>(&expected)) {
    return std::move(*refused);
  }
  if (std::optional<Leaving> leaving =
          encode(form, storage, std::move(std::get<Expectation>(expected)))) {
    return std::move(*leaving);
  }
  return Refused{reasons::kCodecRoom, frames(form)->why_refused()};
}

std::optional<Leaving> Transfers::encode(Form form, const StorageRefPtr& storage,
                                         Expectation expectation, std::weak_ptr<Entry> entry) {
  FrameSender& sender = *frames(form);
  std::optional<LeavingFrame> frame = sender.send(storage, expectation.options);
  if (!frame && expectation.trial) {
    expectation = expectations->settled(expectation);
    frame = sender.send(storage, expectation.options);
  }
  if (!frame) {
    return std::nullopt;
  }
  // Where nothing works ahead an encode has ended, unless it failed.
  if (sender.works_ahead() || reported(*frame->watch)) {
    awaited_.push_back({std::move(expectation), std::move(frame->watch), std::move(entry)});
  }
  return std::move(frame->leaving);
}

std::optional<Transfers::Encoded> Transfers::take_report() {
  if (awaited_.empty()) {
    return std::nullopt;
  }
  const std::shared_ptr<FrameWatch> watch = awaited_.front().watch;
  const std::optional<FrameReport> report = reported(*watch);
  if (!report) {
    return std::nullopt;
  }
  const Awaited made = std::move(awaited_.front());
  awaited_.pop_front();
  expectations->learn(made.expectation, *report);
  return Encoded{made.expectation.key.nbytes, static_cast<int64_t>(report->frame_nbytes()),
                 made.entry};
}

}  // namespace memswap
