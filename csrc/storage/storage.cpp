#include "storage.h"

namespace memswap {

StorageRefPtr WeakStorage::lock() const {
  auto impl = weak_.lock();
  return impl ? std::make_shared<StorageRef>(c10::Storage(std::move(impl)), version_) : nullptr;
}

}  // namespace memswap
