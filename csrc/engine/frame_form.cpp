#include "frame_form.h"

#include "work/without_gil.h"

namespace memswap {

Returning FrameForm::bring() {
  const WithoutGil without_gil;
  auto [storage, arrival] = lane_->decode(encoded_);
  return {std::move(storage), std::move(arrival)};
}

void FrameForm::wait_sent() {
  const WithoutGil without_gil;
  encoded_->wait_sent();
}

std::optional<LeavingFrame> FrameSender::send(const StorageRefPtr& storage,
                                              const FrameOptions& options) {
  const WithoutGil without_gil;
  std::optional<Encoding> encoding =
      pool_ ? lane_->encode_to(storage, options, copies_, pool_) : lane_->encode(storage, options);
  if (!encoding) {
    return std::nullopt;
  }
  if (!works_ahead_) {
    wait_ignoring_failure(encoding->ticket);
  }
  std::shared_ptr<FrameWatch> watch = encoding->encoded->watch();
  auto form = std::make_shared<FrameForm>(lane_, std::move(encoding->encoded), works_ahead_);
  return LeavingFrame{{std::move(form), std::move(encoding->ticket)}, std::move(watch)};
}

}  // namespace memswap
