// Identity and lifetime of tensor storages.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <utility>

namespace memswap {

using MemoryShare = std::shared_ptr<const c10::DataPtr>;

// A share of one storage. `version` is the counter that views rebuilt on it share, so that an
// in-place edit through one of them is seen by the others.
struct StorageRef {
  explicit StorageRef(c10::Storage s) : StorageRef(std::move(s), c10::VariableVersion(0)) {}
  StorageRef(c10::Storage s, c10::VariableVersion v)
      : storage(std::move(s)), version(std::move(v)) {}
  c10::Storage storage;
  c10::VariableVersion version;
  MemoryShare memory;  // of the storage's memory, or nullptr (memory_share.h)
};
using StorageRefPtr = std::shared_ptr<StorageRef>;

// Identity of a storage without owning its memory. While a WeakStorage exists, the address of its
// StorageImpl is not given to another one, so `key` never names two storages at once.
class WeakStorage {
 public:
  explicit WeakStorage(const StorageRef& ref)
      : weak_(ref.storage.getWeakStorageImpl()),
        key_(ref.storage.unsafeGetStorageImpl()),
        version_(ref.version) {}

  const void* key() const { return key_; }
  bool expired() const { return weak_.expired(); }

  // A share of the storage if someone still holds it, else nullptr.
  StorageRefPtr lock() const;

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> weak_;
  const void* key_;
  c10::VariableVersion version_;
};

}  // namespace memswap
