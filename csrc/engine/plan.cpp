#include "plan.h"

#include <stdexcept>
#include <utility>

namespace memswap {

namespace {

void check_below(const std::vector<size_t>& places, size_t end, const char* otherwise) {
  for (const size_t place : places) {
    if (place >= end) {
      throw std::invalid_argument(otherwise);
    }
  }
}

}  // namespace

std::shared_ptr<Plan> Plan::make(c10::Device device, int64_t least_bytes,
                                 std::vector<Place> places) {
  auto made = std::make_shared<Plan>(Plan{device, least_bytes, std::move(places)});
  made->check();
  return made;
}

void Plan::check() const {
  const char* const early = "a plan releases what was saved by then, and nothing later";
  for (size_t index = 0; index < places.size(); ++index) {
    check_below(places[index].releases, index + 1, early);
    check_below(places[index].departures, index + 1, early);
    check_below(places[index].fetches, places.size(), "a plan fetches what it has a place for");
  }
}

}  // namespace memswap
