#include "durations.h"

#include <algorithm>
#include <utility>

#include "lane/graph_capture.h"

namespace memswap {

namespace {

// Iterations that are measured: those between these two, and every so many.
constexpr int64_t kFirstMeasured = 1, kFirstUnmeasured = 3, kMeasuredEvery = 100;

// Spans that are looked at in one go, so that no operator pays for all.
constexpr int kMostReads = 4;

}  // namespace

void Durations::begin_iteration() {
  read();
  ++iteration_;
}

bool Durations::measuring() const {
  return (kFirstMeasured <= iteration_ && iteration_ < kFirstUnmeasured) ||
         (iteration_ > 0 && iteration_ % kMeasuredEvery == 0);
}

std::optional<double> Durations::seconds(const std::string& key, double amount) {
  read();
  const auto known = operators_.find(key);
  return known == operators_.end() ? std::nullopt : std::optional(known->second.seconds * amount);
}

std::optional<Durations::Span> Durations::start(std::string key, double amount,
                                                c10::Device device) const {
  if (!measuring() || device.is_cpu() || captures_graph(device)) {
    return std::nullopt;
  }
  return Span{std::move(key), amount, moment_on(device), nullptr, std::nullopt};
}

void Durations::stop(Span span) {
  const c10::Device device = span.begin->event->device();
  if (!captures_graph(device)) {
    span.end = moment_on(device);
    ended_.push_back(std::move(span));
  }
}

void Durations::submitted(const c10::Stream& stream, int64_t nbytes, bool encodes) {
  if (!measuring() || captures_graph(stream.device())) {
    return;
  }
  MomentPtr now = moment_on(stream);
  MomentPtr& before = submitted_.at(encodes);
  if (before) {
    ended_.push_back({{}, static_cast<double>(nbytes), before, now, encodes});
  }
  before = std::move(now);
}

// Takes in what has happened by now, in order.
void Durations::read() {
  for (int looks = 0; looks < kMostReads && !ended_.empty(); ++looks) {
    if (!ended_.front().end->reached()) {
      return;
    }
    const Span span = std::move(ended_.front());
    ended_.pop_front();
    const double seconds = seconds_between(*span.begin, *span.end);
    if (span.encodes) {
      learn_rate(span, seconds);
    } else if (span.amount > 0) {
      learn_operator(span, seconds);
    }
  }
}

void Durations::learn_operator(const Span& span, double seconds) {
  const double each = seconds / span.amount;
  Operator& known = operators_.try_emplace(span.key, Operator{each, iteration_}).first->second;
  if (known.iteration == iteration_) {  // the shortest: others have waited for the host
    known.seconds = std::min(known.seconds, each);
  } else {
    known = {each, iteration_};
  }
}

void Durations::learn_rate(const Span& span, double seconds) {
  Codec& all = codec_.at(*span.encodes);
  if (all.iteration != iteration_) {
    all = {0, 0, iteration_};
  }
  all.nbytes += span.amount;
  all.seconds += seconds;
  if (all.seconds <= 0) {
    return;
  }
  const double rate = all.nbytes / all.seconds;
  if (*span.encodes) {
    encode_rate_ = rate;
  }
  if (!*span.encodes || codec_[0].iteration == 0) {  // decodes that nobody has seen take as long
    decode_rate_ = rate;
  }
}

}  // namespace memswap
