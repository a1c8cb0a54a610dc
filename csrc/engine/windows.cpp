#include "windows.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "codec/stream_codec_lane.h"
#include "engine.h"
#include "iteration.h"
#include "lane/graph_capture.h"
#include "reasons.h"

namespace memswap {

namespace {

// The share that an encode is expected to free of a tensor of which no frame has been seen.
constexpr double kFirstGain = 1.0 / 3;

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

void Windows::open(double seconds) {
  if (inside()) {
    return;
  }
  durations.begin_go();
  if (engine_.planning.directed()) {
    engine_.planning.note_window(seconds);
  }
  const IterationPtr iteration = runs_backward() ? demanded_ : engine_.iteration();
  if (iteration && works_ahead_) {
    iteration->open_window(seconds * queue.decode_rate);
  }
  queue.open(seconds);
}

void Windows::enter(double seconds) {
  open(seconds);
  ++depths_[std::this_thread::get_id()];
}

void Windows::leave() {
  const auto depth = depths_.find(std::this_thread::get_id());
  if (depth != depths_.end() && --depth->second == 0) {
    depths_.erase(depth);
    queue.close();
  }
}

void Windows::end_forward() {
  durations.begin_go();
  queue.end_forward();
}

void Windows::begin_iteration() {
  queue.begin_iteration();
  durations.begin_iteration();
}

void Windows::defer(const EntryPtr& entry, const StorageRefPtr& storage, const LeaveOrder& order,
                    const Expectation& expectation) {
  works_ahead_ = true;
  entry->hold(storage);
  const std::optional<FrameSizes> sizes = order.transfers->expectations->sizes(expectation.key);
  const auto nbytes = static_cast<double>(entry->nbytes());
  const double gain = sizes ? 1 - static_cast<double>(sizes->used) / nbytes : kFirstGain;
  durations.begin_go();
  queue.defer({entry, entry->nbytes(), gain, current_stream(entry->device()), order, expectation});
}

void Windows::look_ahead(const IterationPtr& iteration, size_t index) {
  const bool first = !iteration->began_backward();
  demanded_ = iteration;
  std::vector<EntryPtr> wanted = iteration->demand(index);
  int64_t prefetch_bytes = iteration->prefetch_bytes();
  if (iteration->returns_as_planned()) {  // copies take no processors, and start in time
    prefetch_bytes = iteration->least_prefetch_bytes();  // a plan asks for little ahead
    std::vector<EntryPtr> copied;
    std::erase_if(wanted, [&](const EntryPtr& one) {
      if (one->away() && one->away()->decodes()) {
        return false;
      }
      copied.push_back(one);
      return true;
    });
    iteration->bring_ahead(copied, [this](const EntryPtr& one) { return fetch(one); });
  }
  durations.begin_go();
  if (first) {
    queue.begin_backward();
  }
  queue.want(wanted, prefetch_bytes);
}

void Windows::hurry(const EntryPtr& entry) {
  if (entry->storage() && entry->state() == State::kResident) {
    durations.begin_go();
    queue.start_now({entry});
  }
}

// --- WindowQueue::Work ---

TicketPtr Windows::start(const PendingEncode& pending) {
  const EntryPtr entry = pending.entry.lock();
  if (!entry || !entry->storage()) {
    return nullptr;
  }
  if (entry->lost_memory()) {
    engine_.ledger.keep(reasons::kResized, entry->nbytes());
    return nullptr;
  }
  const LeaveOrder& order = pending.order;
  // The entry holds its storage until it is sent.
  const Reason reason = engine_.send_frame(entry, entry->storage(), order, pending.expectation);
  if (reason != nullptr) {
    engine_.ledger.keep(reason, entry->nbytes());
    return nullptr;
  }
  notice(entry->away()->sent_by(), entry->nbytes(), true);
  return entry->departure();
}

Ahead Windows::fetch(const EntryPtr& entry) {
  const Ahead came = entry->fetch_ahead();
  if (came == Ahead::kFetches) {
    notice(entry->away()->sent_by(), entry->nbytes(), false);
  }
  return came;
}

void Windows::bring(const std::vector<EntryPtr>& entries) {
  for (const EntryPtr& entry : entries) {
    if (fetch(entry) == Ahead::kNoMemory) {
      return;
    }
  }
}

bool Windows::on_stream(const c10::Stream& stream) {
  const bool is_it = is_current ? is_current(stream) : current_stream(stream.device()) == stream;
  return is_it && !captures_graph(stream);
}

void Windows::notice(const AnyLanePtr& lane, int64_t nbytes, bool encoded) {
  const auto* const streams = dynamic_cast<const StreamCodecLane*>(lane.get());
  if (streams != nullptr) {
    durations.submitted(encoded ? streams->encode_stream() : streams->decode_stream(), nbytes,
                        encoded);
  }
}

}  // namespace memswap
