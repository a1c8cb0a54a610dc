#include "race_detector.h"

#include <algorithm>
#include <iterator>

namespace simdev {
namespace {

constexpr size_t kMostReports = 1000;

bool ordered_after(const Access& earlier, int slot, const VectorClock& known) {
  return earlier.slot == slot || earlier.slot == kHost || known[earlier.slot] >= earlier.time;
}

}  // namespace

std::optional<Conflict> AccessMap::find_conflict(const Span& span, int slot,
                                                 const VectorClock& known) const {
  auto range = ranges_.upper_bound(span.begin);
  if (range != ranges_.begin()) --range;
  for (; range != ranges_.end() && range->first < span.end; ++range) {
    if (range->second.end <= span.begin) continue;
    const auto& [end, write, reads] = range->second;
    if (write && !ordered_after(*write, slot, known)) return Conflict{*write, true};
    if (!span.write) continue;
    for (const Access& read : reads)
      if (!ordered_after(read, slot, known)) return Conflict{read, false};
  }
  return std::nullopt;
}

AccessMap::Ranges::iterator AccessMap::split_at(uintptr_t address) {
  auto next = ranges_.lower_bound(address);
  if (next == ranges_.begin()) return next;
  auto& [begin, range] = *std::prev(next);
  if (range.end <= address) return next;
  Range tail = range;
  range.end = address;
  return ranges_.emplace_hint(next, address, std::move(tail));
}

void AccessMap::remember(const Span& span, const Access& access) {
  auto range = split_at(span.begin);
  if (span.write) {
    split_at(span.end);
    range = ranges_.lower_bound(span.begin);
    while (range != ranges_.end() && range->first < span.end) range = ranges_.erase(range);
    ranges_.emplace_hint(range, span.begin, Range{span.end, access, {}});
    return;
  }
  split_at(span.end);
  uintptr_t at = span.begin;
  while (at < span.end) {
    range = ranges_.lower_bound(at);
    if (range == ranges_.end() || range->first > at) {  // bytes nobody touched yet
      const uintptr_t end = range == ranges_.end() ? span.end : std::min(span.end, range->first);
      range = ranges_.emplace_hint(range, at, Range{end, std::nullopt, {}});
    }
    auto& reads = range->second.reads;
    auto mine = std::find_if(reads.begin(), reads.end(),
                             [&](const Access& read) { return read.slot == access.slot; });
    if (mine == reads.end()) {
      reads.push_back(access);
    } else {
      *mine = access;
    }
    at = range->second.end;
  }
}

void RaceDetector::set_mode(Check mode) {
  mode_ = mode;
  deferred_.clear();
}

std::vector<std::string> RaceDetector::take_reports() {
  deferred_.clear();
  return std::exchange(reports_, {});
}

void RaceDetector::report(std::string message, bool deferrable) {
  if (reports_.size() < kMostReports) reports_.push_back(message);
  if (mode_ != Check::kThrow) return;
  if (!deferrable) throw Error(message);
  if (deferred_.empty()) deferred_ = std::move(message);
}

void RaceDetector::throw_deferred() {
  if (mode_ == Check::kThrow && !deferred_.empty()) throw Error(std::exchange(deferred_, {}));
}

void RaceDetector::check(const AccessMap& block, size_t block_bytes, const Span& span,
                         const Access& access, const VectorClock& known, bool deferrable) {
  const auto conflict = block.find_conflict(span, access.slot, known);
  if (!conflict) return;
  const auto word = [](bool write) { return write ? "write" : "read"; };
  report(std::string("sim: stream race: '") + access.name + "' (" + word(span.write) + ", " +
             name_of(access.slot) + ") is not ordered after '" + conflict->earlier.name + "' (" +
             word(conflict->earlier_wrote) + ", " + name_of(conflict->earlier.slot) + ", task #" +
             std::to_string(conflict->earlier.task) + ") on a block of " +
             std::to_string(block_bytes) + " bytes",
         deferrable);
}

void RaceDetector::access(AccessMap& block, size_t block_bytes, const Span& span,
                          const Access& access, const VectorClock& known, bool deferrable) {
  check(block, block_bytes, span, access, known, deferrable);
  block.remember(span, access);
}

}  // namespace simdev
