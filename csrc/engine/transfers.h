// Transfers: what an engine sends by on one device.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <deque>
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

// How a storage is sent: as raw bytes in a block of a pool, or as a frame, on the device or in a
// pool. (A storage that becomes a recipe is not sent.)
enum class Form : uint8_t { kBlock, kFrame, kPooledFrame };

// Why a storage was not sent: the reason in the statistics, and in words for the user, where there
// is more to say: which resource has run out, or what the codec did wrong.
struct Refused {
  Reason reason;
  std::string why;
};

// Senders are opened when they are first needed: a codec, or a pool of pinned memory, is not there
// for nothing. The engine's lock serialises the calls.
class Transfers {
 public:
  // Opens the senders of one device.
  class Opener {
   public:
    Opener() = default;
    Opener(const Opener&) = delete;
    Opener& operator=(const Opener&) = delete;
    virtual ~Opener() = default;

    virtual std::shared_ptr<BlockSender> open_blocks() = 0;
    // nullptr: no codec serves the device.
    virtual std::shared_ptr<FrameSender> open_frames(Form form) = 0;
    // So many bytes are about to leave that were saved together, and `leaving_bytes` of them may
    // hold memory of the device at a time; 0: all of them.
    virtual void begin(int64_t leaving_bytes, int64_t nbytes) = 0;
  };

  // What suits the device.
  struct Traits {
    Action action = Action::kSwap;          // where nobody names one
    Action without_recipe = Action::kSwap;  // of what was to be recomputed, and has no recipe
  };

  Transfers(c10::Device device, ExpectationsPtr expectations, std::unique_ptr<Opener> opener,
            Traits traits)
      : device(device),
        expectations(std::move(expectations)),
        traits(traits),
        opener_(std::move(opener)) {}
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  const std::shared_ptr<BlockSender>& blocks() {
    if (!blocks_) {
      blocks_ = opener_->open_blocks();
    }
    return blocks_;
  }

  // nullptr: no codec serves the device.
  const std::shared_ptr<FrameSender>& frames(Form form) {
    auto& sender = form == Form::kFrame ? frames_ : pooled_frames_;
    if (!sender) {
      sender = opener_->open_frames(form);
    }
    return *sender;
  }

  void begin(int64_t leaving_bytes, int64_t nbytes) { opener_->begin(leaving_bytes, nbytes); }

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

  const std::unique_ptr<Opener> opener_;
  std::shared_ptr<BlockSender> blocks_;
  std::optional<std::shared_ptr<FrameSender>> frames_, pooled_frames_;  // nothing: not opened yet
  std::deque<Awaited> awaited_;
};
using TransfersPtr = std::shared_ptr<Transfers>;

// How a storage is sent: by what, as what, and which tensor's it is.
struct LeaveOrder {
  TransfersPtr transfers;
  Form form = Form::kBlock;
  TensorKey key;
};

}  // namespace memswap
