// Entry: one saved storage that may leave, however many views and operators saved it; and
// SavedTensor, one of these saves.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "away.h"
#include "departing.h"
#include "ledger.h"
#include "lock.h"
#include "residence.h"
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

// What came of bringing a storage back ahead of its demand.
enum class Ahead : uint8_t {
  kFetches,   // its bytes are on their way
  kNothing,   // there is nothing to do, or nothing that can be done ahead: its demand does it
  kNoMemory,  // on the device, by now
};

// [Note: Who holds a storage]
// What an entry has is one of these rows. A change of state that is not legal (residence.h) throws
// EntryStateError.
//
//   state      storage_  away_  what it is
//   resident   -         -      it stays: each save keeps its tensor
//   resident   held      -      it waits for its batch or a window, or could not be sent
//   resident   held      there  it was demanded or loaded, and a save has not read it yet
//   leaving    -         there  it was sent; others may hold it, and its send's ticket does
//   away       -         there  it is gone; or every save has read it, and whoever uses it holds it
//   returning  held      there  it was fetched, and nobody has demanded it yet
//
// A ticket holds a storage as well, until somebody waits for it. So a storage whose send may be
// under way is leaving again once the entry holds it no more; and one that is dropped while it
// returns is taken from its arrival.

// Owned by its handles: when the last one dies, so do the entry, its away form and its storage,
// whatever happened to the graph. Everything else refers to it weakly. Where there is Python its
// calls hold the GIL, and the engine's lock where they let go of it in between (lock.h); its end
// holds the GIL alone.
class Entry final : public Known, public std::enable_shared_from_this<Entry> {
 public:
  // How a storage leaves that waits until its batch is told to go: as ordered, or this recipe takes
  // its place.
  using Order = std::variant<LeaveOrder, Leaving>;

  // Stands for the storage that `view` is of, from here on. `for_recipe`: a recipe saves it, and
  // not autograd.
  static EntryPtr make(EnginePtr engine, const SavedView& view, const StorageRef& storage,
                       bool for_recipe = false);
  ~Entry() override;

  bool is_entry() const override { return true; }
  const EnginePtr& engine() const { return engine_; }
  State state() const { return residence_->state(); }
  int64_t nbytes() const { return residence_->nbytes(); }
  Counters& counters() { return residence_->counters(); }
  const WeakStorage& identity() const { return *identity_; }
  c10::Device device() const { return device_; }
  bool for_recipe() const { return for_recipe_; }
  std::string described() const;

  // Its place in an iteration, which gives it one; nullptr: it has none.
  const IterationPtr& iteration() const { return iteration_; }
  size_t index() const { return index_; }
  void place_in(IterationPtr iteration, size_t index);

  // --- its saves ---

  void add_handle() { ++handles_; }             // a save whose storage leaves
  void add_keep() { ++keeps_; }                 // a save whose tensor stays
  int64_t handles() const { return handles_; }  // of the former
  int64_t keeps() const { return keeps_; }      // of the latter
  // A recipe reads the storage from before its demand until it has run: it counts as one more save.
  void use();
  void used();
  // Whether nobody but our own handles holds a storage that stayed. Meant for its first demand,
  // when all of them are still alive.
  bool held_by_handles_only() const;

  // --- where it is ---

  // The storage, where the entry itself holds it: it waits to leave, could not be sent, was
  // retained, or is demanded.
  const StorageRefPtr& storage() const { return storage_; }
  // Whether the storage is one that memswap made.
  bool fetched() const { return fetched_; }
  // Whether the storage has left, or its handles hold it by the entry all the same: it waits to
  // leave, or could not be sent.
  bool moves() const { return away_ || storage_; }
  // Whether the storage has left, or is leaving, as far as its owner is concerned.
  bool is_away() const { return away_ && !storage_; }
  const AwayFormPtr& away() const { return away_; }
  const TicketPtr& departure() const { return departure_; }  // of its send
  const TicketPtr& arrival() const { return arrival_; }      // of its return

  // --- it leaves ---

  // It waits to leave, and holds its storage until then; for its batch, which has an order for it.
  void hold(StorageRefPtr storage) { storage_ = std::move(storage); }
  void hold(StorageRefPtr storage, Order order);
  // What its batch has for it; nothing: it does not wait for a batch.
  const std::optional<Order>& order() const { return order_; }
  // The same, once; it must be there.
  Order take_order() { return *std::exchange(order_, std::nullopt); }
  // Recipes that are run in turn until its bytes are there, the one that it waits to leave as
  // included; 0: its bytes come another way.
  int depth() const;
  // Whether the storage that it holds has been resized since it was saved ([Note: Memory that is
  // taken away] in storage/memory_share.h).
  bool lost_memory() const;

  // It is being sent: what is sent holds the storage from here on, and the entry does not. Throws
  // EntryStateError.
  void leave(Leaving leaving);
  // Whether the send has ended. One that failed gives the storage back: nothing is lost.
  bool notice_sent();
  // Whether the storage has left and nobody holds it any more, which is counted when it is first
  // seen. What was gathered is gone before its bytes are anywhere else for sure; `wait` waits for
  // that, instead of saying no.
  bool notice_gone(bool wait);
  // Whether it is leaving and has not gone: somebody holds it, or its bytes are not elsewhere yet.
  bool lingers();
  // Orders the caller behind a frame's way to a pool, so that the frame is off the device. Other
  // forms have nothing to wait for.
  void release_frame();
  // Counts what the away form takes up now.
  void count_away();
  // Its place in a list of entries ([Note: What was sent lately goes first] in departing.h).
  const ListPlace& place_in_list() const { return place_in_list_; }

  // --- it comes back ---

  // Fetches a storage that is away, if its form can be fetched ahead of a demand.
  Ahead fetch_ahead();
  // The storage: the one that is still there, the one that was fetched, or else a fetch now, which
  // counts as a stall unless a recipe runs. The caller waits for `arrival`, if there is one, before
  // it reads. Throws c10::OutOfMemoryError and TransferError.
  StorageRefPtr bring();
  // Bytes that come to the device when it starts back, its frame's included; 0: it is not away.
  int64_t returning_nbytes();
  // Brings the storage back ahead of its demand, and holds it until each save has read it so many
  // times. One that somebody still holds is not fetched. What a recipe makes is left to its demand.
  Ahead load(int64_t readings);
  // Lets go of the storage again, whose away form is still there, also while it returns. Nothing is
  // copied.
  void let_go();

  // --- its recipe, while its place is learnt ---

  void try_recipe(std::shared_ptr<Trial> trial) { trial_ = std::move(trial); }
  const std::shared_ptr<Trial>& trial() const { return trial_; }  // nullptr: it is not tried

 private:
  friend class EntryList;

  Entry(EnginePtr engine, const SavedView& view, const StorageRef& ref, bool for_recipe);

  void require(bool legal_step, State to) const;
  void move(State to);
  void forget_in_ledger();
  void take_back(Ticket& departure);
  void fetch();
  Ahead try_fetch();
  void take(Returning back);
  bool sent_safely(bool wait);
  bool hold_if_alive();
  void drop_storage();
  void drop_away();

  const EnginePtr engine_;
  const c10::Device device_;
  const bool for_recipe_;
  std::optional<Residence> residence_;
  std::optional<WeakStorage> identity_;
  StorageRefPtr storage_;
  AwayFormPtr away_;
  TicketPtr departure_, arrival_;
  std::optional<Order> order_;
  std::shared_ptr<Trial> trial_;
  IterationPtr iteration_;
  size_t index_ = 0;
  int64_t handles_ = 0;
  int64_t keeps_ = 0;
  int64_t readings_left_ = 0;  // until it lets go of a storage that it was asked for
  bool fetched_ = false;
  ListPlace place_in_list_;
};

// A weak reference to an entry: equal to any other one to the same entry.
class EntryReference {
 public:
  explicit EntryReference(Entry& entry) : entry_(entry.weak_from_this()), address_(&entry) {}
  EntryPtr lock() const { return entry_.lock(); }
  bool operator==(const EntryReference& other) const {
    return !entry_.owner_before(other.entry_) && !other.entry_.owner_before(entry_);
  }
  size_t hash() const { return std::hash<const void*>()(address_); }

 private:
  std::weak_ptr<Entry> entry_;
  const void* address_;
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
  // A copy would be a save that nobody counts.
  SavedTensor(SavedTensor&&) = default;
  SavedTensor& operator=(SavedTensor&&) = default;

  // The storage leaves, or has left.
  static SavedTensor moved(EntryPtr entry, SavedView&& view);
  // The tensor stays. `tensor`: without the graph that made it. `version`: of what was saved.
  static SavedTensor kept(at::Tensor tensor, uint32_t version, KnownPtr known);

  // The tensor again, there before what the caller does next on its current stream. Throws
  // EditedInPlace and LostBytes.
  at::Tensor unpack(Caller caller = Caller::kHasNoLock) const;

  // Warns of what its engine has to tell by now, if it has one.
  void tell() const;

  bool stays() const { return tensor_.defined(); }
  const at::Tensor& tensor() const { return tensor_; }            // undefined: its storage leaves
  const std::optional<SavedView>& view() const { return view_; }  // of a storage that leaves
  const KnownPtr& known() const { return known_; }                // nullptr: nobody stands for it
  // The entry that stands for the storage, or nullptr.
  EntryPtr entry() const;

 private:
  SavedTensor(EntryPtr entry, SavedView&& view)
      : view_(std::move(view)), known_(std::move(entry)) {}
  SavedTensor(at::Tensor tensor, uint32_t version, KnownPtr known)
      : tensor_(std::move(tensor)), version_(version), known_(std::move(known)) {}

  std::optional<SavedView> view_;
  at::Tensor tensor_;
  uint32_t version_ = 0;
  KnownPtr known_;  // ends first: once the tensor has, another storage may have its address
};

// A tensor as it waits where it stays: a leaf is kept itself, as autograd would, since whoever
// gives it other memory gives it to backward as well; others share storage and version counter, not
// the graph.
at::Tensor without_graph(const at::Tensor& tensor);

}  // namespace memswap
