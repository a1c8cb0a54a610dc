#include "bucket.h"

#include <c10/util/Exception.h>

#include <tuple>

#include "lane/gather.h"
#include "work/without_gil.h"

namespace memswap {
namespace {

// The ticket of a part: its bucket's, which the other parts wait for as well.
class PartTicket final : public Ticket {
 public:
  PartTicket(TicketPtr whole, size_t offset, size_t nbytes)
      : whole_(std::move(whole)), offset_(offset), nbytes_(nbytes) {}

  void wait() override { whole_->wait(); }
  bool done() override { return whole_->done(); }
  bool failed() override { return whole_->failed(); }
  void synchronize() override { whole_->synchronize(); }
  // abandon(): others may still wait; what they hold is let go of with the last of them.

  std::shared_ptr<StorageRef> kept_storage() override {
    const StorageRefPtr whole = whole_->kept_storage();
    return whole ? part(*whole, offset_, nbytes_) : nullptr;
  }

 private:
  const TicketPtr whole_;
  const size_t offset_;
  const size_t nbytes_;
};

}  // namespace

Returning Bucket::bring(size_t offset, size_t nbytes) {
  StorageRefPtr whole = fetched_ ? fetched_->lock() : nullptr;
  if (!whole || given_.contains(offset)) {
    auto [storage, arrival] = whole_->bring();
    whole = std::move(storage);
    arrival_ = std::move(arrival);
    fetched_.emplace(*whole);
    given_.clear();
  }
  given_.insert(offset);
  return {part(*whole, offset, nbytes), std::make_shared<PartTicket>(arrival_, offset, nbytes)};
}

std::optional<std::vector<Leaving>> send_together(BlockSender& sender,
                                                  const std::vector<StorageRefPtr>& storages) {
  StorageRefPtr gathered;
  std::vector<size_t> offsets;
  try {
    const WithoutGil without_gil;
    std::tie(gathered, offsets) = sender.lane()->gather(storages);
  } catch (const c10::OutOfMemoryError&) {
    return std::nullopt;
  }
  std::optional<Leaving> sent = sender.send(gathered);
  if (!sent) {
    return std::nullopt;
  }
  const auto bucket = std::make_shared<Bucket>(std::move(sent->away));
  std::vector<Leaving> parts;
  for (size_t i = 0; i < storages.size(); ++i) {
    const size_t nbytes = storages[i]->storage.nbytes();
    parts.push_back({std::make_shared<BucketPart>(bucket, offsets[i], nbytes),
                     std::make_shared<PartTicket>(sent->departure, offsets[i], nbytes)});
  }
  return parts;
}

}  // namespace memswap
