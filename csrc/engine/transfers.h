// Transfers: what an engine sends by on one device.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "action.h"
#include "away.h"
#include "block_form.h"
#include "expectations.h"
#include "frame_form.h"
#include "lane/graph_capture.h"
#include "reasons.h"

namespace memswap {

class Entry;
class StreamCodecLane;

// How a storage is sent: as raw bytes in a block of a pool, or as a frame, on the device or in a
// pool. (A storage that becomes a recipe is not sent.)
enum class Form : uint8_t { kBlock, kFrame, kPooledFrame };

// Why a storage was not sent: the reason in the statistics, and in words for the user, where there
// is more to say: which resource has run out, or what the codec did wrong.
struct Refused {
  Reason reason;
  std::string why;
};

// Bytes that were waited for did not come, or are not what they were.
struct LostBytes : TransferError {
  using TransferError::TransferError;
};

// Senders are opened when they are first needed: a codec, or a pool of pinned memory, is not there
// for nothing. The engine's lock serialises the calls.
class Transfers {
 public:
  // What suits the device.
  struct Traits {
    Action action = Action::kSwap;          // where nobody names one
    Action without_recipe = Action::kSwap;  // of what was to be recomputed, and has no recipe
    // Bytes of the device for what does not fit frames, where no plan says how many: so many, or
    // this share of what a forward saves.
    int64_t arena_nbytes = 0;
    double arena_share = 0;
  };

  Transfers(c10::Device device, ExpectationsPtr expectations, Traits traits)
      : device(device), expectations(std::move(expectations)), traits(traits) {}
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // --- its senders ---

  void set_blocks(std::shared_ptr<BlockSender> blocks);
  // Of frames in one form.
  void set_frames(Form form, std::shared_ptr<FrameSender> frames);
  // What sets the sender of a form, where that is needed and not there. Empty: nobody does.
  void set_opens(std::function<void(Form)> opens) { opens_ = std::move(opens); }

  const std::shared_ptr<BlockSender>& blocks() {
    if (!blocks_ && opens_) {
      opens_(Form::kBlock);
    }
    return blocks_;
  }

  // nullptr: no codec serves the device.
  const std::shared_ptr<FrameSender>& frames(Form form) {
    std::optional<std::shared_ptr<FrameSender>>& sender = frames_in(form);
    if (!sender && opens_) {
      opens_(form);
    }
    if (!sender) {
      sender = nullptr;
    }
    return *sender;
  }

  // --- forwards ---

  // So many bytes are about to leave that were saved together, or the last forward saved so many.
  // `leaving_bytes` of what leaves may hold memory of the device at a time; 0: all of it. Throws
  // LostBytes, as `check_decodes`.
  void begin(int64_t leaving_bytes, int64_t nbytes);
  // Bytes of the device that a plan has for what does not fit frames; nothing: there is no plan.
  const std::optional<int64_t>& overflow_room() const { return overflow_room_; }
  void set_overflow_room(std::optional<int64_t> nbytes);
  // Bytes of the device that are taken for that now.
  int64_t arena_bytes() const;
  // Gives back what of them nothing uses, and pinned memory that was taken for the same.
  void trim_arena();
  // Throws LostBytes if a frame was not what had been encoded, as far as the host has heard of it:
  // an accelerator decodes while the host is ahead, so this is said a forward or two later. In host
  // memory each decode says so itself. `wait`: for all decodes.
  void check_decodes(bool wait);

  // How a tensor's frame is expected to be, or why there is none. `most_bytes`: that a plan has for
  // it; nothing: there is no plan.
  std::variant<Expectation, Refused> expect(Form form, const TensorKey& key,
                                            std::optional<int64_t> most_bytes = std::nullopt);

  // Starts sending a storage, a frame as it is expected to be.
  std::variant<Leaving, Refused> send(Form form, const StorageRefPtr& storage,
                                      const TensorKey& key);

  // Starts encoding a storage, a trial that there is no room for in the layout that is known.
  // Nothing: there is no room, and nothing was started. `entry`: whose storage it is, if it has
  // one.
  std::optional<Leaving> encode(Form form, const StorageRefPtr& storage, Expectation expectation,
                                std::weak_ptr<Entry> entry = {});

  // An encoder's report.
  struct Encoded {
    int64_t nbytes, frame_nbytes;  // of the storage, of its frame
    std::weak_ptr<Entry> entry;
  };
  // Takes in the next report, in the order of the encodes. Nothing: it has not come yet.
  std::optional<Encoded> take_report();
  // All that have come.
  void learn() {
    while (take_report()) {
    }
  }
  size_t awaited_reports() const { return awaited_.size(); }

  // Storages that are saved now leave later, perhaps while another stream is current.
  void meet_stream(Form form) {
    if (!works_ahead()) {
      return;
    }
    if (form != Form::kFrame) {
      blocks()->lane()->meet_stream();
    }
    if (form != Form::kBlock && frames(form)) {
      frames(form)->lane()->meet_stream();
    }
  }

  // Whether the device works while the thread that asks goes on.
  bool works_ahead() const { return !device.is_cpu(); }
  // Whether nothing may leave now, as the current stream captures a graph.
  bool captures() const { return captures_graph(device); }

  const c10::Device device;
  const ExpectationsPtr expectations;
  const Traits traits;

 private:
  // An encode whose report has not been taken in.
  struct Awaited {
    Expectation expectation;
    std::shared_ptr<FrameWatch> watch;
    std::weak_ptr<Entry> entry;
  };

  // Forwards before which an accelerator's arena gives back what a plan needs no more: the first
  // ones encode what will have a recipe, or stay under a plan.
  static constexpr std::array<int64_t, 2> kTrimAt{5, 10};

  std::optional<std::shared_ptr<FrameSender>>& frames_in(Form form) {
    return form == Form::kFrame ? frames_ : pooled_frames_;
  }
  StreamCodecLane* streams() const;  // of frames; nullptr: there are none
  void bound(AnyLane* lane) const;
  void set_room() const;

  std::function<void(Form)> opens_;
  std::shared_ptr<BlockSender> blocks_;
  std::optional<std::shared_ptr<FrameSender>> frames_, pooled_frames_;  // nothing: not opened yet
  std::deque<Awaited> awaited_;
  std::optional<int64_t> leaving_bytes_;  // nothing: no forward has begun
  std::optional<int64_t> overflow_room_;
  int64_t forward_nbytes_ = 0;  // that the last one saved
  int64_t forwards_ = 0;
};
using TransfersPtr = std::shared_ptr<Transfers>;

// How a storage is sent: by what, as what, and which tensor's it is.
struct LeaveOrder {
  TransfersPtr transfers;
  Form form = Form::kBlock;
  TensorKey key;
};

}  // namespace memswap
