// The simulated accelerator's driver API. No torch headers: the runtime is tested on its own, under
// the sanitizers, and everything torch needs is built on the functions below.
//
// [Note: one lock]
// Every function takes the machine's one mutex, so that a schedule is a sequence of decisions and
// not a race of our own. The mutex is never held while a task runs, nor while Python's GIL is being
// acquired (see set_blocking_hooks).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "clock.h"

namespace simdev {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct OutOfMemory : Error {
  using Error::Error;
};
struct PinFailure : Error {
  using Error::Error;
};

// ---------------------------------------------------------------- schedules
enum class Policy {
  kEager,      // program order; the host waits for each task
  kLazy,       // runs only what a host synchronisation needs
  kSideFirst,  // pool streams run at once, default streams as late as possible
  kMainFirst,  // the reverse
  kRandom,     // seeded choices; same seed, same execution
  kFree,       // worker threads run concurrently with the host and with each other
};
enum class Check { kOff, kCollect, kThrow };

void set_policy(Policy policy, uint64_t seed);  // synchronises every device first
void set_check(Check check);
std::vector<std::string> take_reports();
// kFree only: each later task of the stream starts no earlier than this after its launch.
void set_stream_delay_us(StreamId stream, double delay_us);

// `enter` is called just before a host thread blocks and may give up what an executing task could
// need (Python's GIL); `leave` gets what `enter` returned, with no lock of the runtime held.
struct BlockingHooks {
  void* (*enter)() = nullptr;
  void (*leave)(void* token) = nullptr;
};
void set_blocking_hooks(BlockingHooks hooks);

// ---------------------------------------------------------------- streams and events
class Work {
 public:
  virtual ~Work() = default;
  virtual void run() = 0;
};
using WorkPtr = std::unique_ptr<Work>;

template <class Function>
WorkPtr make_work(Function function) {
  struct FunctionWork final : Work {
    explicit FunctionWork(Function f) : function(std::move(f)) {}
    void run() override { function(); }
    Function function;
  };
  return std::make_unique<FunctionWork>(std::move(function));
}

// Bytes that a task reads or writes. Ranges of memory that the machine does not know (pageable host
// memory) are ignored unless `device` says that the machine must know them.
struct Span {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool write = false;
  bool device = false;
};
enum class Engine { kCompute, kHostToDevice, kDeviceToHost, kMatrix };

struct Launch {
  const char* name = "";  // must outlive the process: a literal, or intern()ed
  std::vector<Span> spans;
  Engine engine = Engine::kCompute;
  double bytes = 0;  // traffic, for the virtual time
};
const char* intern(const std::string& name);

StreamId next_pool_stream(int device);
void rewind_stream_pool();  // the next pool stream of every device is number 1 again
void enqueue(StreamId stream, const Launch& launch, WorkPtr work);
RecordingPtr record(StreamId stream);
void wait(StreamId stream, const RecordingPtr& recording);
// Waits for all that `source` holds now, out of reach of mutations: what a peer copy does
// internally.
void order_after(StreamId waiter, StreamId source);
bool query(const RecordingPtr& recording);
void synchronize(const RecordingPtr& recording);
bool query_stream(StreamId stream);
void synchronize_stream(StreamId stream);
void synchronize_device(int device);
// For a test's end: finishes everything, returns the first task's error, counts no synchronisation.
std::optional<std::string> quiesce() noexcept;
bool in_forked_child();

// ---------------------------------------------------------------- memory
// Allocates in stream order. Throws OutOfMemory after the cache was flushed in vain.
void* device_allocate(StreamId stream, size_t bytes);
void device_free(void* pointer) noexcept;
void record_stream(const void* pointer, StreamId stream);
void empty_cache(int device);
int device_of(const void* pointer);  // -1 where it is no device memory

void* pinned_allocate(size_t bytes);  // throws PinFailure
void pinned_free(void* pointer) noexcept;
bool pinned_record(const void* begin, StreamId stream);  // false: no block begins there
void pinned_empty_cache();
bool is_pinned(const void* pointer);
// Tells the detector of a direct access by the host; it cannot see one by itself.
void host_access(const void* pointer, size_t bytes, bool write, const char* name);

void set_capacity(int device, size_t bytes);
struct MemoryStats {
  size_t allocated = 0, peak = 0, reserved = 0, capacity = 0, deferred = 0;
  size_t requests = 0, frees = 0, out_of_memory = 0;
  size_t recorded = 0;  // calls of record_stream, those for the owner included
};
MemoryStats memory_stats(int device);
void reset_peak(int device);
struct PinnedStats {
  size_t allocated = 0, peak = 0, reserved = 0, deferred = 0, requests = 0;
};
PinnedStats pinned_stats();
struct LiveBlock {
  size_t bytes;
  uint64_t serial;  // the machine-wide number of the allocation
  bool pinned;
  StreamId stream;
};
std::vector<LiveBlock> live_blocks(uint64_t after_serial);
uint64_t last_serial();

// ---------------------------------------------------------------- counters
struct Counters {
  uint64_t host_syncs = 0;          // synchronize calls, blocking copies, item()
  uint64_t device_allocations = 0;  // memory taken from the driver, not from the cache
  uint64_t pinned_allocations = 0;
  uint64_t enqueued = 0;
  uint64_t executed = 0;
};
Counters counters();
void reset_counters();

// ---------------------------------------------------------------- virtual time
struct CostModel {
  double host_us = 3;  // host time of one launch
  double launch_us = 2;
  double hbm_gb_per_s = 1500;
  double h2d_gb_per_s = 25;
  double d2h_gb_per_s = 25;
  double matrix_gb_per_s = 0;  // 0: matrix products have no engine of their own
  bool queries_wait = true;    // a query of work that has run takes the host to its virtual end
  // What both directions of the link reach together, as a share of twice one alone: 0.5 to 1. A
  // copy that was launched earlier goes first; the other gets what it leaves.
  double duplex = 1;
};
void set_cost_model(const CostModel& model);
double host_virtual_us();
void reset_virtual_time();

// ---------------------------------------------------------------- mutations and faults
// Each returns an id for remove_mutation; mutation_hits counts how often it changed something.
using StreamSet = std::optional<std::vector<StreamId>>;  // nullopt: every stream
int mutate_drop_waits(StreamSet waiters, StreamSet sources);
int mutate_drop_synchronizes(StreamSet sources);
int mutate_lying_queries(StreamSet sources);
int mutate_allocate_on(StreamId tagged, StreamSet current);
int mutate_drop_record_stream();
uint64_t mutation_hits(int id);
void remove_mutation(int id);
void clear_mutations();

void fail_device_requests(int device, uint64_t skip, uint64_t count);
void fail_pinned_requests(uint64_t skip, uint64_t count);  // after `skip` good ones, `count` fail
void set_pinned_budget(
    std::optional<size_t> bytes);  // fail where live pinned bytes would exceed it

}  // namespace simdev
