// The machine itself, and the part of the driver API that is about streams and events.
#include "machine.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

namespace simdev {
namespace {

constexpr size_t kDefaultCapacityBytes = size_t{1} << 30;
constexpr double kQueryUs = 1;  // host time of one poll: a polling loop must not be free of charge
std::atomic<bool> forked{false};

}  // namespace

Machine::Machine() {
  for (DeviceMemory& device : devices) device.stats.capacity = kDefaultCapacityBytes;
}

// Never destroyed: tensors may be freed by static destructors that run after ours would. Only the
// workers are stopped at exit, since a task may be a Python kernel.
Machine& Machine::get() {
  static Machine* machine = [] {
    auto* m = new Machine();
    m->scheduler.start();
    std::atexit([] { get().scheduler.stop(); });
    // Workers do not survive a fork; a consistent mutex and a clear error do.
    pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                   [] {
                     forked = true;
                     get().mutex.unlock();
                   });
    return m;
  }();
  return *machine;
}

bool in_forked_child() { return forked; }

DeviceMemory& Machine::device(int index) {
  if (index < 0 || index >= kDevices) throw Error("sim: no device " + std::to_string(index));
  return devices[static_cast<size_t>(index)];
}

RecordingPtr Machine::record(Stream& stream) {
  stream.clock.join(host_clock);
  auto recording = std::make_shared<Recording>();
  recording->stream = stream.id;
  recording->sequence = stream.issued;
  recording->clock = stream.clock;
  recording->virtual_us = std::max(stream.virtual_us, time.host_us());
  return recording;
}

void Machine::wait(Stream& stream, const RecordingPtr& recording) {
  if (recording->stream == stream.id) return;
  stream.clock.join(recording->clock);
  stream.virtual_us = std::max(stream.virtual_us, recording->virtual_us);
  if (!scheduler.complete(*recording)) scheduler.push(stream, "wait", recording, nullptr);
}

void Machine::synchronize(Scheduler::Lock& lock, const RecordingPtr& recording) {
  scheduler.finish(lock, scheduler.stream(recording->stream), recording->sequence);
  host_clock.join(recording->clock);
  time.host_reaches(recording->virtual_us);
}

void Machine::synchronize_device(Scheduler::Lock& lock, int device) {
  std::array<RecordingPtr, kStreamsPerDevice> tails;
  for (int i = 0; i < kStreamsPerDevice; ++i)
    tails[static_cast<size_t>(i)] = record(scheduler.stream({device, i}));
  for (const auto& tail : tails) synchronize(lock, tail);
}

// ---------------------------------------------------------------- driver API
const char* intern(const std::string& name) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.names.insert(name).first->c_str();
}

void set_policy(Policy policy, uint64_t seed) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  for (int device = 0; device < kDevices; ++device) machine.synchronize_device(lock, device);
  machine.scheduler.set_policy(policy, seed);
  machine.scheduler.rethrow_task_error();
}

void set_check(Check check) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.detector.set_mode(check);
}

std::vector<std::string> take_reports() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.detector.take_reports();
}

void set_stream_delay_us(StreamId stream, double delay_us) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.scheduler.stream(stream).delay_us = delay_us;
}

void set_blocking_hooks(BlockingHooks hooks) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.scheduler.set_blocking_hooks(hooks);
}

StreamId next_pool_stream(int device) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.device(device);
  int& last = machine.last_pool_stream[static_cast<size_t>(device)];
  last = last % kPoolStreams + 1;
  return {device, last};
}

void rewind_stream_pool() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.last_pool_stream.fill(0);
}

namespace {

// mm, addmm, bmm and their like, with or without the name of an overload.
bool is_matrix_product(std::string_view name) {
  name = name.substr(0, name.find('.', name.rfind(':') + 1));
  return name.ends_with("mm") || name.ends_with("::linear");
}

}  // namespace

void enqueue(StreamId id, const Launch& launch, WorkPtr work) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  if (forked) throw Error("sim: the accelerator cannot be used in a forked process");
  Stream& stream = machine.scheduler.stream(id);
  stream.clock.join(machine.host_clock);  // a launch comes after everything the host knows
  const Access access{stream.slot, stream.clock.tick(stream.slot), launch.name,
                      machine.scheduler.enqueued() + 1};
  for (const Span& span : launch.spans) {
    if (span.begin >= span.end) continue;
    Block* block = machine.blocks.find(span.begin);
    if (!block && !span.device) continue;
    if (!block || span.end > block->begin + block->bytes)
      throw Error(std::string("sim: illegal memory access: '") + launch.name + "' " +
                  (block ? "runs past the end of a block" : "touches memory that is not mapped"));
    if (!machine.detector.on()) continue;
    if (!block->live)
      machine.detector.report(std::string("sim: use after free: '") + launch.name + "' on " +
                                  name_of(stream.slot) + " touches a freed block of " +
                                  std::to_string(block->bytes) + " bytes",
                              false);
    machine.detector.access(block->accesses, block->bytes, span, access, stream.clock, false);
  }
  machine.detector.throw_deferred();
  const Engine engine = launch.engine == Engine::kCompute && is_matrix_product(launch.name)
                            ? Engine::kMatrix
                            : launch.engine;
  stream.virtual_us = machine.time.launch(id.device, engine, launch.bytes, stream.virtual_us);
  machine.scheduler.push(stream, launch.name, nullptr, std::move(work));
  machine.scheduler.after_push(lock);
}

RecordingPtr record(StreamId stream) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.record(machine.scheduler.stream(stream));
}

void wait(StreamId id, const RecordingPtr& recording) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  Stream& stream = machine.scheduler.stream(id);
  if (recording->stream == id ||
      machine.mutations.apply(Mutations::Kind::kDropWaits, id, recording->stream))
    return;
  machine.wait(stream, recording);
  machine.scheduler.after_push(lock);
}

void order_after(StreamId waiter, StreamId source) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  machine.wait(machine.scheduler.stream(waiter), machine.record(machine.scheduler.stream(source)));
  machine.scheduler.after_push(lock);
}

bool query(const RecordingPtr& recording) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  if (machine.mutations.apply(Mutations::Kind::kLyingQueries, recording->stream)) return true;
  machine.time.host_spends(kQueryUs);
  if (!machine.scheduler.poll(lock, *recording)) return false;
  if (!machine.time.model.queries_wait && recording->virtual_us > machine.time.host_us()) {
    return false;  // it has run, but the host asks too early
  }
  machine.host_clock.join(recording->clock);
  machine.time.host_reaches(recording->virtual_us);
  return true;
}

void synchronize(const RecordingPtr& recording) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  ++machine.counters.host_syncs;
  if (machine.mutations.apply(Mutations::Kind::kDropSynchronizes, recording->stream)) return;
  machine.synchronize(lock, recording);
  machine.scheduler.rethrow_task_error();
}

bool query_stream(StreamId stream) { return query(record(stream)); }

void synchronize_stream(StreamId stream) { synchronize(record(stream)); }

void synchronize_device(int device) {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  machine.device(device);
  ++machine.counters.host_syncs;
  machine.synchronize_device(lock, device);
  machine.scheduler.rethrow_task_error();
}

std::optional<std::string> quiesce() noexcept {
  Machine& machine = Machine::get();
  Scheduler::Lock lock(machine.mutex);
  try {
    for (int device = 0; device < kDevices; ++device) machine.synchronize_device(lock, device);
    machine.scheduler.rethrow_task_error();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "a task failed with an exception that is no std::exception";
  }
  return std::nullopt;
}

Counters counters() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  Counters result = machine.counters;
  result.enqueued = machine.scheduler.enqueued();
  result.executed = machine.scheduler.executed();
  return result;
}

void reset_counters() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.counters = {};
}

void set_cost_model(const CostModel& model) {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.time.model = model;
}

double host_virtual_us() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  return machine.time.host_us();
}

void reset_virtual_time() {
  Machine& machine = Machine::get();
  std::lock_guard lock(machine.mutex);
  machine.time.reset();
  for (Stream& stream : machine.scheduler.streams()) stream.virtual_us = 0;
}

}  // namespace simdev
