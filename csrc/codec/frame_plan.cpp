#include "frame_plan.h"

#include <stdexcept>

namespace memswap {
namespace {

bool known(int64_t dtype, int64_t layout) {
  return dtype >= 1 && dtype <= frame::kLastDtype && layout >= 0 && layout <= frame::kLastLayout &&
         frame::layout_fits(static_cast<frame::Dtype>(dtype), static_cast<frame::Layout>(layout));
}

std::string unknown(int64_t dtype, int64_t layout) {
  return "no frame has dtype " + std::to_string(dtype) + " and layout " + std::to_string(layout) +
         " (docs/format.md sections 2 and 3)";
}

}  // namespace

std::optional<FramePlan> plan_frame(const FrameOptions& options, const void* bytes, size_t nbytes,
                                    std::string& refusal) {
  const uint8_t code = options.layout.value_or(static_cast<uint8_t>(frame::Layout::kRaw));
  if (!known(options.dtype, code)) {
    refusal = unknown(options.dtype, code);
    return std::nullopt;
  }
  if (!options.layout && options.var_capacity) {
    throw std::invalid_argument(
        "plan_frame: how much room a frame needs follows from its layout, found a capacity of " +
        std::to_string(*options.var_capacity) + " units without a layout");
  }
  const auto dtype = static_cast<frame::Dtype>(options.dtype);
  const auto layout = static_cast<frame::Layout>(code);
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
  const frame::Sections sections = frame::sections_of(dtype, layout, nbytes / width);
  const uint64_t most = sections.max_var_units();
  const uint64_t capacity = std::min(options.var_capacity.value_or(most), most);
  if (most > frame::kMaxBaseUnits) {
    refusal = "payloads longer than a frame addresses: " + std::to_string(most) + " units";
    return std::nullopt;
  }
  return FramePlan{
      .dtype = dtype, .layout = layout, .sections = sections, .var_capacity = capacity};
}

frame::Sections checked_sections(int64_t dtype, int64_t layout, uint64_t elements) {
  if (!known(dtype, layout)) {
    throw std::invalid_argument(unknown(dtype, layout));
  }
  if (elements > frame::kMaxElements) {
    throw std::invalid_argument("a frame holds at most 2**41 elements, found " +
                                std::to_string(elements));
  }
  return frame::sections_of(static_cast<frame::Dtype>(dtype), static_cast<frame::Layout>(layout),
                            elements);
}

memswap_encode_job encode_job(const FramePlan& plan, const FrameOptions& options) {
  memswap_encode_job job{};
  job.elements = plan.sections.elements;
  job.dtype = options.dtype;
  job.layout = static_cast<uint8_t>(plan.layout);
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
