// What one forward made of what, and the choice of what stays of it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "making_graph.h"
#include "operator_log.h"
#include "recipe_place.h"
#include "storage/saved_view.h"
#include "storage/storage.h"

namespace memswap {

class RecipeHost;

// Where a recipe begins: for each input of its call the shape of what makes that again, or nullptr
// where it is a source.
struct RecipeShape {
  std::vector<std::shared_ptr<const RecipeShape>> inputs;
};
using RecipeShapePtr = std::shared_ptr<const RecipeShape>;

// What was chosen for one place.
struct RecipeChoice {
  RecipeShapePtr shape;    // of its recipe; nullptr: the storage stays, or waits in another form
  bool has_maker = false;  // whether it was known what made the storage
};

// What was chosen for a forward.
struct RecipeChoices {
  std::unordered_map<RecipePlace, RecipeChoice, RecipePlaceHash> places;
  OperatorLog::Holds holds;  // sources that autograd does not save
};

// [Note: Chosen once a forward is known]
// Storages are offered one by one, and each one's recipe could be judged alone: by what autograd
// has saved so far, and by bytes of its own. That misses what pays for several together, and what
// is saved later. So the first forward is taken down: the storages that were offered, the calls of
// the table that made them, and what those read, as far back as a recipe may reach. When it is
// over, it is known what stays at the lowest peak ([Note: The lowest peak] in lowest_peak.h): also
// in place of what autograd saves, what it does not. From the next forward on that is done at each
// place, and proven like all recipes. A place that was not there is judged alone, and has the next
// forward taken down again.

// The graph of one forward, taken down. Holds no memory of tensors. The engine's lock serialises
// the calls.
class ForwardGraph {
 public:
  // Bytes that a storage takes while it waits in another form than a recipe; 0: not known.
  using WaitedBytes = std::function<int64_t(const RecipePlace&)>;
  // Whether a place must never be a recipe.
  using Failed = std::function<bool(const RecipePlace&)>;

  // `deepest`: calls that a recipe may have in a row. What is referred to outlives this.
  ForwardGraph(const OperatorLog& log, RecipeHost& host, int deepest)
      : log_(log), host_(host), deepest_(deepest) {}

  // A storage is about to leave. `maker`: the call that made it, or nullptr.
  void add_saved(const RecipePlace& place, const SavedView& view, const StorageRef& storage,
                 const OperatorCallPtr& maker);
  // A storage is saved once more. Nothing, if it was not added.
  void add_again(const SavedView& view);
  // A tensor was saved for a recipe alone.
  void add_held(const KnownTensor& tensor) { held_.insert(id_of(tensor.view)); }

  // The cheapest choice, for all places that were added.
  RecipeChoices choose(const WaitedBytes& waited, const Failed& failed) const;

 private:
  // A storage with one content.
  using Id = std::pair<const void*, uint32_t>;
  struct IdHash {
    size_t operator()(const Id& id) const { return c10::get_hash(id.first, id.second); }
  };

  struct Node {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being used again
    const void* key;
    int64_t nbytes;
    std::optional<size_t> maker;
    std::optional<RecipePlace> place;  // of what autograd saves
    std::optional<c10::ScalarType> dtype;
    bool there = false;     // costs nothing: a parameter, or what stays for another reason
    bool keepable = false;  // as autograd's storages are
  };

  struct Call {
    OperatorCallPtr call;
    std::vector<size_t> inputs;
    bool usable = true;
  };

  static Id id_of(const SavedView& view) { return {view.storage_key(), view.version()}; }
  size_t node_of(const SavedView& view, const c10::weak_intrusive_ptr<c10::StorageImpl>& storage);
  size_t call_of(const OperatorCallPtr& call);
  void visit(const OperatorCallPtr& maker);
  bool look_at(const KnownTensor& tensor);
  void hold_sources(const Fates& fates, OperatorLog::Holds& holds) const;

  const OperatorLog& log_;
  RecipeHost& host_;
  const int deepest_;
  std::vector<Node> nodes_;
  std::vector<Call> calls_;
  std::vector<size_t> saved_;  // nodes, in their order, as often as they are saved
  std::unordered_map<Id, size_t, IdHash> by_id_;
  std::unordered_map<const OperatorCall*, size_t> by_call_;
  std::unordered_set<Id, IdHash> held_;
};

}  // namespace memswap
