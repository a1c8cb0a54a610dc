// Memory for so many values by name: whatever was put or refreshed last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <list>
#include <unordered_map>
#include <utility>

namespace memswap {

template <class Name, class Value, class Hash>
class Latest {
 public:
  explicit Latest(size_t most) : most_(std::max<size_t>(most, 1)) {}

  // The value of a name; nullptr: there is none any more. Valid until the next `put`.
  Value* find(const Name& name) {
    const auto found = places_.find(name);
    return found == places_.end() ? nullptr : &found->second->second;
  }

  // The same, which is the latest from now on.
  Value* refresh(const Name& name) {
    const auto found = places_.find(name);
    if (found == places_.end()) {
      return nullptr;
    }
    rows_.splice(rows_.end(), rows_, found->second);
    return &found->second->second;
  }

  // Puts a value, in the place of an older one; the one that was put first may have to go.
  Value& put(const Name& name, Value value) {
    if (Value* const known = refresh(name)) {
      *known = std::move(value);
      return *known;
    }
    rows_.emplace_back(name, std::move(value));
    places_.emplace(name, std::prev(rows_.end()));
    if (rows_.size() > most_) {
      places_.erase(rows_.front().first);
      rows_.pop_front();
    }
    return rows_.back().second;
  }

  size_t size() const { return rows_.size(); }

 private:
  using Rows = std::list<std::pair<Name, Value>>;

  const size_t most_;
  Rows rows_;  // the latest at the end
  std::unordered_map<Name, typename Rows::iterator, Hash> places_;
};

}  // namespace memswap
