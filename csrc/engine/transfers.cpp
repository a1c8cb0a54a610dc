#include "transfers.h"

#include <algorithm>

#include "codec/stream_codec_lane.h"
#include "reasons.h"
#include "work/without_gil.h"

namespace memswap {

namespace {

std::optional<FrameReport> reported(FrameWatch& watch) {
  const WithoutGil without_gil;
  return watch.report();
}

}  // namespace

void Transfers::set_blocks(std::shared_ptr<BlockSender> blocks) {
  blocks_ = std::move(blocks);
  bound(blocks_->lane().get());
}

void Transfers::set_frames(Form form, std::shared_ptr<FrameSender> frames) {
  bound(frames->lane().get());
  bound(frames->copies().get());
  frames_in(form) = std::move(frames);
  set_room();
}

void Transfers::bound(AnyLane* lane) const {
  if (lane != nullptr && leaving_bytes_) {
    lane->set_max_leaving_bytes(static_cast<size_t>(*leaving_bytes_));
  }
}

StreamCodecLane* Transfers::streams() const {
  for (const auto& sender : {frames_, pooled_frames_}) {
    if (sender && *sender) {
      return dynamic_cast<StreamCodecLane*>((*sender)->lane().get());
    }
  }
  return nullptr;
}

void Transfers::begin(int64_t leaving_bytes, int64_t nbytes) {
  if (!captures()) {  // a graph would be asked to wait, and an event to be queried
    check_decodes(/*wait=*/false);
  }
  expectations->begin_iteration();
  leaving_bytes_ = leaving_bytes;
  forward_nbytes_ = nbytes;
  ++forwards_;
  if (overflow_room_ && std::find(kTrimAt.begin(), kTrimAt.end(), forwards_) != kTrimAt.end()) {
    trim_arena();  // a plan takes no pinned memory for that
  }
  if (blocks_) {
    bound(blocks_->lane().get());
  }
  for (const auto& sender : {frames_, pooled_frames_}) {
    if (sender && *sender) {
      bound((*sender)->lane().get());
      bound((*sender)->copies().get());
    }
  }
  if (!overflow_room_) {
    set_room();
  }
}

void Transfers::set_overflow_room(std::optional<int64_t> nbytes) {
  overflow_room_ = nbytes;
  set_room();
}

void Transfers::set_room() const {
  StreamCodecLane* const lane = streams();
  if (lane == nullptr) {
    return;
  }
  const WithoutGil without_gil;
  if (overflow_room_) {
    lane->set_overflow_room(static_cast<size_t>(*overflow_room_));
    return;
  }
  const auto share =
      static_cast<int64_t>(static_cast<double>(forward_nbytes_) * traits.arena_share);
  lane->set_overflow_room(std::nullopt);
  lane->set_arena_budget(static_cast<size_t>(std::max(traits.arena_nbytes, share)));
}

int64_t Transfers::arena_bytes() const {
  const StreamCodecLane* const lane = streams();
  return lane == nullptr ? 0 : static_cast<int64_t>(lane->arena_statistics().reserved_bytes);
}

void Transfers::trim_arena() {
  StreamCodecLane* const lane = streams();
  if (lane == nullptr) {
    return;
  }
  const WithoutGil without_gil;
  lane->trim_arena();
  if (lane->arena_pool()) {
    lane->arena_pool()->trim();
  }
}

void Transfers::check_decodes(bool wait) {
  StreamCodecLane* const lane = streams();
  if (lane == nullptr) {
    return;
  }
  uint32_t status = 0;
  {
    const WithoutGil without_gil;
    status = wait ? lane->decode_status().wait() : lane->decode_status().take_known();
  }
  if (status != 0) {
    throw LostBytes("decoding on " + device.str() +
                    " found a frame that is not what was encoded (status " +
                    std::to_string(status) +
                    ", docs/format.md): its memory was overwritten or is broken. Gradients of the "
                    "last two backward passes may be wrong; go back to a checkpoint before them.");
  }
}

std::variant<Expectation, Refused> Transfers::expect(Form form, const TensorKey& key,
                                                     std::optional<int64_t> most_bytes) {
  if (!frames(form)) {
    return Refused{reasons::kNoCodec, {}};
  }
  Expectation expectation = expectations->of(key, most_bytes);
  if (!expectation.fault.empty()) {
    return Refused{reasons::kCodecFault, std::move(expectation.fault)};
  }
  if (!expectation.pays) {
    return Refused{reasons::kDoesNotShrink, {}};
  }
  return expectation;
}

std::variant<Leaving, Refused> Transfers::send(Form form, const StorageRefPtr& storage,
                                               const TensorKey& key) {
  if (form == Form::kBlock) {
    if (std::optional<Leaving> leaving = blocks()->send(storage)) {
      return std::move(*leaving);
    }
    return Refused{reasons::kPool, blocks()->why_refused()};
  }
  std::variant<Expectation, Refused> expected = expect(form, key);
  if (Refused* const refused = std::get_if<Refused>(&expected)) {
    return std::move(*refused);
  }
  if (std::optional<Leaving> leaving =
          encode(form, storage, std::move(std::get<Expectation>(expected)))) {
    return std::move(*leaving);
  }
  return Refused{reasons::kCodecRoom, frames(form)->why_refused()};
}

std::optional<Leaving> Transfers::encode(Form form, const StorageRefPtr& storage,
                                         Expectation expectation, std::weak_ptr<Entry> entry) {
  FrameSender& sender = *frames(form);
  std::optional<LeavingFrame> frame = sender.send(storage, expectation.options);
  if (!frame && expectation.trial) {
    expectation = expectations->settled(expectation);
    frame = sender.send(storage, expectation.options);
  }
  if (!frame) {
    return std::nullopt;
  }
  // Where nothing works ahead an encode has ended, unless it failed.
  if (sender.works_ahead() || reported(*frame->watch)) {
    awaited_.push_back({std::move(expectation), std::move(frame->watch), std::move(entry)});
  }
  return std::move(frame->leaving);
}

std::optional<Transfers::Encoded> Transfers::take_report() {
  if (awaited_.empty()) {
    return std::nullopt;
  }
  const std::shared_ptr<FrameWatch> watch = awaited_.front().watch;
  const std::optional<FrameReport> report = reported(*watch);
  if (!report) {
    return std::nullopt;
  }
  const Awaited made = std::move(awaited_.front());
  awaited_.pop_front();
  expectations->learn(made.expectation, *report);
  return Encoded{made.expectation.key.nbytes, static_cast<int64_t>(report->frame_nbytes()),
                 made.entry};
}

}  // namespace memswap
