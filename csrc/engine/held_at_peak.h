// Which storages had better stay as they are, because the forward holds them at the peak anyway.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

namespace memswap {

// [Note: Held at the peak]
// What the forward still uses is on the device beside its frame. Where that is so at the peak (the
// residual stream, while the last layer multiplies), the frame raises the peak, and encoding it
// costs time. As it is, the storage takes the rest of its bytes from then on that the forward lets
// go of it, until backward asks. So an iteration takes down the most bytes that were there with
// each of its marks: its saves, then its first demands. From that follows what they would have been
// with other storages as frames; and the next iteration, for as long as it saves the same, keeps
// what makes the highest of them lower.
//
// Only where whoever asks encodes and decodes, as on a CPU: there it is known at each mark what is
// gone. And only without a plan, which knows all of this.

// The marks of one iteration.
class HeldAtPeak {
 public:
  // The length of the frame that a storage would have, by its place in the iteration.
  using Frames = std::map<size_t, int64_t>;

  // A storage was saved, perhaps before one that comes before it. `frame_nbytes`: of its frame, or
  // of the one that it does without; 0: it has left in another form, or stays for another reason.
  // `stays`: it is no frame now. `most_bytes`: that were there at most since the last mark.
  void saved(size_t index, int64_t nbytes, int64_t frame_nbytes, bool stays, int64_t most_bytes);
  // The forward holds a storage no longer.
  void let_go(size_t index);
  // Backward has a storage. Nothing, if it had been demanded before.
  void demanded(size_t index, int64_t most_bytes);

  // The places whose storages are held, and stay as they are.
  const std::vector<size_t>& held() const { return held_; }

  // What should stay next time.
  Frames best() const;

 private:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  // A storage. The mark at which it was saved is its place.
  struct Saved {
    int64_t nbytes = 0;
    int64_t frame_nbytes = 0;
    bool stays = false;
    size_t let_go_at = kNever;    // the first mark that does not count it
    size_t demanded_at = kNever;  // the mark at which backward had it

    size_t gone_at() const { return std::min(let_go_at, demanded_at); }
  };

  std::vector<Saved> saved_;
  std::vector<int64_t> most_bytes_;  // at each mark
  std::vector<size_t> held_;
};

}  // namespace memswap
