// Expectations: what a tensor's frame will be like, from what it was like the last time.
//
// How much a tensor shrinks is known only after it was encoded, and nobody waits to learn it. So
// the next encode of the same tensor (same unit, same place in the scope, same size and dtype) goes
// by what the encoder reported about the last one, whenever that report arrived. A wrong
// expectation costs bytes, never an error: what does not fit a frame's capacity goes to an overflow
// that was set aside before.
//
// On a CPU a tensor that was not seen before gets the layout that a sample of its blocks chooses
// (kernels/include/memswap/sample.h), and so it does now and then, and where its frame's length has
// changed. On an accelerator nobody waits for a sample: the first frame has the layout of the
// dtype, dense for a float, and what its encoder counts decides on the layout of the next one.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "codec/frame_plan.h"
#include "latest.h"

namespace memswap {

// Which tensor it is, step after step. The same program makes the same keys.
struct TensorKey {
  bool operator==(const TensorKey&) const = default;

  std::string unit;
  int64_t ordinal = 0;  // among the storages that one scope of the unit considered
  int64_t nbytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};

// How to encode one tensor now, and whether to.
struct Expectation {
  bool operator==(const Expectation&) const = default;

  TensorKey key;
  bool pays = false;
  FrameOptions options;
  bool trial = false;                 // the layout is a guess; `settled` has the known one
  std::optional<int64_t> most_bytes;  // that a plan has for the frame; nothing: there is no plan
  std::string fault;  // why the codec must not encode it, in words for the user; empty: it may
};

// Bytes of a tensor's frame, as it was last seen.
struct FrameSizes {
  int64_t used = 0;
  int64_t held = 0;      // with the capacity that the next one gets
  int64_t overflow = 0;  // what the next one sets aside for elements unlike the last ones
};

// What matters here of what an encoder found.
struct FrameFacts {
  FrameFacts() = default;
  FrameFacts(const FrameReport& report);  // NOLINT(google-explicit-constructor): it is one

  int64_t frame_nbytes = 0;
  uint64_t elements = 0, blocks = 0;
  uint64_t var_used = 0, overflow_used = 0;  // units
  uint64_t zeros = 0, center_sum = 0;
  uint64_t lq2_blocks = 0, fw2_blocks = 0;  // of docs/format.md, section 3
  uint32_t status = 0;
  uint8_t layout = 0;
};

// What decides where nothing is known for sure.
struct ExpectationLimits {
  double worth = 0.95;  // a frame longer than this share of the raw bytes is not worth its time
  int64_t retry_after = 64;  // encodes of one tensor between two looks at what it is like by now
  double trial_share = 1.0 / 32;  // of the bytes of an iteration, those whose layout is a guess
  // Capacity beyond what was needed last time, and for small frames. Measured: over 200 steps of
  // training, what a tensor needed grew by at most 7 %.
  double margin = 1.10;
  int64_t margin_units = 16;
  size_t most_keys = 16384;  // sizes of a mixture of experts change, and each is one
};

// Of the tensors of one device. The engine's lock serialises the calls; `sizes` may be called from
// any thread at any time.
class Expectations {
 public:
  // Why the codec must not encode a dtype in a layout, or nothing. It may wait for the device where
  // it has not said nothing yet of the two.
  using Fault = std::function<std::string(uint8_t dtype, uint8_t layout)>;

  struct Device {
    bool worst_case = false;   // frames get their worst case and are cut afterwards (host memory)
    uint32_t spare_tiles = 0;  // of the codec (kernels/include/memswap/codec.h)
    Fault fault;               // empty: none
  };

  Expectations(Device device, ExpectationLimits limits);
  // Of the codec that serves a device.
  static std::shared_ptr<Expectations> of_device(c10::Device device, ExpectationLimits limits);

  // What follows belongs to a new forward.
  void begin_iteration();

  // What to do with a tensor that is about to leave. `most_bytes`: what a plan has for the frame.
  // Where its fixed part alone takes more, it does not pay. (In host memory nothing bounds a frame
  // but what is in it.) Throws std::invalid_argument for a dtype that no frame has.
  Expectation of(const TensorKey& key, std::optional<int64_t> most_bytes = std::nullopt);

  // What to do instead of a trial for which there is no room.
  Expectation settled(const Expectation& trial);

  // What the encoder found out about a frame that was made as expected.
  void learn(const Expectation& expectation, const FrameFacts& facts);

  // Bytes of a tensor's frame, present and next. Nothing: none has been seen, of any size.
  std::optional<FrameSizes> sizes(const TensorKey& key);

  // Tensors that are remembered.
  size_t size();

 private:
  // What is known of one tensor.
  struct Known {
    frame::Layout layout = frame::Layout::kRaw;
    double bits = 0;              // of var, per element
    std::optional<double> share;  // of the raw bytes that the frame took; nothing: not seen yet
    uint8_t center = 0;
    bool one_center = false;  // `center` serves all blocks
    double canonical = 0;     // share of the last canonical frame
    bool sample = true;       // a sample chooses the next frame's layout, in host memory
    bool flat = false;        // the exponents of each block lie within four: a constant?
    int64_t encodes = 0;
    int64_t rests = 0;  // times that it was not encoded, since it did not shrink
  };
  struct Hash {
    size_t operator()(const TensorKey& key) const;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::string fault_of(Lock& lock, frame::Dtype dtype, frame::Layout layout);
  Known& remember(const TensorKey& key, frame::Dtype dtype);
  std::optional<frame::Layout> worth_trying(Lock& lock, const TensorKey& key, frame::Dtype dtype);
  Expectation expected(const TensorKey& key, frame::Dtype dtype, frame::Layout layout, double bits,
                       std::optional<int64_t> most_bytes) const;
  uint64_t capacity(const frame::Sections& sections, uint64_t elements, double bits) const;
  void turn(Known& known, frame::Layout layout, double bits) const;

  const Device device_;
  const ExpectationLimits limits_;
  std::mutex mutex_;
  std::set<std::pair<frame::Dtype, frame::Layout>> trusted_;
  Latest<TensorKey, Known, Hash> known_;
  // The last tensor of any size in the same place: its statistics are per element.
  Latest<TensorKey, TensorKey, Hash> alike_;
  int64_t trial_bytes_ = 0;
  int64_t iteration_bytes_ = 0;
};
using ExpectationsPtr = std::shared_ptr<Expectations>;

// The layout for a dtype of which nothing else is known.
frame::Layout first_layout(frame::Dtype dtype);

}  // namespace memswap
