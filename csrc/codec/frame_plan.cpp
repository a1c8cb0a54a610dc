#include "frame_plan.h"

#include <stdexcept>

namespace memswap {
namespace {

bool known(int64_t dtype, int64_t shape) {
  return dtype >= 1 && dtype <= frame::kLastDtype && shape >= 0 && shape <= frame::kLastShape &&
         frame::shape_fits(static_cast<frame::Dtype>(dtype), static_cast<frame::Shape>(shape));
}

std::string unknown(int64_t dtype, int64_t shape) {
  return "no frame has dtype " + std::to_string(dtype) + " and layout " + std::to_string(shape) +
         " (docs/format.md sections 2 and 3)";
}

}  // namespace

std::optional<FramePlan> plan_frame(const FrameOptions& options, const void* bytes, size_t nbytes,
                                    std::string& refusal) {
  const uint8_t code = options.shape.value_or(static_cast<uint8_t>(frame::Shape::kRaw));
  if (!known(options.dtype, code)) {
    refusal = unknown(options.dtype, code);
    return std::nullopt;
  }
  if (!options.shape && options.var_capacity) {
    throw std::invalid_argument(
        "plan_frame: how much room a frame needs follows from its layout, found a capacity of " +
        std::to_string(*options.var_capacity) + " units without a layout");
  }
  const auto dtype = static_cast<frame::Dtype>(options.dtype);
  const auto shape = static_cast<frame::Shape>(code);
  const size_t width = frame::width_of(dtype);
  if (nbytes % width != 0 || reinterpret_cast<uintptr_t>(bytes) % width != 0) {
    refusal = std::to_string(nbytes) + " bytes of storage are no aligned array of elements of " +
              std::to_string(width) + " bytes";
    return std::nullopt;
  }
  if (nbytes / width > frame::kMaxElements) {
    refusal = "more elements than a frame holds: " + std::to_string(nbytes / width);
    return std::nullopt;
  }
  const frame::Layout layout = frame::layout_of(dtype, shape, nbytes / width);
  const uint64_t most = layout.max_var_units();
  const uint64_t capacity = std::min(options.var_capacity.value_or(most), most);
  if (most > frame::kMaxBaseUnits) {
    refusal = "payloads longer than a frame addresses: " + std::to_string(most) + " units";
    return std::nullopt;
  }
  return FramePlan{.dtype = dtype, .shape = shape, .layout = layout, .var_capacity = capacity};
}

frame::Layout checked_layout(int64_t dtype, int64_t shape, uint64_t elements) {
  if (!known(dtype, shape)) {
    throw std::invalid_argument(unknown(dtype, shape));
  }
  if (elements > frame::kMaxElements) {
    throw std::invalid_argument("a frame holds at most 2**41 elements, found " +
                                std::to_string(elements));
  }
  return frame::layout_of(static_cast<frame::Dtype>(dtype), static_cast<frame::Shape>(shape),
                          elements);
}

memswap_encode_job encode_job(const FramePlan& plan, const FrameOptions& options) {
  memswap_encode_job job{};
  job.elements = plan.layout.elements;
  job.dtype = options.dtype;
  job.shape = static_cast<uint8_t>(plan.shape);
  job.profile = options.profile;
  job.center = options.center;
  job.var_capacity = plan.var_capacity;
  return job;
}

std::string describe_status(uint32_t status) {
  std::string words;
  const auto add = [&](uint32_t bit, const char* said) {
    if (status & bit) {
      words += (words.empty() ? "" : "; ") + std::string(said);
    }
  };
  add(frame::kNoRoom, "it ended before its encoder did");
  add(frame::kBadHeader, "its header contradicts itself, its length or what was expected");
  add(frame::kBadRecord, "a record names an impossible mode, size or position");
  add(frame::kBadPayload, "a payload's length is not what its symbols say");
  add(frame::kBadChecksum, "the bytes are not the ones that were encoded (checksum)");
  return words.empty() ? "nothing is wrong with it" : words;
}

}  // namespace memswap
