#include "replay.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "link_model.h"
#include "needs.h"
#include "running_peak.h"

namespace memswap {

namespace {

// Fetches start early enough for a link that is slower by this factor.
constexpr double kLead = 2.0;

// The host may be ahead of the device by one in so many of a step's encodes, and by so many at
// least.
constexpr int64_t kEncodesPerLead = 16;
constexpr int64_t kLeastLead = 4;

// What an arena takes beside the room in it (csrc/codec/arena.h).
constexpr int64_t kArenaHeaderBytes = 128;

// Bytes of the device for what elements that are not like the last ones need beyond frames.
//
// An encode sets its worst case aside until the host has seen what it took, and a host that finds
// no room for the next one waits. So there is room for the largest of a share of them.
int64_t arena_nbytes(const StepRecord& step, std::span<const PlannedAction> actions) {
  std::vector<int64_t> aside;
  for (int32_t index = 0; index < step.saves(); ++index) {
    if (coded(actions[index])) {
      aside.push_back(step.overflow_nbytes[index]);
    }
  }
  const auto encodes = static_cast<int64_t>(aside.size());
  const int64_t share = (encodes + kEncodesPerLead - 1) / kEncodesPerLead;
  const int64_t largest = std::min(encodes, std::max(kLeastLead, share));
  std::partial_sort(aside.begin(), aside.begin() + largest, aside.end(), std::greater<>());
  int64_t room = 0;
  for (int64_t place = 0; place < largest; ++place) {
    room += aside[place];
  }
  return room != 0 ? room + kArenaHeaderBytes : 0;
}

void require_rates(const MachineRates& rates, std::span<const PlannedAction> actions) {
  const bool copies = rates.d2h_bytes_per_s > 0 && rates.h2d_bytes_per_s > 0;
  const bool encodes = rates.encode_bytes_per_s > 0 && rates.decode_bytes_per_s > 0;
  for (const PlannedAction action : actions) {
    if ((moves(action) && !copies) || (coded(action) && !encodes)) {
      throw std::invalid_argument(
          std::string("replay: the plan ") + (coded(action) ? "encodes" : "copies") +
          " storages, and the machine's rate for that is 0: it cannot do it. Keep them, or give "
          "rates of a machine that can");
    }
  }
}

void require_recipes(const StepRecord& step, std::span<const PlannedAction> actions) {
  for (size_t index = 0; index < actions.size(); ++index) {
    if (actions[index] == PlannedAction::kRecompute && step.recipe_s[index] == kNoRecipe) {
      throw std::invalid_argument("replay: the plan recomputes storage " + std::to_string(index) +
                                  ", which has no recipe. Keep it, or move it");
    }
  }
}

class Run {
 public:
  Run(const StepRecord& step, const MachineRates& rates, std::span<const PlannedAction> actions,
      int64_t budget_bytes, bool with_spans)
      : step_(step),
        rates_(rates),
        actions_(actions),
        budget_bytes_(budget_bytes),
        with_spans_(with_spans),
        saves_(step.saves()),
        marks_(step.marks()),
        in_windows_(!rates.inline_codec && !step.windows_s.empty()),
        link_(rates, step.saves()),
        needs_(step, actions),
        gone_(marks_ + 1, 0),
        away_(saves_, false),
        returning_(saves_, false),
        came_back_(saves_, false),
        sent_frames_(saves_, false),
        was_exposed_(saves_, false) {
    found_.exposed_s.assign(saves_, 0.0);
    found_.resident_bytes.reserve(marks_);
    found_.mark_s.reserve(marks_);
    resident_ = found_.arena_bytes = arena_nbytes(step, actions);
  }

  Replay run() && {
    for (int32_t index = 0; index < saves_; ++index) {
      advance(index);
      save(index);
      found_.mark_s.push_back(clock_);
    }
    while (!waiting_.empty()) {
      encode_now();
    }
    make_room_for_backward();
    look_ahead();
    for (int32_t place = 0; place < demands(); ++place) {
      advance(saves_ + place);
      demand(saves_ + place, place);
      found_.mark_s.push_back(clock_);
    }
    finish();
    return std::move(found_);
  }

 private:
  struct Waiting {
    int32_t index;
    double left_s;
  };
  struct Encoded {
    int32_t index;
    double ended_s;
  };

  int32_t demands() const { return marks_ - saves_; }
  int64_t extra(int32_t mark) const {
    return step_.extra_nbytes.empty() ? 0 : step_.extra_nbytes[mark];
  }
  bool inline_coded(int32_t index) const { return rates_.inline_codec && coded(actions_[index]); }

  // Bytes that a storage's frame takes of the device while it is there.
  int64_t framed(int32_t index) const {
    const PlannedAction action = actions_[index];
    const bool on_device = action == PlannedAction::kEncode ||
                           (action == PlannedAction::kEncodeSwap && !rates_.inline_codec);
    return on_device ? step_.held_frame_nbytes[index] : 0;
  }

  // --- forward
  // ------------------------------------------------------------------------------------

  // The gap before a mark, and what goes with it.
  void advance(int32_t mark) {
    const double gap_s = step_.gaps_s[mark];
    if (gap_s > 0) {
      const bool forward = mark < saves_;
      const int32_t storage = forward ? mark : step_.order[std::max(mark - saves_ - 1, 0)];
      note(forward ? Work::kForward : Work::kBackward, storage, gap_s);
    }
    clock_ += gap_s;
    resident_ -= std::exchange(gone_[mark], 0);
    if (in_windows_) {
      use_window(step_.windows_s[mark]);
    }
  }

  // Does what waits, for as long as the window lasts.
  void use_window(double left_s) {
    for (Waiting& decode : decoding_) {
      const double done_s = std::min(left_s, decode.left_s);
      decode.left_s -= done_s;
      left_s -= done_s;
    }
    while (!waiting_.empty() && left_s > 0) {
      Waiting& first = waiting_.front();
      if (first.left_s > left_s) {
        first.left_s -= left_s;
        return;
      }
      left_s -= first.left_s;
      const int32_t index = first.index;
      waiting_.pop_front();
      has_encoded(index);
    }
  }

  // What waits first starts in no window.
  void encode_now() {
    const Waiting first = waiting_.front();
    waiting_.pop_front();
    work(Work::kEncode, first.index, first.left_s);
    has_encoded(first.index);
  }

  void has_encoded(int32_t index) {
    encoded_.push_back({index, clock_});
    if (actions_[index] == PlannedAction::kEncodeSwap) {
      copy(Direction::kAway, index, framed(index));
      sends_.push_back(index);
      sent_frames_[index] = true;
      if (backward_) {
        add_frame_after_demand(index, -1);
      }
    }
  }

  void save(int32_t index) {
    resident_ += step_.nbytes[index];
    const PlannedAction action = actions_[index];
    if (action != PlannedAction::kKeep) {
      found_.moved_bytes += step_.nbytes[index];
    }
    if (moves(action)) {
      found_.pooled_bytes +=
          action == PlannedAction::kSwap ? step_.nbytes[index] : step_.held_frame_nbytes[index];
    }
    int64_t peak = resident_;
    if (action == PlannedAction::kSwap) {
      copy(Direction::kAway, index, step_.nbytes[index]);
      sends_.push_back(index);
    } else if (action == PlannedAction::kKeep) {
      gone_after(needs_.gone_after(index), step_.nbytes[index]);
    } else if (action == PlannedAction::kRecompute) {
      release(index, index);
    } else {
      resident_ += framed(index);
      peak = resident_;
      if (action == PlannedAction::kEncode) {
        gone_after(needs_.gone_after(index), step_.held_frame_nbytes[index]);
      }
      waiting_.push_back({index, rates_.encode_s(step_.nbytes[index])});
      if (rates_.inline_codec) {
        encode_inline();
      } else if (!in_windows_) {
        encode_now();
      }
    }
    found_.resident_bytes.push_back(peak + extra(index));
    make_room(index);
  }

  // The calling thread encodes, and writes: the raw bytes go at once.
  void encode_inline() {
    const Waiting first = waiting_.front();
    waiting_.pop_front();
    work(Work::kEncode, first.index, first.left_s);
    if (actions_[first.index] == PlannedAction::kEncodeSwap) {
      copy(Direction::kAway, first.index, step_.held_frame_nbytes[first.index]);
      wait(Work::kWaitForWrite, first.index, link_.end_s(Direction::kAway, first.index));
    }
    release(first.index, first.index);
  }

  // --- room
  // ---------------------------------------------------------------------------------------

  bool can_release() const { return !sends_.empty() || !encoded_.empty() || !waiting_.empty(); }

  // Releases sends until the next save fits.
  void make_room(int32_t mark) {
    int64_t coming = 0;
    if (mark + 1 < saves_) {
      coming = step_.nbytes[mark + 1] + framed(mark + 1) + extra(mark + 1);
    }
    while (can_release() && resident_ - gone_[mark + 1] + coming > budget_bytes_) {
      release_oldest(mark);
    }
  }

  // After the last save, releases what has to go for the bytes that come back.
  void make_room_for_backward() {
    if (!can_release()) {
      return;
    }
    backward_.emplace(backward_changes());
    while (can_release() && std::max<int64_t>(resident_ + backward_->peak(), 0) > budget_bytes_) {
      release_oldest(saves_ - 1);
    }
    backward_.reset();
  }

  // What is resident at each demand if nothing comes back before it is demanded, as the difference
  // from the demand before; the first from what is resident now.
  std::vector<int64_t> backward_changes() const {
    std::vector<int64_t> changes(demands() + 1, 0);
    for (int32_t place = 0; place < demands(); ++place) {
      changes[place] -= gone_[saves_ + place];
      changes[place] += extra(saves_ + place) - (place > 0 ? extra(saves_ + place - 1) : 0);
      const int64_t inner = inner_at(place);
      changes[place] += inner;
      changes[place + 1] -= inner;
      for (const int32_t index : needs_.at(place)) {
        if (away_[index]) {
          changes[place] += step_.nbytes[index] + transit_frame(index);
        }
        if (actions_[index] == PlannedAction::kKeep) {
          continue;
        }
        changes[place + 1] -= (away_[index] + sent_frames_[index]) * transit_frame(index);
        changes[std::min(needs_.last_use(index), marks_ - 1) + 1 - saves_] -= step_.nbytes[index];
      }
    }
    changes.pop_back();  // after the last demand
    return changes;
  }

  // The most that the recipes which run at a demand make on the way.
  int64_t inner_at(int32_t place) const {
    int64_t most = 0;
    for (const int32_t index : needs_.at(place)) {
      if (actions_[index] == PlannedAction::kRecompute) {
        most = std::max(most, step_.inner_nbytes[index]);
      }
    }
    return most;
  }

  // A frame that crosses the device on its way to a pool, and on its way back.
  int64_t transit_frame(int32_t index) const {
    return actions_[index] == PlannedAction::kEncodeSwap ? framed(index) : 0;
  }

  // While there is `backward_`: a frame that goes after its storage's first demand.
  void add_frame_after_demand(int32_t index, int64_t times) {
    if (needs_.first(index) != kNever) {
      backward_->add(needs_.first(index) + 1, times * transit_frame(index));
    }
  }

  void release_oldest(int32_t mark) {
    const bool first_waits =
        !waiting_.empty() && (sends_.empty() || waiting_.front().index < sends_.front());
    if (first_waits && encoded_.empty()) {
      encode_now();
    }
    if (!encoded_.empty()) {
      const Encoded first = encoded_.front();
      encoded_.pop_front();
      wait(Work::kWaitForRoom, first.index, first.ended_s);
      release(first.index, mark);
      return;
    }
    const int32_t index = sends_.front();
    sends_.pop_front();
    wait(Work::kWaitForRoom, index, link_.end_s(Direction::kAway, index));
    if (actions_[index] == PlannedAction::kSwap) {
      release(index, mark);
      return;
    }
    sent_frames_[index] = false;
    if (backward_) {
      add_frame_after_demand(index, 1);
    }
    resident_ -= framed(index);
    found_.departures.push_back({mark, index});
  }

  void release(int32_t index, int32_t mark) {
    away_[index] = true;
    found_.releases.push_back({mark, index});
    const int32_t held_until =
        step_.held_until[index] == kNever ? saves_ : std::min(step_.held_until[index], marks_);
    if (held_until <= mark) {
      resident_ -= step_.nbytes[index];
    } else {
      gone_[held_until] += step_.nbytes[index];
    }
    if (!backward_) {
      return;
    }
    if (held_until > mark) {
      backward_->add(held_until - saves_, -step_.nbytes[index]);
    }
    if (needs_.first(index) != kNever) {
      backward_->add(needs_.first(index), step_.nbytes[index] + transit_frame(index));
      add_frame_after_demand(index, -1);
    }
  }

  // --- backward
  // -----------------------------------------------------------------------------------

  // Before backward: what comes back in which order, and when it has to start.
  void look_ahead() {
    for (int32_t place = 0; place < demands(); ++place) {
      int64_t at_once = 0;
      for (const int32_t index : needs_.at(place)) {
        if (!away_[index]) {
          continue;
        }
        // What the calling thread decodes, and what is recomputed, comes back when it is demanded,
        // and needs its room then.
        if (inline_coded(index) || actions_[index] == PlannedAction::kRecompute) {
          at_once += step_.nbytes[index];
        } else {
          pending_.push_back(index);
        }
      }
      reserve_ = std::max(reserve_, at_once + inner_at(place));
    }
    latest_starts();
  }

  // Until when a fetch must start on a link of half the speed, by undisturbed time.
  void latest_starts() {
    double nominal_s = 0;
    nominal_s_.reserve(demands());
    for (int32_t mark = saves_; mark < marks_; ++mark) {
      nominal_s += step_.gaps_s[mark];
      nominal_s_.push_back(nominal_s);
    }
    start_by_s_.assign(saves_, 0.0);
    double latest_s = std::numeric_limits<double>::infinity();
    for (int32_t place = demands() - 1; place >= 0; --place) {
      const std::span<const int32_t> needed = needs_.at(place);
      for (auto index = needed.rbegin(); index != needed.rend(); ++index) {
        if (away_[*index]) {
          latest_s = std::min(latest_s, nominal_s_[place]) - kLead * return_s(*index);
          start_by_s_[*index] = latest_s;
        }
      }
    }
  }

  // How long a storage is on its way back.
  double return_s(int32_t index) const {
    double seconds = 0;
    if (actions_[index] == PlannedAction::kSwap) {
      seconds = rates_.fetch_s(step_.nbytes[index]);
    } else if (actions_[index] == PlannedAction::kEncodeSwap) {
      seconds = rates_.fetch_s(step_.held_frame_nbytes[index]);
    }
    if (coded(actions_[index])) {
      seconds += rates_.inline_codec ? 0.0 : rates_.decode_s(step_.nbytes[index]);
    }
    return seconds;
  }

  // See [Note: Who needs what].
  void demand(int32_t mark, int32_t place) {
    const std::span<const int32_t> needed = needs_.at(place);
    int64_t peak = resident_;
    for (const int32_t index : needed) {
      peak = std::max(peak, bring(mark, index));
    }
    if (!needed.empty()) {
      peak = std::max(peak, start_back(mark, place));
    }
    found_.resident_bytes.push_back(peak + extra(mark));
  }

  // A storage is used, for the first time since the forward. The most resident bytes.
  int64_t bring(int32_t mark, int32_t index) {
    const PlannedAction action = actions_[index];
    const int64_t nbytes = step_.nbytes[index];
    if (away_[index]) {
      if (!returning_[index]) {
        fetch(index);
      }
      if (moves(action)) {
        wait(Work::kWaitForBytes, index, link_.end_s(Direction::kBack, index));
      }
      if (coded(action)) {
        work(Work::kDecode, index, left_to_decode_s(index));
      }
      came_back_[index] = true;
      if (needs_.last_reader(index) == kNever) {
        gone_after(needs_.last_use(index), nbytes);
      }
      if (action == PlannedAction::kEncodeSwap) {  // whoever has the bytes comes after all copies
        gone_after(mark, (1 + sent_frames_[index]) * framed(index));
      }
    } else if (action != PlannedAction::kKeep) {
      gone_after(needs_.gone_after(index), nbytes);  // nobody needed its room
    }
    return action == PlannedAction::kRecompute ? run_recipe(index) : resident_;
  }

  // The most resident bytes.
  int64_t run_recipe(int32_t index) {
    work(Work::kRecompute, index, step_.recipe_s[index]);
    const int64_t peak = resident_ + step_.inner_nbytes[index];
    for (const int32_t source : step_.recipe_sources[index]) {
      if (came_back_[source] && needs_.last_reader(source) == index) {
        resident_ -= step_.nbytes[source];
      }
    }
    return peak;
  }

  // Starts what comes back next, as far as there is room. The most resident bytes.
  int64_t start_back(int32_t mark, int32_t place) {
    int64_t peak = resident_;
    while (!pending_.empty()) {
      const int32_t coming = pending_.front();
      if (returning_[coming]) {
        pending_.pop_front();
        continue;
      }
      const int32_t following = mark + 1;
      const bool early =
          following >= marks_ || nominal_s_[following - saves_] <= start_by_s_[coming];
      const int64_t needed = step_.nbytes[coming] + transit_frame(coming) +
                             std::max(reserve_, extra_until(mark, coming));
      if (early || resident_ + needed > budget_bytes_) {
        break;
      }
      pending_.pop_front();
      fetch(coming);
      found_.fetches.push_back({step_.order[place], coming});
      peak = std::max(peak, resident_);
    }
    return peak;
  }

  // The most of what is there whatever the plan says, from a mark until a storage is demanded.
  int64_t extra_until(int32_t mark, int32_t coming) const {
    if (step_.extra_nbytes.empty()) {
      return 0;
    }
    const auto first = step_.extra_nbytes.begin();
    return *std::max_element(first + mark, first + saves_ + needs_.first(coming) + 1);
  }

  void fetch(int32_t index) {
    const PlannedAction action = actions_[index];
    returning_[index] = true;
    resident_ += step_.nbytes[index];
    if (in_windows_ && action == PlannedAction::kEncode) {
      decoding_.push_back({index, rates_.decode_s(step_.nbytes[index])});
    }
    resident_ += transit_frame(index);
    if (moves(action)) {
      copy(Direction::kBack, index,
           action == PlannedAction::kSwap ? step_.nbytes[index] : step_.held_frame_nbytes[index]);
    }
  }

  double left_to_decode_s(int32_t index) {
    const auto found = std::find_if(decoding_.begin(), decoding_.end(),
                                    [&](const Waiting& one) { return one.index == index; });
    if (found == decoding_.end()) {
      return rates_.decode_s(step_.nbytes[index]);
    }
    const double left_s = found->left_s;
    decoding_.erase(found);
    return left_s;
  }

  void finish() {
    for (const int32_t index : sends_) {
      if (actions_[index] == PlannedAction::kSwap) {
        found_.idle.push_back(index);
      }
    }
    for (const Encoded& one : encoded_) {
      found_.idle.push_back(one.index);
    }
    for (const int64_t nbytes : found_.resident_bytes) {
      found_.peak_bytes = std::max(found_.peak_bytes, nbytes);
    }
    for (const int32_t index : found_.exposed) {
      found_.total_exposed_s += found_.exposed_s[index];
    }
    if (with_spans_) {
      note_copies();
    }
  }

  // --- time
  // ---------------------------------------------------------------------------------------

  // Bytes that are there through a mark, or to the end.
  void gone_after(int32_t mark, int64_t nbytes) {
    if (mark != kNever) {
      gone_[std::min(mark, marks_ - 1) + 1] += nbytes;
    }
  }

  void wait(Work why, int32_t index, double until_s) {
    const double stall_s = until_s - clock_;
    if (stall_s > 0) {
      expose(index, stall_s);
      note(why, index, stall_s);
      clock_ = until_s;
    }
  }

  void work(Work what, int32_t index, double seconds) {
    expose(index, seconds);
    note(what, index, seconds);
    clock_ += seconds;
  }

  // A copy may start.
  void copy(Direction direction, int32_t index, int64_t nbytes) {
    link_.add(direction, index, nbytes, clock_);
    if (rates_.copy_share != 0) {
      const double takes_s =
          rates_.copy_share *
          (direction == Direction::kAway ? rates_.send_s(nbytes) : rates_.fetch_s(nbytes));
      if (takes_s != 0) {
        work(Work::kSharedWithCopies, index, takes_s);
      }
    }
  }

  void expose(int32_t index, double seconds) {
    if (!was_exposed_[index]) {
      was_exposed_[index] = true;
      found_.exposed.push_back(index);
    }
    found_.exposed_s[index] += seconds;
  }

  // Work that begins now.
  void note(Work work, int32_t index, double seconds) {
    if (with_spans_) {
      found_.spans.push_back({work, index, clock_, clock_ + seconds});
    }
  }

  void note_copies() {
    link_.drain();
    for (const Direction direction : {Direction::kAway, Direction::kBack}) {
      const Work work = direction == Direction::kAway ? Work::kCopyAway : Work::kCopyBack;
      for (int32_t index = 0; index < saves_; ++index) {
        if (const std::optional<double> begin_s = link_.begin_s(direction, index)) {
          found_.spans.push_back({work, index, *begin_s, link_.end_s(direction, index)});
        }
      }
    }
  }

  const StepRecord& step_;
  const MachineRates& rates_;
  const std::span<const PlannedAction> actions_;
  const int64_t budget_bytes_;
  const bool with_spans_;
  const int32_t saves_;
  const int32_t marks_;
  const bool in_windows_;  // encodes and decodes wait for windows

  Replay found_;
  LinkModel link_;
  const Needs needs_;
  double clock_ = 0;
  int64_t resident_ = 0;
  std::vector<int64_t> gone_;      // bytes that go before each mark
  std::deque<int32_t> sends_;      // on the link, not released
  std::deque<Encoded> encoded_;    // not released, and when that ended
  std::deque<Waiting> waiting_;    // encodes, and what is left of them
  std::vector<Waiting> decoding_;  // decodes, the same
  std::vector<uint8_t> away_;
  std::vector<uint8_t> returning_;
  std::vector<uint8_t> came_back_;
  std::vector<uint8_t> sent_frames_;  // on the link, not released
  std::vector<uint8_t> was_exposed_;
  std::optional<RunningPeak> backward_;  // while room is made for backward
  std::deque<int32_t> pending_;          // what is to start back
  int64_t reserve_ = 0;                  // room for what comes back at a demand at once
  std::vector<double> nominal_s_;        // when each demand would come if nobody waited
  std::vector<double> start_by_s_;       // by storage
};

}  // namespace

Replay replay(const StepRecord& step, const MachineRates& rates,
              std::span<const PlannedAction> actions, int64_t budget_bytes, bool with_spans) {
  if (actions.size() != step.nbytes.size()) {
    throw std::invalid_argument("replay: found " + std::to_string(actions.size()) +
                                " actions, expected one for each of " +
                                std::to_string(step.nbytes.size()) + " storages");
  }
  require_rates(rates, actions);
  require_recipes(step, actions);
  return Run(step, rates, actions, budget_bytes, with_spans).run();
}

ReplayedPlan replay_without_idle(const StepRecord& step, const MachineRates& rates,
                                 std::vector<PlannedAction> actions, int64_t budget_bytes) {
  while (true) {
    Replay found = replay(step, rates, actions, budget_bytes);
    if (found.idle.empty()) {
      return {std::move(actions), std::move(found)};
    }
    for (const int32_t index : found.idle) {
      actions[index] = PlannedAction::kKeep;
    }
  }
}

std::vector<PlannedAction> actions_of(std::string_view column) {
  std::vector<PlannedAction> actions;
  for (const char byte : column) {
    const auto number = static_cast<uint8_t>(byte);
    if (number > static_cast<uint8_t>(PlannedAction::kRecompute)) {
      throw std::invalid_argument("replay: found the action " + std::to_string(number) +
                                  ", expected 0 to 4");
    }
    actions.push_back(static_cast<PlannedAction>(number));
  }
  return actions;
}

}  // namespace memswap
