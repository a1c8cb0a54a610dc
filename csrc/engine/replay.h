// Replay of one step under a plan: when everything happens, and how many bytes are where.
//
// [Note: The model]
// Four lanes: compute, the codec, copies away, copies back. What holds:
//
// 1. Compute does the gap before each mark, then the mark. It stands still only where it waits.
// 2. A send starts when its bytes are there, behind the sends before it. It is *released* where
// room
//    is needed and nowhere else: at the mark before the save that needs the room, oldest send
//    first, compute waits for the end of the send and the storage goes. So memory in program order
//    depends on the plan alone. A copy that is slower than predicted costs a wait at its release;
//    it never costs a byte more. What is encoded on its way is released twice: the storage when it
//    has been encoded (these first: that has been paid for), and the frame when it has been copied.
// 3. Fetches are started at demands, in the order of the demands, not before there is room, and not
//    before a link of half the speed (`kLead`) would have to start them.
// 4. A storage is resident from its save until it was released and the forward has let go of it,
// and
//    again from its fetch through the mark of its last demand. A frame on the device is resident
//    from the save on, with all its capacity; one on its way to a pool until it was released, and
//    again from the fetch of its storage through the first demand. That counts a little more than
//    the ledger does, never less.
// 5. Codec time is compute's: encoding beside compute takes its processors. (On a CPU the calling
//    thread does it, and the raw bytes go at once.) Where operators open windows
//    (`StepRecord::windows_s`), work waits for them, in its order, decodes first, and costs nothing
//    there; it costs what is left of it where room is needed, at the end of the forward, or at its
//    demand. (What has to be copied before it is decoded waits for no window.)
// 6. Copies in both directions at once run at the duplex rates. Where those who copy share
// compute's
//    processors (`MachineRates::copy_share`), compute loses that share of a copy's time, when the
//    copy starts.
// 7. What recomputed units save again is there whatever the plan says (`StepRecord::extra_nbytes`),
//    and so is the time that they take.
// 8. What elements that are not like the last ones may need beyond their frames' capacity lies in
//    one room that is there all the time (`arena_nbytes`). What finds no credit there, or would
//    need a longer frame than planned, is swapped as it is: that takes less of the device at any
//    mark.
// 9. What is recomputed goes at once and comes back when it is demanded, after what its recipe
//    reads: that comes back then, too, if it is not there, and stays until its own last demand, or
//    the last recipe that reads it has run; then it goes at once. While a recipe runs, what it
//    makes on the way is there beside all that (`StepRecord::inner_nbytes`). What a recipe reads is
//    its graph's for as long as the recipe is: what stays, and frames, go no earlier.
//
// The same input gives the same bits on every machine: sums are added in the order of the events.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "machine_rates.h"
#include "step_record.h"

namespace memswap {

inline constexpr int64_t kNoBudget = std::numeric_limits<int64_t>::max();

// What a lane did.
enum class Work : uint8_t {
  kForward,
  kBackward,
  kWaitForRoom,
  kWaitForWrite,
  kWaitForBytes,
  kSharedWithCopies,
  kEncode,
  kDecode,
  kRecompute,
  kCopyAway,
  kCopyBack,
};

// One piece of work, in seconds from the begin of the step. Of kForward and kBackward, the storage
// says whose unit works.
struct WorkSpan {
  Work work;
  int32_t storage;
  double begin_s;
  double end_s;
};

// At a mark, or (of fetches) at the first demand of a storage, something happens to a storage.
struct PlannedEvent {
  int32_t at;
  int32_t storage;
};

// What a plan makes of a step.
struct Replay {
  std::vector<int64_t> resident_bytes;  // at each mark, the most of it
  std::vector<double> mark_s;           // when each mark was over
  int64_t peak_bytes = 0;
  int64_t arena_bytes = 0;               // of these, for what does not fit frames
  int64_t moved_bytes = 0;               // of the storages that do not stay as they are
  int64_t pooled_bytes = 0;              // bytes of the pool that the plan takes
  double total_exposed_s = 0;            // compute stood still, or worked for the codec
  std::vector<double> exposed_s;         // by storage
  std::vector<int32_t> exposed;          // storages that something was exposed for, in that order
  std::vector<PlannedEvent> releases;    // at a mark, the sends that are released there
  std::vector<PlannedEvent> departures;  // at a mark, the frames on their way to a pool
  std::vector<PlannedEvent> fetches;     // at a storage's first demand, what starts back
  std::vector<int32_t> idle;             // storages that moved although nobody needed their room
  std::vector<WorkSpan> spans;
};

// Replays a step.
//
// Args:
//   step: was checked.
//   actions: one per storage. Throws std::invalid_argument if there are more or fewer, or if one of
//     them needs a rate that is 0, or a recipe that there is not.
//   budget_bytes: how many resident bytes to stay below, if waiting makes it possible.
//   with_spans: whether to note what every lane does when.
Replay replay(const StepRecord& step, const MachineRates& rates,
              std::span<const PlannedAction> actions, int64_t budget_bytes,
              bool with_spans = false);

// A plan, and its replay.
struct ReplayedPlan {
  std::vector<PlannedAction> actions;
  Replay found;
};

// The same without what moves in vain: storages whose room nobody needed are kept, and it is
// replayed again, until there are none.
ReplayedPlan replay_without_idle(const StepRecord& step, const MachineRates& rates,
                                 std::vector<PlannedAction> actions, int64_t budget_bytes);

// The actions of a column with a byte for each storage: the number of its action. Throws
// std::invalid_argument where that is none.
std::vector<PlannedAction> actions_of(std::string_view column);

}  // namespace memswap
