// Ways to break the machine on purpose, so that a test of ordering can be proven able to fail.
#pragma once

#include <map>

#include "runtime.h"

namespace simdev {

class Mutations {
 public:
  enum class Kind {
    kDropWaits,
    kDropSynchronizes,
    kLyingQueries,
    kAllocateOn,
    kDropRecordStream,
  };
  struct Mutation {
    Kind kind = Kind::kDropWaits;
    StreamSet subject;  // the waiting, synchronised or allocating stream
    StreamSet source;   // kDropWaits: where the event was recorded
    StreamId tagged;    // kAllocateOn
    uint64_t hits = 0;
  };

  int add(Mutation mutation);
  void remove(int id) { active_.erase(id); }
  void clear() { active_.clear(); }
  uint64_t hits(int id) const;

  // The mutation of this kind that applies, with one more hit; null where there is none.
  const Mutation* apply(Kind kind, std::optional<StreamId> subject = std::nullopt,
                        std::optional<StreamId> source = std::nullopt);

 private:
  std::map<int, Mutation> active_;
  int last_id_ = 0;
};

}  // namespace simdev
