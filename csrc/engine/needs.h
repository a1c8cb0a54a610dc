// Which storages a plan needs at which demand: with recipes, others than the step demands there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "step_record.h"

namespace memswap {

// [Note: Who needs what]
// What is recomputed needs what its recipe reads at its own demand, and so on. So a plan has
// demands of its own: at each of the step's, the storages that are needed there first, what is read
// before what reads it. A storage that was needed at an earlier one is there already.
class Needs {
 public:
  // `step` was checked, and both outlive this.
  Needs(const StepRecord& step, std::span<const PlannedAction> actions);

  // Whether nobody saves it: it is there for recipes alone, and none is planned.
  bool absent(int32_t index) const { return step_.for_recipe[index] != 0 && !is_read_[index]; }
  // At which demand a storage is needed first; kNever: at none.
  int32_t first(int32_t index) const { return first_[index]; }
  // Which ones are needed first at a demand, in the order in which they come.
  std::span<const int32_t> at(int32_t place) const { return at_[place]; }
  // The mark in whose course a storage that was away is used last.
  int32_t last_use(int32_t index) const { return last_use_[index]; }
  // The recipe that uses it last, and after which it goes at once; kNever: the step itself does.
  int32_t last_reader(int32_t index) const { return last_reader_[index]; }
  // The last mark at which what stays is there, and a frame; kNever: it is there to the end.
  int32_t gone_after(int32_t index) const { return gone_after_[index]; }

 private:
  bool recomputed(int32_t index) const { return actions_[index] == PlannedAction::kRecompute; }
  void need(int32_t index, int32_t place);
  void add_reader(int32_t index, std::vector<uint8_t>& seen, std::vector<int32_t>& readers) const;
  void extend_sources(int32_t reader);
  void find_last_readers();

  const StepRecord& step_;
  const std::span<const PlannedAction> actions_;
  std::vector<int32_t> first_;
  std::vector<uint8_t> is_read_;  // by a recipe that is planned
  std::vector<int32_t> last_use_;
  std::vector<int32_t> last_reader_;
  std::vector<int32_t> gone_after_;
  std::vector<std::vector<int32_t>> at_;
};

}  // namespace memswap
