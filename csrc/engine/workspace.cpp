#include "workspace.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "iteration.h"

namespace memswap {

namespace {

void put(std::vector<int64_t>& numbers, size_t place, int64_t number) {
  if (numbers.size() <= place) {
    numbers.resize(place + 1, -1);
  }
  numbers[place] = number;
}

// As many as there are marks; where nothing was taken down, what stands before.
std::vector<int64_t> filled(const std::vector<int64_t>& numbers, size_t marks, int64_t first) {
  std::vector<int64_t> found;
  found.reserve(marks);
  for (size_t mark = 0; mark < marks; ++mark) {
    const int64_t number = mark < numbers.size() ? numbers[mark] : -1;
    found.push_back(number >= 0 ? number : (found.empty() ? first : found.back()));
  }
  return found;
}

}  // namespace

Workspace::Workspace(std::shared_ptr<MemoryGauge> gauge, std::vector<at::Tensor> parameters,
                     int64_t granularity, int64_t other_nbytes, int64_t baseline_nbytes)
    : gauge_(std::move(gauge)),
      parameters_(std::move(parameters)),
      granularity_(granularity),
      other_nbytes_(other_nbytes),
      baseline_nbytes_(baseline_nbytes) {
  put(gradients_, 0, gradients());
}

void Workspace::watch(const std::shared_ptr<Iteration>& iteration) {
  watched_.push_back(iteration);
  if (extra_.empty()) {  // before the first mark: what is there now was there all the time
    present_ = present();
  }
}

void Workspace::arrive() {
  held_.clear();
  if (ended_) {
    return;
  }
  const int64_t beside = gauge_->peak() - present_ - other_nbytes_;
  const int64_t before = mark_ < extra_.size() ? extra_[mark_] : 0;
  put(extra_, mark_, std::max({beside, before, int64_t{0}}));
}

void Workspace::count_returning() const {
  for (const auto& weak : watched_) {
    if (const auto iteration = weak.lock()) {
      for (const StorageRefPtr& one : iteration->returning()) {
        gauge_->count_all_of(one->storage.mutable_data(), one->storage.nbytes());
      }
    }
  }
}

void Workspace::depart(size_t mark) {
  if (ended_) {
    return;
  }
  mark_ = mark;
  present_ = present();
  put(gradients_, mark, gradients());
  hold();
  gauge_->begin();
}

void Workspace::end() {
  arrive();
  ended_ = true;
  watched_.clear();
}

WorkspaceRecord Workspace::record(size_t marks) const {
  return {.extra_nbytes = filled(extra_, marks, baseline_nbytes_),
          .gradient_nbytes = filled(gradients_, marks, 0),
          .baseline_nbytes = baseline_nbytes_};
}

int64_t Workspace::present() const {
  int64_t nbytes = 0;
  for (const auto& weak : watched_) {
    if (const auto iteration = weak.lock()) {
      nbytes += iteration->present_bytes(granularity_);
    }
  }
  return nbytes;
}

int64_t Workspace::gradients() const {
  int64_t nbytes = 0;
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined() && gradient.layout() == at::kStrided) {
      nbytes += static_cast<int64_t>(gradient.nbytes());
    }
  }
  return nbytes;
}

void Workspace::hold() {
  for (const auto& weak : watched_) {
    if (const auto iteration = weak.lock()) {
      std::vector<StorageRefPtr> found = iteration->present();
      held_.insert(held_.end(), std::make_move_iterator(found.begin()),
                   std::make_move_iterator(found.end()));
    }
  }
}

}  // namespace memswap
