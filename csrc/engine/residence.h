// Where one storage's bytes are, and what that adds to a ledger.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace memswap {

enum class State : uint8_t { kResident, kLeaving, kAway, kReturning };

// Whether a storage may go from one state to another.
constexpr bool legal(State from, State to) {
  switch (from) {
    case State::kResident:  // sent; or seen by every save, and the away form is still there
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

// What a saver counts. Plain numbers: whoever owns them serialises the calls.
struct Ledger {
  int64_t offered_tensors = 0;
  int64_t offered_bytes = 0;
  int64_t deduplicated_tensors = 0;
  int64_t deduplicated_bytes = 0;
  int64_t moved_storages = 0;
  int64_t moved_bytes = 0;
  int64_t encoded_storages = 0;
  int64_t encoded_bytes = 0;
  int64_t frame_bytes = 0;
  int64_t returned_storages = 0;
  int64_t returned_bytes = 0;
  int64_t freed_bytes = 0;
  int64_t stalls = 0;
  double exposed_wait_s = 0;
  int64_t resident_bytes = 0;
  int64_t peak_resident_bytes = 0;
  int64_t away_bytes = 0;
  int64_t peak_away_bytes = 0;
  // Of what is resident, what no entry stands for.
  int64_t recomputed_bytes = 0;
  int64_t reserved_bytes = 0;

  void offer(int64_t nbytes) {
    ++offered_tensors;
    offered_bytes += nbytes;
  }

  void resident(int64_t change) {
    resident_bytes += change;
    peak_resident_bytes = std::max(peak_resident_bytes, resident_bytes);
  }

  // As absolute numbers, so that whoever was interrupted between its own books and these says it
  // all with the next one.
  void set_recomputed(int64_t nbytes) {
    resident(nbytes - std::exchange(recomputed_bytes, nbytes));
  }
  void set_reserved(int64_t nbytes) { resident(nbytes - std::exchange(reserved_bytes, nbytes)); }

  void away(int64_t change) {
    away_bytes += change;
    peak_away_bytes = std::max(peak_away_bytes, away_bytes);
  }

  // Counts from nothing again. What is resident and away now stays known.
  void reset() {
    Ledger fresh;
    fresh.resident_bytes = fresh.peak_resident_bytes = resident_bytes;
    fresh.away_bytes = fresh.peak_away_bytes = away_bytes;
    fresh.recomputed_bytes = recomputed_bytes;
    fresh.reserved_bytes = reserved_bytes;
    *this = fresh;
  }
};

// One storage on a ledger, which must outlive it: resident at first, off the books at the end.
// A step that is not legal changes nothing and says false.
class Residence {
 public:
  Residence(Ledger& ledger, int64_t nbytes) : ledger_(ledger), nbytes_(nbytes) {
    count_resident(true);
  }
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;
  ~Residence() {
    ledger_.resident_bytes -= (resident_ ? nbytes_ : 0) + frame_bytes_;
    ledger_.away_bytes -= away_bytes_;
  }

  State state() const { return state_; }
  int64_t nbytes() const { return nbytes_; }
  Ledger& ledger() { return ledger_; }

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
    ++ledger_.moved_storages;
    ledger_.moved_bytes += nbytes_;
    return true;
  }

  // Nobody holds it any more.
  bool go() {
    if (!move(State::kAway)) {
      return false;
    }
    count_resident(false);
    ledger_.freed_bytes += nbytes_;
    return true;
  }

  // Its bytes are on their way into a new one.
  bool come_back() {
    if (!move(State::kReturning)) {
      return false;
    }
    count_resident(true);
    ++ledger_.returned_storages;
    ledger_.returned_bytes += nbytes_;
    return true;
  }

  void count_resident(bool resident) {
    if (resident_ != resident) {
      resident_ = resident;
      ledger_.resident(resident ? nbytes_ : -nbytes_);
    }
  }

  // The away form takes so many bytes of the device, and so many that are not the device's.
  void count_away(int64_t on_device, int64_t elsewhere) {
    ledger_.resident(on_device - frame_bytes_);
    ledger_.away(elsewhere - away_bytes_);
    frame_bytes_ = on_device;
    away_bytes_ = elsewhere;
  }

 private:
  Ledger& ledger_;
  const int64_t nbytes_;
  State state_ = State::kResident;
  bool resident_ = false;
  int64_t frame_bytes_ = 0;
  int64_t away_bytes_ = 0;
};

}  // namespace memswap
