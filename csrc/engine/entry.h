// Entry: one saved storage that may leave, however many views and operators saved it; its states;
// and SavedTensor, one of these saves.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "away.h"
#include "counters.h"
#include "departing.h"
#include "ledger.h"
#include "storage/saved_view.h"
#include "storage/storage.h"
#include "transfers.h"
#include "work/ticket.h"

namespace memswap {

class Engine;
class Entry;
class Iteration;
class Trial;
using EnginePtr = std::shared_ptr<Engine>;
using EntryPtr = std::shared_ptr<Entry>;
using IterationPtr = std::shared_ptr<Iteration>;

// A step that the state of an entry does not allow: a bug in memswap.
struct EntryStateError : std::logic_error {
  using std::logic_error::logic_error;
};

enum class State : uint8_t { kResident, kLeaving, kAway, kReturning };

// Whether a storage may go from one state to another.
constexpr bool legal(State from, State to) {
  switch (from) {
    case State::kResident:  // sent; or seen by every save, and the away form is still there
      return to == State::kLeaving || to == State::kAway;
    case State::kLeaving:  // gone; or demanded while somebody still held it
      return to == State::kAway || to == State::kResident;
    case State::kAway:  // fetched; or demanded again while a consumer still holds it
      return to == State::kReturning || to == State::kResident;
    case State::kReturning:  // demanded
      return to == State::kResident;
  }
  return false;
}

// A state as messages name it.
const char* word_of(State state);

// One storage in counters, which must outlive it: resident at first, not counted at the end.
// A step that is not legal changes nothing and says false.
class Residence {
 public:
  Residence(Counters& counters, int64_t nbytes) : counters_(counters), nbytes_(nbytes) {
    count_resident(true);
  }
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;
  ~Residence() {
    counters_.resident_bytes -= (resident_ ? nbytes_ : 0) + frame_bytes_;
    counters_.away_bytes -= away_bytes_;
  }

  State state() const { return state_; }
  int64_t nbytes() const { return nbytes_; }
  Counters& counters() { return counters_; }

  bool move(State to) {
    if (!legal(state_, to)) {
      return false;
    }
    state_ = to;
    return true;
  }

  // It is being sent.
  bool leave() {
    if (!move(State::kLeaving)) {
      return false;
    }
    ++counters_.moved_storages;
    counters_.moved_bytes += nbytes_;
    return true;
  }

  // Nobody holds it any more.
  bool go() {
    if (!move(State::kAway)) {
      return false;
    }
    count_resident(false);
    counters_.freed_bytes += nbytes_;
    return true;
  }

  // Its bytes are on their way into a new one.
  bool come_back() {
    if (!move(State::kReturning)) {
      return false;
    }
    count_resident(true);
    ++counters_.returned_storages;
    counters_.returned_bytes += nbytes_;
    return true;
  }

  void count_resident(bool resident) {
    if (resident_ != resident) {
      resident_ = resident;
      counters_.resident(resident ? nbytes_ : -nbytes_);
    }
  }

  // The away form takes so many bytes of the device, and so many that are not the device's.
  void count_away(int64_t on_device, int64_t elsewhere) {
    counters_.resident(on_device - frame_bytes_);
    counters_.away(elsewhere - away_bytes_);
    frame_bytes_ = on_device;
    away_bytes_ = elsewhere;
  }

 private:
  Counters& counters_;
  const int64_t nbytes_;
  State state_ = State::kResident;
  bool resident_ = false;
  int64_t frame_bytes_ = 0;
  int64_t away_bytes_ = 0;
};

// Owned by its handles: when the last one dies, so do the entry, its away form and its storage,
// whatever happened to the graph. Everything else refers to it weakly. The engine's lock serialises
// the calls.
class Entry final : public Known, public std::enable_shared_from_this<Entry> {
 public:
  // Stands for the storage that `view` is of, from here on.
  static EntryPtr make(EnginePtr engine, const SavedView& view, const StorageRef& storage);
  ~Entry() override;

  bool is_entry() const override { return true; }
  const EnginePtr& engine() const { return engine_; }
  State state() const { return residence_->state(); }
  int64_t nbytes() const { return residence_->nbytes(); }
  Counters& counters() { return residence_->counters(); }
  const WeakStorage& identity() const { return *identity_; }
  c10::Device device() const { return device_; }
  // Of the tensor that was saved first.
  uint32_t version() const { return version_; }
  // Whether the storage is one that memswap made.
  bool fetched() const { return fetched_; }
  // Whether the storage has left, or is leaving, as far as its owner is concerned.
  bool is_away() const { return away_ && !storage; }
  std::string described() const;

  const AwayFormPtr& away() const { return away_; }
  const TicketPtr& departure() const { return departure_; }  // of its send
  const TicketPtr& arrival() const { return arrival_; }      // of its return

  // Changes the state, or throws EntryStateError.
  void move(State to);

  // It is being sent.
  void leave(Leaving leaving);
  // Whether the send has ended. One that failed gives the storage back: nothing is lost.
  bool sent();
  // Notices whether a leaving storage really went away. What was gathered is gone before its bytes
  // are anywhere else for sure; `wait` waits for that, instead of saying no.
  bool gone(bool wait);
  // Whether it is leaving and somebody holds it still.
  bool lingers();

  // Starts bringing the bytes back into a storage of memswap's own. Throws c10::OutOfMemoryError.
  void fetch();
  // Fetches a storage that is away, if its form can be fetched ahead of a demand. Whether that was
  // done.
  bool fetch_ahead();
  // The storage: the one that is still there, the one that was fetched, or else a fetch now, which
  // counts as a stall. The caller waits for `arrival` before it reads.
  StorageRefPtr bring();
  // Bytes that come to the device when it starts back, its frame's included; 0: it is not away.
  int64_t returning_nbytes();

  // Holds the storage, if anybody does. Whether there was one.
  bool lock();
  // Holds on to a storage that has not gone away yet: then nothing has to come back.
  bool retain();
  // Lets go of the storage again, whose away form is still there. Nothing is copied.
  void let_go();
  // A recipe reads the storage from before its demand until it has run: it counts as one more save.
  void use();
  void used();
  // Whether nobody but our own handles holds a storage that stayed. Meant for its first demand,
  // when all of them are still alive.
  bool held_by_handles_only() const;
  // Whether the storage that it holds has been resized since it was saved ([Note: Memory that is
  // taken away] in storage/memory_share.h).
  bool lost_memory() const;

  // Counts what the away form takes up now.
  void count_away();
  // Orders the caller behind a frame's way to a pool, so that the frame is off the device. Other
  // forms have nothing to wait for.
  void release_frame();

  StorageRefPtr storage;  // where the entry itself holds it
  int64_t handles = 0;    // saves whose storage left
  int64_t keeps = 0;      // saves whose tensor stayed
  int64_t unseen = 0;     // saves that have not been unpacked since the storage came back
  IterationPtr iteration;
  size_t index = 0;         // in the iteration
  bool for_recipe = false;  // saved for a recipe, and not by autograd
  // How it leaves once its batch is told to go: it is sent, or this recipe takes its place.
  // Nothing: it does not wait for a batch.
  std::optional<std::variant<LeaveOrder, Leaving>> order;
  std::shared_ptr<Trial> trial;  // of its recipe, while its place is being learnt
  ListPlace place_in_list;

  void leave_list() {
    if (place_in_list.list != nullptr) {
      place_in_list.list->remove(this);
    }
  }

 private:
  Entry(EnginePtr engine, const SavedView& view, const StorageRef& ref);

  void require(bool legal_step, State to) const;
  void forget_identity();
  void stay(Ticket& departure);
  void take(Returning back);
  bool sent_safely(bool wait);
  void drop_storage();
  void drop_away();

  const EnginePtr engine_;
  std::optional<Residence> residence_;
  std::optional<WeakStorage> identity_;
  AwayFormPtr away_;
  TicketPtr departure_, arrival_;
  const uint32_t version_;
  const c10::Device device_;
  bool fetched_ = false;
};

// The entry that stands for a storage; nullptr: nobody stands for it, or a Stay.
EntryPtr as_entry(KnownPtr known);

// A saved tensor was edited in place, of which hooks keep autograd from hearing: its own words.
struct EditedInPlace : std::runtime_error {
  // `tensor`: in words.
  EditedInPlace(const std::string& tensor, uint32_t version, uint32_t expected_version);

  const uint32_t version, expected_version;
};

// One save, as autograd's handles and recipes hold it: a share of an entry and how the tensor looks
// at its storage, or a tensor that stays and who stands for its storage. It does the check of the
// version that autograd would have done. The GIL, or else the engine's lock, serialises its making
// and its end.
class SavedTensor {
 public:
  // The storage leaves, or has left.
  static SavedTensor moved(EntryPtr entry, SavedView&& view);
  // The tensor stays. `tensor`: without the graph that made it. `version`: of what was saved.
  static SavedTensor kept(at::Tensor tensor, uint32_t version, KnownPtr known);

  // The tensor again, there before what the caller does next on its current stream. Throws
  // EditedInPlace and LostBytes.
  at::Tensor unpack() const;

  bool stays() const { return tensor_.defined(); }
  const at::Tensor& tensor() const { return tensor_; }            // undefined: its storage leaves
  const std::optional<SavedView>& view() const { return view_; }  // of a storage that leaves
  const KnownPtr& known() const { return known_; }                // nullptr: nobody stands for it
  // The entry that stands for the storage, or nullptr.
  EntryPtr entry() const;

 private:
  SavedTensor(EntryPtr entry, SavedView&& view)
      : known_(std::move(entry)), view_(std::move(view)) {}
  SavedTensor(at::Tensor tensor, uint32_t version, KnownPtr known)
      : known_(std::move(known)), tensor_(std::move(tensor)), version_(version) {}

  KnownPtr known_;
  std::optional<SavedView> view_;
  at::Tensor tensor_;
  uint32_t version_ = 0;
};

// A tensor as it waits where it stays: a leaf is kept itself, as autograd would, since whoever
// gives it other memory gives it to backward as well; others share storage and version counter, not
// the graph.
at::Tensor without_graph(const at::Tensor& tensor);

}  // namespace memswap
