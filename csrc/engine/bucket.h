// Buckets: small storages of one batch travel together, in one block of a pool.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "away.h"
#include "block_form.h"
#include "storage/storage.h"

namespace memswap {

struct WholeTicket;

// The bytes of several storages, away as one. Owned by their away forms.
class Bucket {
 public:
  explicit Bucket(AwayFormPtr whole) : whole_(std::move(whole)) {}

  // A part's storage. The first part that is asked for has the whole bucket fetched. Nobody gets
  // memory that a reader has had before: it may have been written to.
  Returning bring(size_t offset, size_t nbytes);

 private:
  const AwayFormPtr whole_;
  std::optional<WeakStorage> fetched_;
  std::shared_ptr<WholeTicket> arrival_;
  std::set<size_t> given_;  // offsets of the parts of what was fetched last
};

class BucketPart final : public AwayForm {
 public:
  BucketPart(std::shared_ptr<Bucket> bucket, size_t offset, size_t nbytes)
      : bucket_(std::move(bucket)), offset_(offset), nbytes_(nbytes) {}

  Returning bring() override { return bucket_->bring(offset_, nbytes_); }
  size_t device_nbytes() const override { return 0; }
  size_t pool_nbytes() const override { return nbytes_; }
  bool can_fetch_ahead() const override { return true; }
  bool frees_first() const override { return true; }  // it was gathered
  Reason short_of() const override { return reasons::kPool; }

 private:
  const std::shared_ptr<Bucket> bucket_;
  const size_t offset_;
  const size_t nbytes_;
};

// Starts sending storages of one device as one, each with an away form of its own. Nothing: the
// pool has no room, and nothing was started. The caller holds the GIL, as for BlockSender::send.
std::optional<std::vector<Leaving>> send_together(BlockSender& sender,
                                                  const std::vector<StorageRefPtr>& storages);

}  // namespace memswap
