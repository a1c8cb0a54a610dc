#include "saved_tensor.h"

#include <ATen/Tensor.h>

#include <sstream>

#include "engine.h"

namespace memswap {

namespace {

std::string described(const at::Tensor& tensor) {
  if (const std::optional<SavedView> view = SavedView::capture(tensor)) {
    return view->describe();
  }
  std::ostringstream out;
  out << tensor.toString() << ' ';
  if (tensor.is_nested() && tensor.layout() == c10::kStrided) {  // it has a size for each row
    const at::Tensor sizes = tensor._nested_tensor_size();
    for (int64_t row = 0; row < sizes.size(0); ++row) {
      const at::Tensor of_row = sizes[row].contiguous();
      out << (row == 0 ? "[" : ", ")
          << at::IntArrayRef(of_row.const_data_ptr<int64_t>(), static_cast<size_t>(sizes.size(1)));
    }
    out << ']';
  } else {
    out << tensor.sym_sizes();
  }
  out << " on " << tensor.device();
  return out.str();
}

}  // namespace

SavedTensor SavedTensor::moved(EntryPtr entry, SavedView&& view) {
  ++entry->handles;
  return {std::move(entry), std::move(view)};
}

SavedTensor SavedTensor::kept(at::Tensor tensor, uint32_t version, KnownPtr known) {
  if (known && known->is_entry()) {
    ++static_cast<Entry&>(*known).keeps;
  }
  return {std::move(tensor), version, std::move(known)};
}

EntryPtr SavedTensor::entry() const {
  return known_ && known_->is_entry() ? std::static_pointer_cast<Entry>(known_) : nullptr;
}

at::Tensor SavedTensor::unpack() const {
  const EntryPtr of = entry();
  if (stays()) {
    const auto version = static_cast<uint32_t>(tensor_._version());
    if (version != version_) {
      throw EditedInPlace(described(tensor_), version, version_);
    }
    if (of) {
      of->engine()->demand_kept(of);
    }
    return tensor_;
  }
  const SavedView& view = *view_;
  if (view.edited()) {
    throw EditedInPlace(view.describe(), view.current_version(), view.version());
  }
  const StorageRefPtr storage = of->engine()->demand(of);
  if (of->fetched() && storage->version.current_version() != 0) {
    throw EditedInPlace(view.describe(), view.version() + 1, view.version());
  }
  return view.rebuild(*storage, !of->fetched());
}

EditedInPlace::EditedInPlace(const std::string& tensor, uint32_t version, uint32_t expected_version)
    : std::runtime_error(
          "one of the variables needed for gradient computation has been modified by an inplace "
          "operation: [" +
          tensor + "] is at version " + std::to_string(version) + "; expected version " +
          std::to_string(expected_version) +
          " instead. Hint: edit a copy, or edit before the operator that saves the tensor; "
          "torch.autograd.set_detect_anomaly(True) finds that operator."),
      version(version),
      expected_version(expected_version) {}

at::Tensor without_graph(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.is_leaf() ? tensor : tensor.detach();
}

}  // namespace memswap
