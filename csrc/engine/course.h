// Course: what a plan says of one iteration, if there is one, and how the iteration goes under it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "plan.h"

namespace memswap {

// How an iteration went so far, for who made its plan.
struct Outcome {
  bool began_backward = false;
  bool changed = false;      // it left its plan, or its forward saved clearly more or fewer bytes
  bool unfit = false;        // more was resident than planned, or a frame became longer
  bool refused = false;      // the pool had no room for something
  int64_t pooled_bytes = 0;  // the most that was away then, or when backward began after that
  int64_t peak_bytes = 0;    // resident ones, the most at a mark of the plan
  int64_t over_budget_bytes = 0;  // of these, beyond the budget of all that are in flight
  std::set<size_t> no_recipe;     // places that were to be recomputed, and are not

  // Whether its backward has begun, and all is as it was planned.
  bool as_planned() const {
    const bool fits = !unfit && !refused && over_budget_bytes == 0;
    return began_backward && !changed && fits && no_recipe.empty();
  }
};

// Knows storages by their places in the order of saving.
class Course {
 public:
  // What an iteration comes to if it goes as planned.
  struct Expected {
    double nbytes = 0;                    // that its forward saves
    int64_t peak_bytes = 0;               // resident ones at most, where there is no limit
    std::optional<int64_t> budget_bytes;  // of all that are in flight; nothing: none is kept
  };

  // What an iteration is told before it saves anything.
  struct Terms {
    std::shared_ptr<const Plan> plan;  // nullptr: nobody has planned, or it has left its plan
    std::optional<Expected> expected;  // nothing: nobody has planned
    // Resident bytes that what starts back stays below, whatever was planned; 0: as many as come.
    int64_t limit_bytes = 0;
  };

  // --- what it is told ---

  const Terms& terms() const { return terms_; }
  void set_terms(Terms terms) { terms_ = std::move(terms); }
  // A plan says from here on what happens to the storages. The limit stays as it is.
  void follow(std::shared_ptr<const Plan> plan, double nbytes, int64_t peak_bytes,
              std::optional<int64_t> budget_bytes) {
    terms_.plan = std::move(plan);
    terms_.expected = {nbytes, peak_bytes, budget_bytes};
  }
  // The iteration goes another way from here on.
  void leave_plan() { terms_.plan.reset(); }
  int64_t limit_bytes() const { return terms_.limit_bytes; }
  void set_limit_bytes(int64_t bytes) { terms_.limit_bytes = bytes; }

  // --- what the plan says ---

  const std::shared_ptr<const Plan>& plan() const { return terms_.plan; }
  bool follows_plan() const { return terms_.plan != nullptr; }
  // Whether the plan is one of so many storages, and so says what comes back when.
  bool plans_all(size_t storages) const {
    return follows_plan() && terms_.plan->places.size() == storages;
  }
  // Of a storage; nullptr: there is no plan, or the plan does not know it.
  const Plan::Place* place(size_t index) const;

  // --- how it goes ---

  // So many bytes are resident at a mark of the plan.
  void note_resident(int64_t bytes);
  // A storage did not become the frame that was planned.
  void note_unfit() { unfit_ = true; }
  // A storage was to be recomputed, and is not.
  void note_no_recipe(size_t index) { no_recipe_.insert(index); }
  // The pool had no room for something, and so many bytes were away.
  void note_refused(int64_t away_bytes);
  // The forward is over: it has saved so many storages, and so many bytes are away. An iteration
  // that saved another number than planned follows the plan no more.
  void begin_backward(size_t storages, int64_t away_bytes);

  int64_t peak_bytes() const { return peak_bytes_; }
  // `nbytes`: that the forward has saved.
  Outcome outcome(int64_t nbytes, bool began_backward) const;

 private:
  Terms terms_;
  bool unfit_ = false;
  bool refused_ = false;
  int64_t peak_bytes_ = 0;
  int64_t pooled_bytes_ = 0;
  std::set<size_t> no_recipe_;
};

}  // namespace memswap
