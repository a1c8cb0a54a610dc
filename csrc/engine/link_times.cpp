#include "link_times.h"

#include <memory>

#include "iteration.h"
#include "lane/stream_lane.h"

namespace memswap {

namespace {

// The stream lane that copies an entry's raw bytes; nullptr: none does.
std::shared_ptr<StreamLane> copying_lane(const Entry& entry) {
  const AwayFormPtr& away = entry.away();
  return away ? std::dynamic_pointer_cast<StreamLane>(away->sent_by()) : nullptr;
}

}  // namespace

void LinkTimes::sent(const Entry& entry) {
  if (entry.state() != State::kLeaving) {
    return;
  }
  if (const auto lane = copying_lane(entry)) {
    sends_.emplace_back(moment_on(lane->send_stream()), entry.nbytes());
  }
}

void LinkTimes::returning(const Iteration& of, const std::vector<size_t>& places) {
  int64_t nbytes = 0;
  std::shared_ptr<StreamLane> lane;
  for (const size_t place : places) {
    const EntryPtr entry = of.entry(place);
    if (!entry || entry->state() != State::kReturning || returning_.contains(place)) {
      continue;
    }
    if (auto copying = copying_lane(*entry)) {
      returning_.insert(place);
      nbytes += entry->nbytes();
      lane = std::move(copying);
    }
  }
  if (lane) {
    fetches_.emplace_back(moment_on(lane->fetch_stream()), nbytes);
  }
}

std::vector<IterationRecord::Copy> LinkTimes::copies_of(const Ends& ends) {
  std::vector<IterationRecord::Copy> copies;
  for (size_t index = 1; index < ends.size() && ends[index].first->reached(); ++index) {
    copies.push_back(
        {seconds_between(*ends[index - 1].first, *ends[index].first), ends[index].second});
  }
  return copies;
}

}  // namespace memswap
