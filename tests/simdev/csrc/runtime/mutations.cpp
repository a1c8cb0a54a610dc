#include "mutations.h"

#include <algorithm>

#include "machine.h"

namespace simdev {
namespace {

bool matches(const StreamSet& set, const std::optional<StreamId>& stream) {
  if (!set || !stream) return true;
  return std::find(set->begin(), set->end(), *stream) != set->end();
}

int add(Mutations::Mutation mutation) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.mutations.add(std::move(mutation));
}

}  // namespace

int Mutations::add(Mutation mutation) {
  active_.emplace(++last_id_, std::move(mutation));
  return last_id_;
}

uint64_t Mutations::hits(int id) const {
  auto found = active_.find(id);
  return found == active_.end() ? 0 : found->second.hits;
}

const Mutations::Mutation* Mutations::apply(Kind kind, std::optional<StreamId> subject,
                                            std::optional<StreamId> source) {
  for (auto& [id, mutation] : active_) {
    if (mutation.kind != kind || !matches(mutation.subject, subject) ||
        !matches(mutation.source, source))
      continue;
    ++mutation.hits;
    return &mutation;
  }
  return nullptr;
}

using Kind = Mutations::Kind;

int mutate_drop_waits(StreamSet waiters, StreamSet sources) {
  return add({Kind::kDropWaits, std::move(waiters), std::move(sources), {}, 0});
}
int mutate_drop_synchronizes(StreamSet sources) {
  return add({Kind::kDropSynchronizes, std::move(sources), std::nullopt, {}, 0});
}
int mutate_lying_queries(StreamSet sources) {
  return add({Kind::kLyingQueries, std::move(sources), std::nullopt, {}, 0});
}
int mutate_allocate_on(StreamId tagged, StreamSet current) {
  return add({Kind::kAllocateOn, std::move(current), std::nullopt, tagged, 0});
}
int mutate_drop_record_stream() {
  return add({Kind::kDropRecordStream, std::nullopt, std::nullopt, {}, 0});
}

uint64_t mutation_hits(int id) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.mutations.hits(id);
}
void remove_mutation(int id) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.mutations.remove(id);
}
void clear_mutations() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.mutations.clear();
}

}  // namespace simdev
