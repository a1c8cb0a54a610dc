#include "step_record.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace memswap {

namespace {

void require_length(const char* column, size_t found, size_t expected) {
  if (found != expected) {
    throw std::invalid_argument("StepRecord: " + std::string(column) + " has " +
                                std::to_string(found) + " numbers, expected " +
                                std::to_string(expected));
  }
}

// More than any machine has, and few enough that no sum of a step's columns overflows.
constexpr int64_t kMostBytes = INT64_MAX / 16;

// Bytes, which no more than so many are left for.
void require_bytes(const char* column, const std::vector<int64_t>& bytes, int64_t& left) {
  for (const int64_t number : bytes) {
    if (number < 0 || number > left) {
      throw std::invalid_argument(
          "StepRecord: " + std::string(column) + " has " + std::to_string(number) +
          " bytes, expected 0 or more, and at most " + std::to_string(kMostBytes) + " in all");
    }
    left -= number;
  }
}

void require_seconds(const char* column, const std::vector<double>& seconds) {
  for (const double number : seconds) {
    if (!(number >= 0) || !std::isfinite(number)) {
      throw std::invalid_argument("StepRecord: " + std::string(column) + " has " +
                                  std::to_string(number) +
                                  " seconds, expected 0 or more, and finite");
    }
  }
}

void require_marks(const char* column, const std::vector<int32_t>& marks) {
  for (const int32_t mark : marks) {
    if (mark < kNever) {
      throw std::invalid_argument("StepRecord: " + std::string(column) + " has mark " +
                                  std::to_string(mark) + ", expected 0 or more, or none");
    }
  }
}

// Who demands a storage demands what its recipe reads first, so no recipe may lead back to itself.
class Recipes {
 public:
  explicit Recipes(const std::vector<std::vector<int32_t>>& sources)
      : sources_(sources), state_(sources.size(), State::kNew) {}

  void require_acyclic(int32_t index) {
    const auto of = static_cast<size_t>(index);
    if (state_[of] == State::kDone) {
      return;
    }
    if (state_[of] == State::kOpen) {
      throw std::invalid_argument("StepRecord: the recipe of storage " + std::to_string(index) +
                                  " reads what is made of it, expected recipes without a cycle");
    }
    state_[of] = State::kOpen;
    for (const int32_t source : sources_[of]) {
      if (source < 0 || static_cast<size_t>(source) >= sources_.size()) {
        throw std::invalid_argument("StepRecord: the recipe of storage " + std::to_string(index) +
                                    " reads storage " + std::to_string(source) +
                                    ", expected 0 to " +
                                    std::to_string(static_cast<int64_t>(sources_.size()) - 1));
      }
      require_acyclic(source);
    }
    state_[of] = State::kDone;
  }

 private:
  enum class State : uint8_t { kNew, kOpen, kDone };

  const std::vector<std::vector<int32_t>>& sources_;
  std::vector<State> state_;
};

}  // namespace

void StepRecord::check() const {
  const size_t saves = nbytes.size();
  const size_t marks = saves + order.size();
  require_length("held_frame_nbytes", held_frame_nbytes.size(), saves);
  require_length("overflow_nbytes", overflow_nbytes.size(), saves);
  require_length("held_until", held_until.size(), saves);
  require_length("last_demand", last_demand.size(), saves);
  require_length("gone_after", gone_after.size(), saves);
  require_length("recipe_s", recipe_s.size(), saves);
  require_length("inner_nbytes", inner_nbytes.size(), saves);
  require_length("recipe_sources", recipe_sources.size(), saves);
  require_length("for_recipe", for_recipe.size(), saves);
  require_length("gaps_s", gaps_s.size(), marks);
  require_length("windows_s", windows_s.size(), windows_s.empty() ? 0 : marks);
  require_length("extra_nbytes", extra_nbytes.size(), extra_nbytes.empty() ? 0 : marks);
  int64_t left = kMostBytes;
  require_bytes("nbytes", nbytes, left);
  require_bytes("held_frame_nbytes", held_frame_nbytes, left);
  require_bytes("overflow_nbytes", overflow_nbytes, left);
  require_bytes("extra_nbytes", extra_nbytes, left);
  require_bytes("inner_nbytes", inner_nbytes, left);
  require_seconds("gaps_s", gaps_s);
  require_seconds("windows_s", windows_s);
  for (const double seconds : recipe_s) {
    if (seconds != kNoRecipe) {
      require_seconds("recipe_s", {seconds});
    }
  }
  Recipes recipes(recipe_sources);
  for (size_t index = 0; index < saves; ++index) {
    recipes.require_acyclic(static_cast<int32_t>(index));
  }
  require_marks("held_until", held_until);
  require_marks("gone_after", gone_after);
  std::vector<bool> demanded(saves, false);
  for (size_t place = 0; place < order.size(); ++place) {
    const int32_t index = order[place];
    if (index < 0 || static_cast<size_t>(index) >= saves || demanded[index]) {
      throw std::invalid_argument("StepRecord: order names storage " + std::to_string(index) +
                                  ", expected each demanded one of 0 to " +
                                  std::to_string(static_cast<int64_t>(saves) - 1) + " once");
    }
    demanded[index] = true;
    const auto first = static_cast<int32_t>(saves + place);
    if (last_demand[index] < first || static_cast<size_t>(last_demand[index]) >= marks) {
      throw std::invalid_argument("StepRecord: storage " + std::to_string(index) +
                                  " is first demanded at mark " + std::to_string(first) +
                                  " and last at " + std::to_string(last_demand[index]));
    }
  }
}

}  // namespace memswap
