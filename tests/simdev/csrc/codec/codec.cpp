#include "codec.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../runtime/launch.h"
#include "memswap/frame.h"

namespace simdev {
namespace {

namespace frame = memswap::frame;

constexpr int kLaunchFailed = 1;

std::atomic<const memswap_codec*> host_codec{nullptr};

// Cursors of overflow memory, by where that begins. A decode is not told.
class Cursors {
 public:
  void remember(const void* overflow, const uint64_t* cursor) {
    const std::lock_guard lock(mutex_);
    known_[overflow] = cursor;
  }
  const uint64_t* of(const void* overflow) {
    const std::lock_guard lock(mutex_);
    return known_.at(overflow);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, const uint64_t*> known_;
};
Cursors cursors;

// What one encode or decode touches. A bump of the cursor commutes with every other, so it counts
// as a read: only who sets the cursor back is not to overlap with it. Encodes write payloads, and
// decodes read them, at places that nobody knows now, for as long as the cursor is not set back:
// they count as reads of that. Whoever gives the memory to others overlaps with a read of its first
// bytes.
class Spans {
 public:
  void read(const void* begin, size_t bytes) { add(begin, bytes, 0); }
  void write(const void* begin, size_t bytes) { add(begin, bytes, 1); }
  const std::vector<simdev_span>& all() const { return spans_; }

 private:
  void add(const void* begin, size_t bytes, int write) {
    if (bytes > 0) spans_.push_back({begin, bytes, write});
  }
  std::vector<simdev_span> spans_;
};

size_t raw_bytes(uint8_t dtype, uint64_t elements) {
  return elements * frame::width_of(static_cast<frame::Dtype>(dtype));
}

Spans spans_of(const memswap_encode_job& job) {
  Spans spans;
  spans.read(job.input, raw_bytes(job.dtype, job.elements));
  const auto sections = frame::sections_of(static_cast<frame::Dtype>(job.dtype),
                                           static_cast<frame::Layout>(job.layout), job.elements);
  spans.write(job.frame, sections.bytes(job.var_capacity));
  if (job.overflow) {
    spans.read(job.overflow_cursor, sizeof(uint64_t));
    spans.read(job.overflow, sizeof(uint64_t));
    cursors.remember(job.overflow, job.overflow_cursor);
  }
  if (job.report) spans.write(job.report, frame::kHeaderBytes);
  return spans;
}

Spans spans_of(const memswap_decode_job& job) {
  Spans spans;
  spans.read(job.frame, job.frame_bytes);
  if (job.overflow) {
    spans.read(cursors.of(job.overflow), sizeof(uint64_t));
    spans.read(job.overflow, sizeof(uint64_t));
  }
  spans.write(job.output, raw_bytes(job.dtype, job.elements));
  return spans;
}

template <class Job>
int enqueue(const char* name, const Job& job, void* stream, void (*run)(void*)) {
  const Spans spans = spans_of(job);
  auto context = std::make_unique<Job>(job);
  return simdev_launch(
             stream, name, spans.all().data(), spans.all().size(), run,
             [](void* done) { delete static_cast<Job*>(done); }, context.release())
             ? kLaunchFailed
             : MEMSWAP_CODEC_OK;
}

int encode(const memswap_encode_job* job, const memswap_launch* launch) {
  return enqueue("memswap::encode", *job, launch->stream, [](void* context) {
    const memswap_launch here{};
    const auto* there = static_cast<const memswap_encode_job*>(context);
    host_codec.load()->encode(there, &here);
    if (there->report) std::memcpy(there->report, there->frame, frame::kHeaderBytes);
  });
}

int decode(const memswap_decode_job* job, const memswap_launch* launch) {
  return enqueue("memswap::decode", *job, launch->stream, [](void* context) {
    const memswap_launch here{};
    host_codec.load()->decode(static_cast<memswap_decode_job*>(context), &here);
  });
}

const char* message(int code) {
  return code == kLaunchFailed ? simdev_last_error() : host_codec.load()->message(code);
}

}  // namespace

const memswap_codec* codec_on_streams(const memswap_codec* host) {
  static const memswap_codec table{
      MEMSWAP_CODEC_VERSION, "simulated", &encode, &decode, &message, 1, 0, 0, 0, 1};
  const memswap_codec* none = nullptr;
  host_codec.compare_exchange_strong(none, host);
  return &table;
}

}  // namespace simdev
