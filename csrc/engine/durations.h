// Durations: how long operators and the codec take, from events in a few iterations.
//
// The first iteration is not representative (libraries load, kernels are tuned), the next two are
// measured, and from then on one in a hundred. Events are read once they have happened: nothing
// here ever waits for the device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>

#include "clock.h"

namespace memswap {

// Of one engine, whose lock serialises the calls. Seconds are by key, and per unit of an amount
// (elements of an operator's input); the codec's are a rate.
class Durations {
 public:
  // Work between two events, or from one event on.
  struct Span {
    std::string key;  // of an operator
    double amount;
    MomentPtr begin, end;
    std::optional<bool> encodes;  // the codec's: whether it encodes; nothing: an operator
  };

  // The rates are the codec's, in bytes of storages per second: this sets them, and
  // they outlive it.
  Durations(double& encode_rate, double& decode_rate)
      : encode_rate_(encode_rate), decode_rate_(decode_rate) {}
  Durations(const Durations&) = delete;
  Durations& operator=(const Durations&) = delete;

  // What follows belongs to a new forward.
  void begin_iteration();
  // Whether this iteration is measured.
  bool measuring() const;
  // What so much of this takes, if it has been measured.
  std::optional<double> seconds(const std::string& key, double amount);

  // An operator is about to be launched on the device's current stream. Nothing: it is not
  // measured.
  std::optional<Span> start(std::string key, double amount, c10::Device device) const;
  // It has been launched.
  void stop(Span span);

  // What the codec is given from here on is submitted in one go.
  void begin_go() { submitted_ = {}; }
  // An encode (or a decode) was put on a lane's stream. The first one of a go may have had to wait
  // for compute; what comes right after it has not.
  void submitted(const c10::Stream& stream, int64_t nbytes, bool encodes);

 private:
  struct Operator {
    double seconds;  // per unit
    int64_t iteration;
  };
  // What was measured of the codec in one iteration, with whatever ran beside: that is what is to
  // be expected.
  struct Codec {
    double nbytes = 0, seconds = 0;
    int64_t iteration = 0;  // never measured
  };

  void read();
  void learn_operator(const Span& span, double seconds);
  void learn_rate(const Span& span, double seconds);

  double &encode_rate_, &decode_rate_;
  int64_t iteration_ = 0;
  std::unordered_map<std::string, Operator> operators_;
  std::array<Codec, 2> codec_;          // of decodes, of encodes
  std::array<MomentPtr, 2> submitted_;  // the last decode and encode of this go
  std::deque<Span> ended_;              // not read yet
};

}  // namespace memswap
