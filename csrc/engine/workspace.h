// Workspace: what is on a device beside saved activations, measured while an iteration runs.
//
// [Note: Workspace]
// Operators allocate for themselves, gradients come to be, and a loss has logits that no layer
// saves: memswap's account knows nothing of all that, and the device's allocator knows only the
// sum. So in an iteration that is recorded, the allocator's peak is read at each mark ([Note:
// Marks] in recorder.h), and begun anew when the mark is over. The peak between two marks, less
// what the saved storages took of the device when the first mark was over, is what was there
// besides: parameters, buffers and inputs among it. What a forward or an operator lets go of
// between two marks is held to the second one: the replay counts it until then, and a peak after it
// went would otherwise hide as much of what was there besides. What starts back at a mark counts
// from then on, and of a CPU it is there page by page, as a thread reads it: its pages are made at
// once (MemoryGauge::count_all_of), or what has not come yet would hide as much. A plan is made as
// if all that were there at the same marks, whatever it decides. What memswap itself does at a mark
// is no part of it; the replay knows that.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory_gauge.h"
#include "storage/storage.h"

namespace memswap {

class Iteration;

// What a workspace has seen of an iteration, from each mark to the next: the most bytes, and of
// these the gradients of the parameters when the mark was over.
struct WorkspaceRecord {
  std::vector<int64_t> extra_nbytes, gradient_nbytes;
  int64_t baseline_nbytes;  // of the first, what was there when the iteration began
};

// The engine's lock serialises the calls until `end`.
class Workspace {
 public:
  // `granularity`: of the allocator, to multiples of which saved storages count. `other_nbytes`:
  // what is not counted, because it is planned by itself. `baseline_nbytes`: what was there beside
  // saved activations when the iteration began.
  Workspace(std::shared_ptr<MemoryGauge> gauge, std::vector<at::Tensor> parameters,
            int64_t granularity, int64_t other_nbytes, int64_t baseline_nbytes);

  // The storages of an iteration that is in flight count as saved.
  void watch(const std::shared_ptr<Iteration>& iteration);

  // Memswap begins to work at a mark, or somebody is about to begin the gauge anew.
  void arrive();
  // What has started back at a mark is there as a whole. Before the mark is over: it takes a while.
  void count_returning() const;
  // It has worked at mark number `mark`.
  void depart(size_t mark);
  // Nothing more is taken down.
  void end();

  // Of an iteration with so many marks.
  WorkspaceRecord record(size_t marks) const;

 private:
  int64_t present() const;
  int64_t gradients() const;
  void hold();

  const std::shared_ptr<MemoryGauge> gauge_;
  const std::vector<at::Tensor> parameters_;
  const int64_t granularity_, other_nbytes_, baseline_nbytes_;
  std::vector<std::weak_ptr<Iteration>> watched_;
  std::vector<StorageRefPtr> held_;
  std::vector<int64_t> extra_, gradients_;
  size_t mark_ = 0;
  int64_t present_ = 0;
  bool ended_ = false;
};

}  // namespace memswap
