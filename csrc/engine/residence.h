// Where the bytes of one storage are: its states, and what they add to an engine's counters.
#pragma once

#include <cstdint>

#include "counters.h"

namespace memswap {

enum class State : uint8_t { kResident, kLeaving, kAway, kReturning };

// Whether a storage may go from one state to another.
constexpr bool legal(State from, State to) {
  switch (from) {
    case State::kResident:  // sent; or read by every save, with its send under way, or not
      return to == State::kLeaving || to == State::kAway;
    case State::kLeaving:  // gone; or demanded while somebody still held it
      return to == State::kAway || to == State::kResident;
    case State::kAway:  // fetched; or demanded again while a consumer still holds it
      return to == State::kReturning || to == State::kResident;
    case State::kReturning:  // demanded
      return to == State::kResident;
  }
  return false;
}

// A state as messages name it.
constexpr const char* word_of(State state) {
  switch (state) {
    case State::kResident:
      return "resident";
    case State::kLeaving:
      return "leaving";
    case State::kAway:
      return "away";
    case State::kReturning:
      return "returning";
  }
  return "nowhere";
}

// One storage in counters, which must outlive it: resident at first, not counted at the end.
// A step that is not legal changes nothing and says false.
class Residence {
 public:
  Residence(Counters& counters, int64_t nbytes) : counters_(counters), nbytes_(nbytes) {
    count_resident(true);
  }
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;
  ~Residence() {
    counters_.resident_bytes -= (resident_ ? nbytes_ : 0) + frame_bytes_;
    counters_.away_bytes -= away_bytes_;
  }

  State state() const { return state_; }
  int64_t nbytes() const { return nbytes_; }
  Counters& counters() { return counters_; }

  bool move(State to) {
    if (!legal(state_, to)) {
      return false;
    }
    state_ = to;
    return true;
  }

  // It is being sent.
  bool leave() {
    if (!move(State::kLeaving)) {
      return false;
    }
    ++counters_.moved_storages;
    counters_.moved_bytes += nbytes_;
    return true;
  }

  // Nobody holds it any more.
  bool go() {
    if (!move(State::kAway)) {
      return false;
    }
    count_resident(false);
    counters_.freed_bytes += nbytes_;
    return true;
  }

  // Its bytes are on their way into a new one.
  bool come_back() {
    if (!move(State::kReturning)) {
      return false;
    }
    count_resident(true);
    ++counters_.returned_storages;
    counters_.returned_bytes += nbytes_;
    return true;
  }

  void count_resident(bool resident) {
    if (resident_ != resident) {
      resident_ = resident;
      counters_.resident(resident ? nbytes_ : -nbytes_);
    }
  }

  // The away form takes so many bytes of the device, and so many that are not the device's.
  void count_away(int64_t on_device, int64_t elsewhere) {
    counters_.resident(on_device - frame_bytes_);
    counters_.away(elsewhere - away_bytes_);
    frame_bytes_ = on_device;
    away_bytes_ = elsewhere;
  }

 private:
  Counters& counters_;
  const int64_t nbytes_;
  State state_ = State::kResident;
  bool resident_ = false;
  int64_t frame_bytes_ = 0;
  int64_t away_bytes_ = 0;
};

}  // namespace memswap
