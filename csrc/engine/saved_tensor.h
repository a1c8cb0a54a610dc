// SavedTensor: what stands for a tensor until backward asks for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "entry.h"
#include "ledger.h"
#include "storage/saved_view.h"

namespace memswap {

// A saved tensor was edited in place, of which hooks keep autograd from hearing: its own words.
struct EditedInPlace : std::runtime_error {
  // `tensor`: in words.
  EditedInPlace(const std::string& tensor, uint32_t version, uint32_t expected_version);

  const uint32_t version, expected_version;
};

// One save, as autograd's handles and recipes hold it: a share of an entry and how the tensor looks
// at its storage, or a tensor that stays and who stands for its storage. It does the check of the
// version that autograd would have done. The GIL, or else the engine's lock, serialises its making
// and its end.
class SavedTensor {
 public:
  // The storage leaves, or has left.
  static SavedTensor moved(EntryPtr entry, SavedView&& view);
  // The tensor stays. `tensor`: without the graph that made it. `version`: of what was saved.
  static SavedTensor kept(at::Tensor tensor, uint32_t version, KnownPtr known);

  // The tensor again, there before what the caller does next on its current stream. Throws
  // EditedInPlace and LostBytes.
  at::Tensor unpack() const;

  bool stays() const { return tensor_.defined(); }
  const at::Tensor& tensor() const { return tensor_; }            // undefined: its storage leaves
  const std::optional<SavedView>& view() const { return view_; }  // of a storage that leaves
  const KnownPtr& known() const { return known_; }                // nullptr: nobody stands for it
  // The entry that stands for the storage, or nullptr.
  EntryPtr entry() const;

 private:
  SavedTensor(EntryPtr entry, SavedView&& view)
      : known_(std::move(entry)), view_(std::move(view)) {}
  SavedTensor(at::Tensor tensor, uint32_t version, KnownPtr known)
      : known_(std::move(known)), tensor_(std::move(tensor)), version_(version) {}

  KnownPtr known_;
  std::optional<SavedView> view_;
  at::Tensor tensor_;
  uint32_t version_ = 0;
};

// A tensor as it waits where it stays: a leaf is kept itself, as autograd would, since whoever
// gives it other memory gives it to backward as well; others share storage and version counter, not
// the graph.
at::Tensor without_graph(const at::Tensor& tensor);

}  // namespace memswap
