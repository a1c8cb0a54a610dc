#include "forward_graph.h"

#include <map>

#include "lowest_peak.h"
#include "recipes.h"

namespace memswap {
namespace {

// What it takes to make a call again, beside the bytes that it spares: it writes its results, and
// reads as much. A recipe that spares less than this share of what its calls make is none: their
// time would be for nothing.
constexpr int64_t kCallShare = 64;

// How many bytes of one dtype are waited for, of how many.
struct Waited {
  double nbytes = 0;
  double of_nbytes = 0;
};

int64_t cost_of_call(const OperatorCall& call) {
  int64_t nbytes = 0;
  for (const OperatorCall::Output& output : call.outputs()) {
    nbytes += static_cast<int64_t>(output.tensor.view.storage_nbytes());
  }
  return 1 + nbytes / kCallShare;
}

}  // namespace

size_t ForwardGraph::node_of(const SavedView& view,
                             const c10::weak_intrusive_ptr<c10::StorageImpl>& storage) {
  const auto [found, made] = by_id_.try_emplace(id_of(view), nodes_.size());
  if (made) {
    nodes_.push_back({.storage = storage,
                      .key = view.storage_key(),
                      .nbytes = static_cast<int64_t>(view.storage_nbytes()),
                      .maker = std::nullopt,
                      .place = std::nullopt,
                      .dtype = std::nullopt});
  }
  return found->second;
}

size_t ForwardGraph::call_of(const OperatorCallPtr& call) {
  const auto [found, made] = by_call_.try_emplace(call.get(), calls_.size());
  if (made) {
    calls_.push_back({.call = call, .inputs = {}});
    for (const OperatorCall::Input& input : call->inputs()) {
      const size_t node = node_of(input.tensor.view, input.tensor.storage);
      calls_[found->second].inputs.push_back(node);
    }
  }
  return found->second;
}

// A recipe that reads a tensor would have to find it now. Whether it would: what made it is of no
// interest then.
bool ForwardGraph::look_at(const KnownTensor& tensor) {
  Node& node = nodes_[node_of(tensor.view, tensor.storage)];
  const bool held = held_.contains(id_of(tensor.view));
  const auto standing = held ? RecipeHost::Standing::kUnknown : host_.standing(tensor);
  if (standing != RecipeHost::Standing::kUnknown) {
    node.there = node.there || !node.place;
    return true;
  }
  // What is gone by now was there when it was read, and could have been held from then on.
  const at::Tensor alive = tensor.lock();
  if (alive.defined()) {
    node.dtype = alive.scalar_type();
    node.keepable = host_.can_save(tensor) || held;
  } else {
    node.keepable = host_.could_save(tensor);
  }
  return false;
}

// What a recipe that ends with this call could read, as far back as it may reach.
void ForwardGraph::visit(const OperatorCallPtr& maker) {
  std::unordered_set<const OperatorCall*> seen;
  std::vector<OperatorCallPtr> row = {maker};
  for (int depth = 0; depth < deepest_ && !row.empty(); ++depth) {
    std::vector<OperatorCallPtr> before;
    for (const OperatorCallPtr& call : row) {
      if (!seen.insert(call.get()).second) {
        continue;
      }
      const size_t which = call_of(call);
      for (const OperatorCall::Input& input : call->inputs()) {
        if (input.tensor.view.private_format() || log_.edited_since(*call, input.tensor)) {
          calls_[which].usable = false;
        }
        if (look_at(input.tensor)) {
          continue;
        }
        if (OperatorCallPtr earlier = log_.maker(input.tensor)) {
          nodes_[node_of(input.tensor.view, input.tensor.storage)].maker = call_of(earlier);
          before.push_back(std::move(earlier));
        }
      }
    }
    row = std::move(before);
  }
}

void ForwardGraph::add_saved(const RecipePlace& place, const SavedView& view,
                             const StorageRef& storage, const OperatorCallPtr& maker) {
  const size_t which = node_of(view, storage.storage.getWeakStorageImpl());
  saved_.push_back(which);
  nodes_[which].place = place;
  nodes_[which].dtype = place.dtype;
  nodes_[which].there = false;
  if (maker) {
    nodes_[which].maker = call_of(maker);
    visit(maker);
  }
}

void ForwardGraph::add_again(const SavedView& view) {
  const auto found = by_id_.find(id_of(view));
  if (found != by_id_.end() && nodes_[found->second].place) {
    saved_.push_back(found->second);
  }
}

RecipeChoices ForwardGraph::choose(const WaitedBytes& waited, const Failed& failed) const {
  std::map<c10::ScalarType, Waited> by_dtype;
  for (const Node& node : nodes_) {
    if (const int64_t nbytes = node.place ? waited(*node.place) : 0) {
      Waited& all = by_dtype[node.place->dtype];
      all.nbytes += static_cast<double>(nbytes);
      all.of_nbytes += static_cast<double>(node.nbytes);
    }
  }
  const auto keep_cost = [&](const Node& node) {
    const int64_t known = node.place ? waited(*node.place) : 0;
    if (known > 0 || !node.dtype || !by_dtype.contains(*node.dtype)) {
      return known > 0 ? known : node.nbytes;
    }
    const Waited& all = by_dtype.at(*node.dtype);
    return static_cast<int64_t>(static_cast<double>(node.nbytes) * all.nbytes / all.of_nbytes);
  };

  MakingGraph graph;
  graph.saved = saved_;
  for (const Call& call : calls_) {
    graph.calls.push_back({.cost = cost_of_call(*call.call), .inputs = call.inputs});
  }
  for (const Node& node : nodes_) {
    MakingGraph::Storage& storage = graph.storages.emplace_back();
    storage.nbytes = node.nbytes;
    storage.needed = node.place.has_value();
    storage.there = node.there;
    if (node.place || node.keepable) {
      storage.keep_cost = keep_cost(node);
    }
    const bool repeatable = node.maker && calls_[*node.maker].usable &&
                            calls_[*node.maker].call->output_in(node.key) != nullptr &&
                            !(node.place && failed(*node.place));
    if (repeatable) {
      storage.maker = node.maker;
    }
  }
  const Fates fates = lowest_peak(graph, {.deepest = deepest_});

  // At most `deepest_` in a row.
  std::vector<RecipeShapePtr> shapes(calls_.size());
  const std::function<RecipeShapePtr(size_t)> shape_of = [&](size_t call) {
    if (!shapes[call]) {
      auto shape = std::make_shared<RecipeShape>();
      for (const size_t input : calls_[call].inputs) {
        const bool again = fates[input] == Fate::kMadeAgain;
        shape->inputs.push_back(again ? shape_of(*nodes_[input].maker) : nullptr);
      }
      shapes[call] = std::move(shape);
    }
    return shapes[call];
  };
  RecipeChoices choices;
  for (size_t which = 0; which < nodes_.size(); ++which) {
    const Node& node = nodes_[which];
    if (node.place) {
      const bool again = fates[which] == Fate::kMadeAgain;
      choices.places[*node.place] = {.shape = again ? shape_of(*node.maker) : nullptr,
                                     .has_maker = node.maker.has_value()};
    }
  }
  hold_sources(fates, choices.holds);
  return choices;
}

// What is kept and autograd does not save is held for each call that is made again from it.
void ForwardGraph::hold_sources(const Fates& fates, OperatorLog::Holds& holds) const {
  std::unordered_set<size_t> again;
  for (size_t which = 0; which < nodes_.size(); ++which) {
    if (fates[which] == Fate::kMadeAgain) {
      again.insert(*nodes_[which].maker);
    }
  }
  for (const size_t which : again) {
    const OperatorCall& call = *calls_[which].call;
    for (size_t input = 0; input < calls_[which].inputs.size(); ++input) {
      const size_t source = calls_[which].inputs[input];
      const Node& node = nodes_[source];
      if (fates[source] == Fate::kKept && !node.place && !node.there) {
        holds[log_.moment_of(call)].push_back({.op = call.rule().op.operator_name().name,
                                               .input = input,
                                               .nbytes = static_cast<size_t>(node.nbytes)});
      }
    }
  }
}

}  // namespace memswap
