// The runtime's own tests, without torch, so that they run under the sanitizers. Exits non-zero at
// the first broken promise.
#include "runtime.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "launch.h"

namespace {

using namespace simdev;

constexpr size_t kBytes = 4096;
const char* current_test = "";

void check(bool good, const char* promise, int line) {
  if (good) return;
  std::fprintf(stderr, "%s: line %d: broken promise: %s\n", current_test, line, promise);
  std::_Exit(1);
}
#define CHECK(condition) check((condition), #condition, __LINE__)

Span range(const void* pointer, size_t bytes, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  return {begin, begin + bytes, write, false};
}
Launch launch(const char* name, std::vector<Span> spans) {
  Launch result;
  result.name = name;
  result.bytes = static_cast<double>(kBytes);
  result.spans = std::move(spans);
  return result;
}
void fill(StreamId stream, void* pointer, int value, size_t bytes = kBytes) {
  enqueue(stream, launch("fill", {range(pointer, bytes, true)}),
          make_work([=] { std::memset(pointer, value, bytes); }));
}
void copy(StreamId stream, void* to, const void* from, size_t bytes = kBytes) {
  enqueue(stream, launch("copy", {range(from, bytes, false), range(to, bytes, true)}),
          make_work([=] { std::memcpy(to, from, bytes); }));
}
bool all_equal(const void* pointer, int value, size_t bytes = kBytes) {
  const auto* p = static_cast<const unsigned char*>(pointer);
  for (size_t i = 0; i < bytes; ++i)
    if (p[i] != value) return false;
  return true;
}
void begin(Policy policy, uint64_t seed, Check mode) {
  clear_mutations();
  CHECK(!quiesce());
  for (int device = 0; device < kDevices; ++device) {
    empty_cache(device);
    set_capacity(device, size_t{1} << 30);
  }
  pinned_empty_cache();
  rewind_stream_pool();
  set_policy(policy, seed);
  set_check(mode);
  take_reports();
  reset_virtual_time();
  reset_counters();
}
bool throws_error(const std::function<void()>& function, const char* part) {
  try {
    function();
  } catch (const Error& error) {
    return std::strstr(error.what(), part) != nullptr;
  }
  return false;
}

struct Schedule {
  Policy policy;
  uint64_t seed;
};
constexpr Schedule kSchedules[] = {
    {Policy::kEager, 0},  {Policy::kLazy, 0},   {Policy::kSideFirst, 0}, {Policy::kMainFirst, 0},
    {Policy::kRandom, 1}, {Policy::kRandom, 2}, {Policy::kFree, 0}};

// ---------------------------------------------------------------- streams and events
void ordered_streams_give_the_same_bytes() {
  for (const auto& [policy, seed] : kSchedules) {
    begin(policy, seed, Check::kThrow);
    const StreamId main{0, 0}, side = next_pool_stream(0);
    void* a = device_allocate(main, kBytes);
    void* host = pinned_allocate(kBytes);
    for (int i = 0; i < 20; ++i) {
      fill(main, a, i);
      wait(side, record(main));
      copy(side, host, a);
      const auto copied = record(side);
      wait(main, copied);
      synchronize(copied);
      CHECK(all_equal(host, i));
    }
    device_free(a);
    pinned_free(host);
    CHECK(!quiesce());
    CHECK(take_reports().empty());
    CHECK(live_blocks(0).empty());
  }
}

void events_are_versioned_and_a_stream_may_wait_for_itself() {
  begin(Policy::kLazy, 0, Check::kThrow);
  const StreamId main{0, 0}, side = next_pool_stream(0);
  void* a = device_allocate(main, kBytes);
  fill(main, a, 1);
  const auto first = record(main);
  fill(main, a, 2);
  wait(main, record(main));
  wait(side, first);
  const auto behind_first = record(side);
  synchronize(behind_first);
  CHECK(all_equal(a, 1));
  CHECK(!query(record(main)));
  int polls = 0;
  while (!query(record(main))) CHECK(++polls < 100);
  CHECK(all_equal(a, 2));
  device_free(a);
  CHECK(!quiesce());
}

void lazy_runs_nothing_unasked() {
  begin(Policy::kLazy, 0, Check::kOff);
  const uint64_t before = counters().executed;
  void* a = device_allocate({0, 0}, kBytes);
  fill({0, 0}, a, 7);
  CHECK(counters().executed == before);
  CHECK(all_equal(a, 0xFF));
  synchronize_stream({0, 0});
  CHECK(all_equal(a, 7));
  device_free(a);
  CHECK(!quiesce());
}

void the_same_seed_gives_the_same_execution() {
  std::vector<std::string> traces;
  for (uint64_t seed : {5, 5, 6}) {
    begin(Policy::kRandom, seed, Check::kOff);
    std::string trace;
    for (int i = 0; i < 60; ++i) {
      const StreamId stream{0, i % 5};
      enqueue(stream, launch("trace", {}),
              make_work([&trace, i] { trace += static_cast<char>('0' + i); }));
    }
    CHECK(!quiesce());
    traces.push_back(trace);
  }
  CHECK(traces[0] == traces[1]);
  CHECK(traces[0] != traces[2]);
}

void the_pool_wraps_around_and_never_gives_the_default_stream() {
  begin(Policy::kEager, 0, Check::kOff);
  for (int i = 0; i < 3 * kPoolStreams; ++i)
    CHECK(next_pool_stream(1).index == i % kPoolStreams + 1);
}

void a_failed_task_surfaces_once_at_a_synchronisation() {
  begin(Policy::kLazy, 0, Check::kOff);
  enqueue({0, 0}, launch("fail", {}), make_work([] { throw Error("the task failed"); }));
  CHECK(throws_error([] { synchronize_stream({0, 0}); }, "the task failed"));
  synchronize_stream({0, 0});
}

// ---------------------------------------------------------------- the detector
void a_missing_wait_is_reported_at_once() {
  begin(Policy::kEager, 0, Check::kThrow);
  const StreamId main{0, 0}, side = next_pool_stream(0);
  void* a = device_allocate(main, kBytes);
  void* host = pinned_allocate(kBytes);
  fill(main, a, 1);
  CHECK(throws_error([&] { copy(side, host, a); }, "stream race: 'copy' (read, sim:0/stream1)"));
  take_reports();
  wait(side, record(main));
  copy(side, host, a);
  CHECK(throws_error([&] { host_access(host, kBytes, false, "look"); }, "'look' (read, host)"));
  synchronize(record(side));
  take_reports();
  host_access(host, kBytes, false, "look");
  device_free(a);
  pinned_free(host);
  CHECK(take_reports().empty());
}

void byte_ranges_are_told_apart() {
  begin(Policy::kEager, 0, Check::kCollect);
  const StreamId one = next_pool_stream(0), two = next_pool_stream(0);
  auto* slab = static_cast<char*>(pinned_allocate(4 * kBytes));
  fill(one, slab, 1);
  fill(two, slab + kBytes, 2);
  copy(one, slab + 2 * kBytes, slab);
  CHECK(take_reports().empty());
  fill(two, slab + kBytes / 2, 3);  // half of one's range
  CHECK(take_reports().size() == 1);
  synchronize_device(0);
  // After the overlap every piece still knows its last writer.
  wait(one, record(two));
  fill(one, slab, 4, 3 * kBytes);
  fill(two, slab + 3 * kBytes - 1, 5, 1);
  CHECK(take_reports().size() == 1);
  synchronize_device(0);
  pinned_free(slab);
  CHECK(take_reports().empty());
}

void a_read_after_a_read_is_no_race_but_a_write_after_it_is() {
  begin(Policy::kEager, 0, Check::kCollect);
  const StreamId main{0, 0}, one = next_pool_stream(0), two = next_pool_stream(0);
  void* a = device_allocate(main, kBytes);
  void* b = device_allocate(one, kBytes);
  void* c = device_allocate(two, kBytes);
  fill(main, a, 1);
  wait(one, record(main));
  wait(two, record(main));
  copy(one, b, a);
  copy(two, c, a);
  CHECK(take_reports().empty());
  wait(main, record(one));
  fill(main, a, 2);  // two may still be reading
  CHECK(take_reports().size() == 1);
  synchronize_device(0);
  device_free(a);
  device_free(b);
  device_free(c);
  CHECK(take_reports().empty());
}

// ---------------------------------------------------------------- memory
void frees_are_poisoned_in_stream_order_and_reuse_is_immediate() {
  begin(Policy::kLazy, 0, Check::kThrow);
  const StreamId main{0, 0}, side = next_pool_stream(0);
  void* a = device_allocate(main, kBytes);
  void* host = pinned_allocate(kBytes);
  fill(main, a, 1);
  copy(main, host, a);
  device_free(a);
  CHECK(device_allocate(main, kBytes) == a);
  void* b = device_allocate(side, kBytes);  // another stream's pool
  CHECK(b != a);
  device_free(b);
  synchronize_stream(main);
  CHECK(all_equal(host, 1));
  CHECK(all_equal(a, 0xFF));
  device_free(a);
  CHECK(device_allocate(main, kBytes) == a);
  CHECK(throws_error([&] { fill(side, a, 3); }, "'allocate' (write, sim:0/stream0"));
  set_check(Check::kOff);
  device_free(a);
  pinned_free(host);
}

void a_premature_free_is_reported() {
  begin(Policy::kEager, 0, Check::kCollect);
  const StreamId main{0, 0}, side = next_pool_stream(0);
  void* host = pinned_allocate(kBytes);
  void* a = device_allocate(main, kBytes);
  fill(main, a, 1);
  wait(side, record(main));
  copy(side, host, a);
  device_free(a);
  auto reports = take_reports();
  CHECK(reports.size() == 1 && reports[0].find("'free' (write") != std::string::npos);
  pinned_free(host);
  reports = take_reports();
  CHECK(reports.size() == 1 && reports[0].find("free of pinned memory") != std::string::npos);
}

void record_stream_defers_reuse() {
  for (const auto& [policy, seed] : kSchedules) {
    begin(policy, seed, Check::kThrow);
    const StreamId main{0, 0}, side = next_pool_stream(0);
    void* a = device_allocate(main, kBytes);
    void* host = pinned_allocate(kBytes);
    fill(main, a, 9);
    wait(side, record(main));
    copy(side, host, a);
    record_stream(a, side);
    device_free(a);
    if (policy == Policy::kLazy) {
      CHECK(memory_stats(0).deferred == 1);
      void* b = device_allocate(main, kBytes);
      CHECK(b != a);
      device_free(b);
    }
    synchronize(record(side));
    CHECK(memory_stats(0).deferred == 0);
    CHECK(all_equal(host, 9));
    CHECK(device_allocate(main, kBytes) == a);
    device_free(a);
    CHECK(pinned_record(host, side));
    pinned_free(host);
    CHECK(!quiesce());
    CHECK(take_reports().empty());
    CHECK(live_blocks(0).empty());
  }
}

void capacity_is_enforced_after_a_cache_flush() {
  begin(Policy::kLazy, 0, Check::kThrow);
  set_capacity(0, 4 * kBytes);
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(device_allocate({0, 0}, kBytes));
  bool out_of_memory = false;
  try {
    device_allocate({0, 0}, 1);
  } catch (const OutOfMemory&) {
    out_of_memory = true;
  }
  CHECK(out_of_memory);
  for (void* block : blocks) device_free(block);
  void* large = device_allocate({0, 0}, 4 * kBytes);  // only after the cache is given back
  CHECK(memory_stats(0).reserved == 4 * kBytes);
  device_free(large);
  CHECK(memory_stats(0).out_of_memory >= 1);
}

void pinned_failures_are_injected() {
  begin(Policy::kEager, 0, Check::kOff);
  fail_pinned_requests(1, 2);
  void* good = pinned_allocate(kBytes);
  for (int i = 0; i < 2; ++i) CHECK(throws_error([] { pinned_allocate(kBytes); }, "cannot pin"));
  pinned_free(pinned_allocate(kBytes));
  set_pinned_budget(2 * kBytes);
  void* second = pinned_allocate(kBytes);
  CHECK(throws_error([] { pinned_allocate(1); }, "cannot pin"));
  set_pinned_budget(std::nullopt);
  pinned_free(good);
  pinned_free(second);
}

// ---------------------------------------------------------------- mutations and virtual time
void mutations_strike_where_they_match_only() {
  begin(Policy::kEager, 0, Check::kCollect);
  const StreamId main{0, 0}, one = next_pool_stream(0), two = next_pool_stream(0);
  void* a = device_allocate(main, kBytes);
  void* host = pinned_allocate(kBytes);
  const int id = mutate_drop_waits(std::vector{one}, std::vector{main});
  fill(main, a, 1);
  wait(two, record(main));
  copy(two, host, a);
  CHECK(take_reports().empty() && mutation_hits(id) == 0);
  wait(one, record(two));  // not the source that was named
  CHECK(mutation_hits(id) == 0);
  fill(main, a, 2);
  take_reports();
  wait(one, record(main));
  copy(one, host, a);
  CHECK(mutation_hits(id) == 1);
  CHECK(take_reports().size() == 1);
  remove_mutation(id);
  set_policy(Policy::kLazy, 0);
  fill(main, a, 3);
  const int elsewhere = mutate_lying_queries(std::vector{one});
  query(record(two));
  CHECK(mutation_hits(elsewhere) == 0);
  remove_mutation(elsewhere);
  const int lie = mutate_lying_queries(std::nullopt);
  CHECK(query(record(main)) && mutation_hits(lie) == 1 && !all_equal(a, 3));
  remove_mutation(lie);
  const int tagged = mutate_allocate_on(two, std::vector{main});
  void* b = device_allocate(main, kBytes);
  CHECK(mutation_hits(tagged) == 1);
  remove_mutation(tagged);
  device_free(b);
  CHECK(device_allocate(two, kBytes) == b);
  device_free(b);
  const int deaf = mutate_drop_synchronizes(std::nullopt);
  synchronize_stream(main);
  CHECK(mutation_hits(deaf) == 1 && !all_equal(a, 3));
  clear_mutations();
  set_check(Check::kOff);
  CHECK(!quiesce());
  device_free(a);
  pinned_free(host);
}

void virtual_time_shares_a_link_between_its_directions() {
  begin(Policy::kLazy, 0, Check::kOff);
  CostModel model{0, 0, 1, 1, 1};
  model.duplex = 0.75;  // beside another copy at half the speed
  set_cost_model(model);
  const StreamId down = next_pool_stream(0), up = next_pool_stream(0);
  const auto run = [](StreamId stream, Engine engine, double bytes) {
    Launch work = launch("virtual", {});
    work.engine = engine;
    work.bytes = bytes;
    enqueue(stream, work, make_work([] {}));
  };
  run(down, Engine::kDeviceToHost, 4000);  // 0..4
  run(up, Engine::kHostToDevice, 1000);    // 0..2, all of it beside the other
  run(up, Engine::kHostToDevice, 3000);    // 2..6: 1000 until 4, the rest alone
  CHECK(record(down)->virtual_us == 4);
  CHECK(record(up)->virtual_us == 6);
  set_cost_model({});
  CHECK(!quiesce());
}

void virtual_time_overlaps_engines_and_fills_gaps() {
  begin(Policy::kLazy, 0, Check::kOff);
  set_cost_model({0, 0, 1, 1, 1});  // 1 GB/s: a microsecond is 1000 bytes
  const StreamId main{0, 0}, side = next_pool_stream(0);
  const auto run = [](StreamId stream, Engine engine, double bytes) {
    Launch work = launch("virtual", {});
    work.engine = engine;
    work.bytes = bytes;
    enqueue(stream, work, make_work([] {}));
  };
  run(side, Engine::kHostToDevice, 5000);  // 0..5
  run(side, Engine::kCompute, 1000);       // 5..6, leaves a gap before it
  run(main, Engine::kCompute, 4000);       // 0..4, in that gap
  run(main, Engine::kCompute, 3000);       // 6..9, too long for what is left of it
  const auto end = record(main);
  CHECK(end->virtual_us == 9);
  CHECK(record(side)->virtual_us == 6);
  synchronize(end);
  CHECK(host_virtual_us() == 9);
  set_cost_model({});
  CHECK(!quiesce());
}

// ---------------------------------------------------------------- the C face
void native_code_launches_in_stream_order() {
  begin(Policy::kLazy, 0, Check::kThrow);
  static std::atomic<int> destroyed;
  destroyed = 0;
  const StreamId side = next_pool_stream(1);
  void* handle = reinterpret_cast<void*>(static_cast<intptr_t>(slot_of(side)));
  auto* a = static_cast<char*>(device_allocate(side, kBytes));
  const simdev_span spans[] = {{a, kBytes, 1}};
  const auto run = [](void* p) { std::memset(p, 5, kBytes); };
  const auto destroy = [](void*) { ++destroyed; };
  std::vector<char> plain(kBytes);
  CHECK(simdev_launch(handle, "native", spans, 1, run, destroy, a) == 0);
  CHECK(destroyed == 0);
  CHECK(simdev_memcpy_async(plain.data(), a, kBytes, handle) == 0);  // waits: plain memory
  CHECK(destroyed == 1 && all_equal(plain.data(), 5));
  CHECK(simdev_launch(handle, "native", spans, 1, run, destroy, a) == 0);  // still queued
  CHECK(simdev_launch(nullptr, "native", spans, 1, run, destroy, a) == 1);
  CHECK(std::strstr(simdev_last_error(), "stream race") && destroyed == 2);
  const simdev_span wild[] = {{a, 16 * kBytes, 1}};
  CHECK(simdev_launch(handle, "native", wild, 1, run, destroy, a) == 1);
  CHECK(std::strstr(simdev_last_error(), "illegal memory access"));
  CHECK(simdev_memset_async(a, 6, kBytes, handle) == 0);
  CHECK(!quiesce());
  CHECK(all_equal(a, 6));
  take_reports();
  device_free(a);
}

// ---------------------------------------------------------------- several host threads
void host_threads_share_the_machine() {
  for (const auto& [policy, seed] : kSchedules) {
    begin(policy, seed, Check::kThrow);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([t] {
        const int device = t % kDevices;
        const StreamId main{device, 0}, side = next_pool_stream(device);
        for (int i = 0; i < 60; ++i) {
          void* a = device_allocate(main, kBytes);
          void* host = pinned_allocate(kBytes);
          fill(main, a, t * 60 + i);
          wait(side, record(main));
          copy(side, host, a);
          const auto copied = record(side);
          if (i % 3 == 0) {
            record_stream(a, side);
            device_free(a);
          } else {
            wait(main, copied);
            device_free(a);
          }
          pinned_record(host, side);
          if (i % 4 == 0) {
            while (!query(copied)) std::this_thread::yield();
          } else if (i % 4 == 1) {
            synchronize(copied);
          } else {
            synchronize_device(device);
          }
          CHECK(all_equal(host, t * 60 + i));
          pinned_free(host);
          if (i % 20 == 0) empty_cache(device);
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK(!quiesce());
    CHECK(take_reports().empty());
    CHECK(live_blocks(0).empty());
    CHECK(memory_stats(0).deferred == 0 && memory_stats(1).deferred == 0);
    CHECK(pinned_stats().allocated == 0);
  }
}

void free_really_runs_streams_at_once() {
  begin(Policy::kFree, 0, Check::kOff);
  // Each task waits for the other to have begun: only concurrent workers finish both.
  std::atomic<int> begun{0};
  for (int i = 1; i <= 2; ++i)
    enqueue({0, i}, launch("meet", {}), make_work([&begun] {
              ++begun;
              while (begun < 2) std::this_thread::yield();
            }));
  CHECK(!quiesce());
  CHECK(begun == 2);
  set_policy(Policy::kEager, 0);
}

}  // namespace

int main() {
#define RUN(test)       \
  current_test = #test; \
  test();               \
  std::printf("ok %s\n", #test)
  RUN(ordered_streams_give_the_same_bytes);
  RUN(events_are_versioned_and_a_stream_may_wait_for_itself);
  RUN(lazy_runs_nothing_unasked);
  RUN(the_same_seed_gives_the_same_execution);
  RUN(the_pool_wraps_around_and_never_gives_the_default_stream);
  RUN(a_failed_task_surfaces_once_at_a_synchronisation);
  RUN(a_missing_wait_is_reported_at_once);
  RUN(byte_ranges_are_told_apart);
  RUN(a_read_after_a_read_is_no_race_but_a_write_after_it_is);
  RUN(frees_are_poisoned_in_stream_order_and_reuse_is_immediate);
  RUN(a_premature_free_is_reported);
  RUN(record_stream_defers_reuse);
  RUN(capacity_is_enforced_after_a_cache_flush);
  RUN(pinned_failures_are_injected);
  RUN(mutations_strike_where_they_match_only);
  RUN(virtual_time_overlaps_engines_and_fills_gaps);
  RUN(virtual_time_shares_a_link_between_its_directions);
  RUN(native_code_launches_in_stream_order);
  RUN(host_threads_share_the_machine);
  RUN(free_really_runs_streams_at_once);
  return 0;
}
