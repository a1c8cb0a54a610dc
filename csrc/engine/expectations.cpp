#include "expectations.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "codec/backends.h"
#include "codec/dtypes.h"
#include "codec/self_check.h"
#include "work/without_gil.h"

namespace memswap {

namespace {

using frame::Dtype;
using frame::Layout;

// How much a tensor's frame gets longer or shorter, relative to the last one, before its layout is
// chosen anew from a sample.
constexpr double kChanged = 0.05;

// Capacity of the first dense frame, bits per element: escapes of N(0, 1) take half of it.
constexpr double kFirstBits = 1.5;

// What a bitmap takes that is not packed, bits per element. Of a mask that is not random it is far
// less, as the second frame knows.
constexpr double kBitmapBits = 1.0;

// Share of zeros from which on they are left out, and below which that ends again.
constexpr double kSparseFrom = 0.20, kSparseUntil = 0.12;

// Share of blocks that must be in mode LQ2 for one centre to serve the whole tensor, and what the
// frame may be longer by with it.
constexpr double kOneCenterFrom = 0.90, kOneCenterCost = 1.01;

constexpr double kNeverShrinks = std::numeric_limits<double>::infinity();
constexpr double kUnitBits = 8.0 * frame::kUnitBytes;

// Bits per element of the slab of a dense frame (docs/format.md section 2: R and L0).
double slab_bits(Dtype dtype) {
  const frame::Split split = frame::split_of(dtype);
  return 8.0 * split.byte_planes + split.rest_bits + 2;
}

// Bits of var per element for a frame of a layout that was not seen yet.
double first_bits(Dtype dtype, Layout layout) {
  if (layout == Layout::kInts) {
    return 4.0 * frame::width_of(dtype);  // half of it
  }
  return layout == Layout::kBits ? kBitmapBits : kFirstBits;
}

uint64_t elements_of(const TensorKey& key, Dtype dtype) {
  return static_cast<uint64_t>(key.nbytes) / frame::width_of(dtype);
}

frame::Sections sections_for(const TensorKey& key, Dtype dtype, Layout layout) {
  return checked_sections(static_cast<int64_t>(dtype), static_cast<int64_t>(layout),
                          elements_of(key, dtype));
}

// The same place, of no size.
TensorKey place_of(const TensorKey& key) { return {key.unit, key.ordinal, 0, key.dtype}; }

Expectation declined(const TensorKey& key, Dtype dtype, Layout layout) {
  return {.key = key,
          .options = {.dtype = static_cast<uint8_t>(dtype),
                      .layout = static_cast<uint8_t>(layout),
                      .var_capacity = 0}};
}

}  // namespace

frame::Layout first_layout(Dtype dtype) {
  if (frame::is_float(dtype)) {
    return Layout::kDense;
  }
  return dtype == Dtype::kBool ? Layout::kBits : Layout::kInts;
}

FrameFacts::FrameFacts(const FrameReport& report)
    : frame_nbytes(static_cast<int64_t>(report.frame_nbytes())),
      elements(report.header.elements),
      blocks(report.header.blocks),
      var_used(report.header.var_used),
      overflow_used(report.header.overflow_used),
      zeros(report.header.zeros),
      center_sum(report.header.center_sum),
      lq2_blocks(report.header.mode_count[frame::kLq2 - 1]),
      fw2_blocks(report.header.mode_count[frame::kFw2 - 1]),
      status(report.header.status),
      layout(report.header.layout) {}

size_t Expectations::Hash::operator()(const TensorKey& key) const {
  size_t hash = std::hash<std::string>()(key.unit);
  for (const int64_t part : {key.ordinal, key.nbytes, static_cast<int64_t>(key.dtype)}) {
    hash = hash * 1099511628211u ^ std::hash<int64_t>()(part);
  }
  return hash;
}

Expectations::Expectations(Device device, ExpectationLimits limits)
    : device_(std::move(device)),
      limits_(limits),
      known_(limits.most_keys),
      alike_(limits.most_keys) {}

ExpectationsPtr Expectations::of_device(c10::Device device, ExpectationLimits limits) {
  const memswap_codec* const codec = codec_of(device.type());
  Device known{.worst_case = device.is_cpu(), .spare_tiles = codec ? codec->spare_tiles : 0};
  known.fault = [device](uint8_t dtype, uint8_t layout) {
    return codec_fault(device, dtype, layout);
  };
  return std::make_shared<Expectations>(std::move(known), limits);
}

void Expectations::begin_iteration() {
  const Lock lock(mutex_);
  const auto share =
      static_cast<int64_t>(static_cast<double>(iteration_bytes_) * limits_.trial_share);
  trial_bytes_ = std::min(trial_bytes_ + share, iteration_bytes_);
  iteration_bytes_ = 0;
}

size_t Expectations::size() {
  const Lock lock(mutex_);
  return known_.size();
}

// The device may have to be waited for, and nobody else waits for that.
std::string Expectations::fault_of(Lock& lock, Dtype dtype, Layout layout) {
  if (!device_.fault || trusted_.contains({dtype, layout})) {
    return {};
  }
  lock.unlock();
  std::string fault;
  {
    const WithoutGil without_gil;
    fault = device_.fault(static_cast<uint8_t>(dtype), static_cast<uint8_t>(layout));
  }
  lock.lock();
  if (fault.empty()) {
    trusted_.emplace(dtype, layout);
  }
  return fault;
}

Expectations::Known& Expectations::remember(const TensorKey& key, Dtype dtype) {
  const TensorKey* const other = alike_.find(place_of(key));
  const Known* const alike = other == nullptr ? nullptr : known_.find(*other);
  Known made;
  if (alike != nullptr && alike->share != kNeverShrinks) {
    made = *alike;
    made.sample = true;
    made.encodes = made.rests = 0;
  } else {
    made.layout = first_layout(dtype);
    made.bits = first_bits(dtype, made.layout);
    const auto fixed = static_cast<double>(sections_for(key, dtype, made.layout).var);
    if (fixed > limits_.worth * static_cast<double>(key.nbytes) ||
        key.nbytes % frame::width_of(dtype) != 0) {
      made.share = kNeverShrinks;  // too few elements, or bytes that are no elements: for good
    }
  }
  alike_.put(place_of(key), key);
  return known_.put(key, made);
}

Expectation Expectations::of(const TensorKey& key, std::optional<int64_t> most_bytes) {
  const Dtype dtype = frame_dtype(key.dtype);
  Lock lock(mutex_);
  Known* const found = known_.refresh(key);
  Known& known = found != nullptr ? *found : remember(key, dtype);
  if (known.share && *known.share > limits_.worth) {
    ++known.rests;
    if (known.rests < limits_.retry_after || *known.share == kNeverShrinks) {
      return declined(key, dtype, known.layout);
    }
    known.rests = 0;
  }
  if (std::string fault = fault_of(lock, dtype, known.layout); !fault.empty()) {
    Expectation refused = declined(key, dtype, known.layout);
    refused.fault = std::move(fault);
    return refused;
  }
  ++known.encodes;
  iteration_bytes_ += key.nbytes;
  if (device_.worst_case) {
    const bool sampled = known.sample || known.encodes % limits_.retry_after == 0;
    Expectation worst{.key = key, .pays = true};
    worst.options.dtype = static_cast<uint8_t>(dtype);
    worst.options.layout =
        sampled ? std::nullopt : std::optional(static_cast<uint8_t>(known.layout));
    return worst;
  }
  if (const std::optional<Layout> other = worth_trying(lock, key, dtype)) {
    Expectation tried = expected(key, dtype, *other, first_bits(dtype, *other), most_bytes);
    if (tried.pays) {
      tried.trial = true;
      return tried;
    }
  }
  Expectation made = expected(key, dtype, known.layout, known.bits, most_bytes);
  // A centre that was given says nothing about the one that would fit: ask now and then.
  if (known.one_center && known.encodes % limits_.retry_after != 0) {
    made.options.profile = MEMSWAP_FAST;
    made.options.center = known.center;
  }
  return made;
}

std::optional<FrameSizes> Expectations::sizes(const TensorKey& key) {
  const Lock lock(mutex_);
  const Known* known = known_.find(key);
  if (known == nullptr) {
    const TensorKey* const other = alike_.find(place_of(key));
    known = other == nullptr ? nullptr : known_.find(*other);
  }
  if (known == nullptr || !known->share || *known->share == kNeverShrinks) {
    return std::nullopt;
  }
  const auto used =
      static_cast<int64_t>(std::ceil(*known->share * static_cast<double>(key.nbytes)));
  if (device_.worst_case) {
    return FrameSizes{used, used, 0};
  }
  const Dtype dtype = frame_dtype(key.dtype);
  const frame::Sections sections = sections_for(key, dtype, known->layout);
  const uint64_t units = capacity(sections, elements_of(key, dtype), known->bits);
  return FrameSizes{used, static_cast<int64_t>(sections.bytes(units)),
                    static_cast<int64_t>(most_overflow(sections, units, device_.spare_tiles) *
                                         frame::kUnitBytes)};
}

Expectation Expectations::settled(const Expectation& trial) {
  const Lock lock(mutex_);
  const auto dtype = static_cast<Dtype>(trial.options.dtype);
  const Known* const found = known_.find(trial.key);
  const Known& known = found != nullptr ? *found : remember(trial.key, dtype);
  return expected(trial.key, dtype, known.layout, known.bits, trial.most_bytes);
}

void Expectations::learn(const Expectation& expectation, const FrameFacts& facts) {
  Lock lock(mutex_);
  Known* const found = known_.find(expectation.key);
  if (found == nullptr || facts.elements == 0 || facts.status != 0) {
    return;
  }
  Known& known = *found;
  const double share =
      static_cast<double>(facts.frame_nbytes) / static_cast<double>(expectation.key.nbytes);
  if (device_.worst_case) {
    const double seen = known.share && *known.share != kNeverShrinks ? *known.share : share;
    // What a sample has just chosen is not chosen anew.
    known.sample =
        expectation.options.layout.has_value() && std::abs(share - seen) > kChanged * seen;
    known.layout = static_cast<Layout>(facts.layout);
    known.share = share;
    return;
  }
  const Layout layout =
      expectation.options.layout ? static_cast<Layout>(*expectation.options.layout) : known.layout;
  if (expectation.trial && known.share && share > limits_.worth * *known.share) {
    return;  // the other layout was no better
  }
  if (layout != known.layout) {
    known.one_center = false;
  }
  const auto elements = static_cast<double>(facts.elements);
  const auto blocks = static_cast<double>(facts.blocks);
  known.layout = layout;
  known.share = share;
  known.bits = static_cast<double>(facts.var_used + facts.overflow_used) * kUnitBits / elements;
  const bool dense = layout == Layout::kDense;
  if (expectation.options.profile == MEMSWAP_CANONICAL) {
    const auto in_lq2 = static_cast<double>(facts.lq2_blocks);
    known.canonical = share;
    known.one_center = dense && in_lq2 >= kOneCenterFrom * blocks;
    known.flat = dense && facts.fw2_blocks == facts.blocks;
    if (facts.lq2_blocks != 0) {
      const double center = std::nearbyint(static_cast<double>(facts.center_sum) / blocks);
      known.center = static_cast<uint8_t>(static_cast<uint64_t>(center) % 256);
    }
  } else if (share > kOneCenterCost * known.canonical) {
    known.one_center = false;
  }
  const double zeros = static_cast<double>(facts.zeros) / elements;
  if (dense && zeros > kSparseFrom) {
    // Everything stands in var: the bitmap, and all of what is not zero.
    const auto dtype = static_cast<Dtype>(expectation.options.dtype);
    if (fault_of(lock, dtype, Layout::kSparse).empty()) {
      const double survivor_bits = slab_bits(dtype) + kFirstBits;
      turn(known, Layout::kSparse, kBitmapBits + (1 - zeros) * survivor_bits);
    }
  } else if (layout == Layout::kSparse && zeros < kSparseUntil) {
    turn(known, Layout::kDense, kFirstBits);
  }
}

// The next frame has another layout. Of that one nothing has been seen yet.
void Expectations::turn(Known& known, Layout layout, double bits) const {
  known.layout = layout;
  known.bits = bits;
  known.one_center = known.flat = false;
  // It is tried, whatever this one was like.
  known.share = std::min(known.share.value_or(1.0), limits_.worth);
}

// Another layout that statistics of the present one cannot speak about, now and then.
std::optional<frame::Layout> Expectations::worth_trying(Lock& lock, const TensorKey& key,
                                                        Dtype dtype) {
  Known& known = *known_.find(key);
  if (!known.share || known.layout != Layout::kDense || known.encodes % limits_.retry_after != 2 ||
      (!known.flat && dtype != Dtype::kFp32)) {
    return std::nullopt;
  }
  const Layout other = known.flat ? Layout::kInts : Layout::kUpcast;
  if (!fault_of(lock, dtype, other).empty()) {
    return std::nullopt;
  }
  if (trial_bytes_ < key.nbytes) {
    --known.encodes;  // another time, in its turn
    return std::nullopt;
  }
  trial_bytes_ -= key.nbytes;
  return other;
}

Expectation Expectations::expected(const TensorKey& key, Dtype dtype, Layout layout, double bits,
                                   std::optional<int64_t> most_bytes) const {
  const frame::Sections sections = sections_for(key, dtype, layout);
  uint64_t units = capacity(sections, elements_of(key, dtype), bits);
  Expectation made{.key = key, .pays = true, .most_bytes = most_bytes};
  if (most_bytes) {
    const auto fixed = static_cast<int64_t>(sections.var);
    made.pays = fixed <= *most_bytes;
    const int64_t left = std::max<int64_t>(*most_bytes - fixed, 0);
    units = std::min(units, static_cast<uint64_t>(left) / frame::kUnitBytes);
  }
  made.options = {.dtype = static_cast<uint8_t>(dtype),
                  .layout = static_cast<uint8_t>(layout),
                  .var_capacity = units};
  return made;
}

// Units of var for so many bits per element, with a margin.
uint64_t Expectations::capacity(const frame::Sections& sections, uint64_t elements,
                                double bits) const {
  const double wanted =
      std::ceil(static_cast<double>(elements) * bits * limits_.margin / kUnitBits) +
      static_cast<double>(limits_.margin_units);
  return std::min(static_cast<uint64_t>(wanted), sections.max_var_units());
}

}  // namespace memswap
