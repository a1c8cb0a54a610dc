// How one saved tensor looks at its storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "storage.h"

namespace memswap {

// Everything needed to see a storage again as the tensor that autograd saved: size, stride, offset,
// dtype, conjugate and negative bits. Holds the tensor's version counter but not its memory.
class SavedView {
 public:
  // The view of `tensor`, or nullopt where a storage alone does not say what the tensor is: a
  // subclass, a functorch wrapper, a sparse, nested, quantised, named, symbolic or meta tensor, or
  // one without bytes. A tensor whose storage was resized under it is not plain either.
  static std::optional<SavedView> capture(const at::Tensor& tensor);

  // A new tensor of the same look on `storage`, detached. `shares_counter` gives it the version
  // counter of the original (the storage is the original one), otherwise that of `storage`.
  at::Tensor rebuild(const StorageRef& storage, bool shares_counter) const;

  // Whether the original was edited in place since it was captured.
  bool edited() const { return counter_.current_version() != version_; }
  const c10::VariableVersion& counter() const { return counter_; }
  uint32_t version() const { return version_; }
  uint32_t current_version() const { return counter_.current_version(); }

  // Storage that is (a view of) a leaf that requires grad: a parameter, however it was reached, or
  // one that has lent memory.
  bool of_leaf() const { return of_leaf_; }

  // The storage has a format that its bytes do not tell (torch_npu.h): other memory that they are
  // copied to would be read wrongly.
  bool private_format() const { return private_format_; }
  // An edited part of a storage that is no view of it ([Note: Several counters on one storage]).
  bool edited_part() const { return edited_part_; }
  // A small part of large memory that no operator computed: a batch that is a slice of a data set.
  bool part_of_data() const { return part_of_data_; }
  // Whether an operator of a graph made the tensor, or what it is a view of.
  bool computed() const { return computed_; }
  // [Note: What an operator fills after it was saved]
  // Autograd saves the inputs of an operator before it runs, and rrelu's noise is one: memory that
  // torch has just allocated, and that the operator fills without counting an edit. Sent at once,
  // the bytes of before would come back. So a tensor of floats that nobody but torch has seen, that
  // no operator of a graph made and that no edit was counted of, waits until another node saves or
  // the scope ends, and is saved then. Outputs without a gradient (the statistics of a norm) look
  // the same and wait too.
  //
  // Whether it looks so; who has seen it, Python knows.
  bool may_be_filled_yet() const {
    return !computed_ && version_ == 0 && c10::isFloatingType(dtype_.toScalarType());
  }
  // Of the storage: the first byte that the tensor looks at, and the one behind the last.
  size_t begin() const { return begin_; }
  size_t end() const { return end_; }
  const void* storage_key() const { return key_; }
  size_t storage_nbytes() const { return storage_nbytes_; }
  size_t nbytes() const { return nbytes_; }
  c10::Device device() const { return device_; }
  std::string describe() const;

 private:
  SavedView() = default;

  c10::SmallVector<int64_t, 5> sizes_;
  c10::SmallVector<int64_t, 5> strides_;
  int64_t offset_ = 0;
  caffe2::TypeMeta dtype_;
  c10::DispatchKeySet keys_;
  c10::VariableVersion counter_{0};
  uint32_t version_ = 0;
  c10::Device device_{c10::kCPU};
  const void* key_ = nullptr;
  size_t storage_nbytes_ = 0;
  size_t nbytes_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  bool computed_ = false;
  bool of_leaf_ = false;
  bool private_format_ = false;
  bool edited_part_ = false;
  bool part_of_data_ = false;
};

// The version of a tensor that stays where it is; holds no memory.
class VersionGuard {
 public:
  explicit VersionGuard(const at::Tensor& tensor);
  bool edited() const { return counter_.current_version() != version_; }
  uint32_t version() const { return version_; }
  uint32_t current_version() const { return counter_.current_version(); }

 private:
  c10::VariableVersion counter_;
  uint32_t version_;
};

}  // namespace memswap
