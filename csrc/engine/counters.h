// What an engine counts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace memswap {

// Plain numbers: whoever owns them serialises the calls.
struct Counters {
  int64_t offered_tensors = 0;
  int64_t offered_bytes = 0;
  int64_t deduplicated_tensors = 0;
  int64_t deduplicated_bytes = 0;
  int64_t moved_storages = 0;
  int64_t moved_bytes = 0;
  int64_t recipe_storages = 0;  // of these, those that left as recipes
  int64_t recipe_bytes = 0;
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
  int64_t lately_resident_bytes = 0;
  int64_t away_bytes = 0;
  int64_t peak_away_bytes = 0;
  // Parts of `resident_bytes` that no entry holds.
  int64_t in_use_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t made_bytes = 0;

  void offer(int64_t nbytes) {
    ++offered_tensors;
    offered_bytes += nbytes;
  }

  void resident(int64_t change) {
    resident_bytes += change;
    peak_resident_bytes = std::max(peak_resident_bytes, resident_bytes);
    lately_resident_bytes = std::max(lately_resident_bytes, resident_bytes);
  }

  // The most that was resident, of each change since this was asked last; 0: nothing changed.
  int64_t most_lately() { return std::exchange(lately_resident_bytes, 0); }

  // Absolute numbers, so that an update that an interrupt cut off corrects itself with the next.
  void set_in_use(int64_t nbytes) { resident(nbytes - std::exchange(in_use_bytes, nbytes)); }
  void set_reserved(int64_t nbytes) { resident(nbytes - std::exchange(reserved_bytes, nbytes)); }
  void set_made(int64_t nbytes) { resident(nbytes - std::exchange(made_bytes, nbytes)); }

  void away(int64_t change) {
    away_bytes += change;
    peak_away_bytes = std::max(peak_away_bytes, away_bytes);
  }

  // Counts from nothing again. What is resident and away now stays known.
  void reset() {
    Counters fresh;
    fresh.resident_bytes = fresh.peak_resident_bytes = resident_bytes;
    fresh.away_bytes = fresh.peak_away_bytes = away_bytes;
    fresh.in_use_bytes = in_use_bytes;
    fresh.reserved_bytes = reserved_bytes;
    fresh.made_bytes = made_bytes;
    *this = fresh;
  }
};

}  // namespace memswap
