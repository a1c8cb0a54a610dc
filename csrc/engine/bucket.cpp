#include "bucket.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <tuple>

#include "lane/gather.h"
#include "work/without_gil.h"

namespace memswap {

// The ticket of a bucket, and how many tickets of its parts have not been abandoned.
struct WholeTicket {
  explicit WholeTicket(TicketPtr ticket) : ticket(std::move(ticket)) {}

  const TicketPtr ticket;
  std::atomic<int> not_abandoned{0};
};

namespace {

// The ticket of a part: its bucket's, which the other parts wait for as well.
class PartTicket final : public Ticket {
 public:
  PartTicket(std::shared_ptr<WholeTicket> whole, size_t offset, size_t nbytes)
      : whole_(std::move(whole)), offset_(offset), nbytes_(nbytes) {
    ++whole_->not_abandoned;
  }

  void wait() override { whole_->ticket->wait(); }
  bool done() override { return whole_->ticket->done(); }
  bool failed() override { return whole_->ticket->failed(); }
  void synchronize() override { whole_->ticket->synchronize(); }

  // Others may still wait: the last of them lets go of the bucket.
  void abandon() noexcept override {
    if (!abandoned_.exchange(true) && --whole_->not_abandoned == 0) {
      whole_->ticket->abandon();
    }
  }

  std::shared_ptr<StorageRef> kept_storage() override {
    const StorageRefPtr whole = whole_->ticket->kept_storage();
    return whole ? part(*whole, offset_, nbytes_) : nullptr;
  }

 private:
  const std::shared_ptr<WholeTicket> whole_;
  const size_t offset_;
  const size_t nbytes_;
  std::atomic<bool> abandoned_{false};
};

}  // namespace

Returning Bucket::bring(size_t offset, size_t nbytes) {
  StorageRefPtr whole = fetched_ ? fetched_->lock() : nullptr;
  if (!whole || given_.contains(offset)) {
    auto [storage, arrival] = whole_->bring();
    whole = std::move(storage);
    arrival_ = std::make_shared<WholeTicket>(std::move(arrival));
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
  const auto departure = std::make_shared<WholeTicket>(std::move(sent->departure));
  std::vector<Leaving> parts;
  for (size_t i = 0; i < storages.size(); ++i) {
    const size_t nbytes = storages[i]->storage.nbytes();
    parts.push_back({std::make_shared<BucketPart>(bucket, offsets[i], nbytes),
                     std::make_shared<PartTicket>(departure, offsets[i], nbytes)});
  }
  return parts;
}

}  // namespace memswap
