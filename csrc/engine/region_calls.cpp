#include "region_calls.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "iteration.h"

namespace memswap {

void RegionCalls::add(std::string unit, const std::vector<at::Tensor>& inputs, const Iteration& of,
                      int64_t least_bytes) {
  std::unordered_map<const void*, size_t> places;
  for (size_t index = 0; index < of.size(); ++index) {
    const EntryPtr entry = of.entry(index);
    if (entry && !entry->fetched()) {
      places[entry->identity().key()] = index;
    }
  }
  std::unordered_set<const void*> seen;
  for (const at::Tensor& input : inputs) {
    if (!input.unsafeGetTensorImpl()->has_storage()) {
      continue;
    }
    const WeakStorage storage(StorageRef(input.storage()));
    const auto nbytes = static_cast<int64_t>(input.storage().nbytes());
    if (nbytes >= least_bytes && seen.insert(storage.key()).second) {
      const auto place = places.find(storage.key());
      inputs_.push_back({unit, storage, nbytes,
                         place == places.end() ? std::nullopt : std::optional(place->second)});
    }
  }
}

void RegionCalls::saved(const Entry& entry) {
  for (Input& input : inputs_) {
    if (!input.place && input.storage.key() == entry.identity().key()) {
      input.place = entry.index();
    }
  }
}

std::vector<IterationRecord::Region> RegionCalls::found() const {
  std::vector<IterationRecord::Region> regions;
  for (const Input& input : inputs_) {
    auto region = std::find_if(regions.begin(), regions.end(),
                               [&](const auto& one) { return one.unit == input.unit; });
    if (region == regions.end()) {
      region = regions.insert(region, {.unit = input.unit, .inputs = {}});
    }
    if (input.place) {
      region->inputs.push_back(*input.place);
    } else {
      region->other_nbytes += input.nbytes;
    }
  }
  return regions;
}

}  // namespace memswap
