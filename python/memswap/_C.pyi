"""The native module (csrc/bind/*.cpp). Contracts stand in the C++ headers."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch

from memswap.engine.action import Action

_T = TypeVar("_T")

torch_version: str  # that it was built against

class TransferError(RuntimeError): ...

class StorageRef:
    def __init__(self, tensor: torch.Tensor) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def key(self) -> int: ...

class WeakStorage:
    def __init__(self, storage: StorageRef) -> None: ...
    @property
    def key(self) -> int: ...
    def expired(self) -> bool: ...
    def lock(self) -> StorageRef | None: ...

class SavedView:
    @property
    def of_leaf(self) -> bool: ...
    @property
    def key(self) -> int: ...
    @property
    def storage_nbytes(self) -> int: ...
    def rebuild(self, storage: StorageRef, shares_counter: bool) -> torch.Tensor: ...

class Known: ...

class Counters:
    """What an engine has counted (csrc/engine/counters.h)."""

    offered_tensors: int
    offered_bytes: int
    deduplicated_tensors: int
    deduplicated_bytes: int
    moved_storages: int
    moved_bytes: int
    recipe_storages: int
    recipe_bytes: int
    encoded_storages: int
    encoded_bytes: int
    frame_bytes: int
    returned_storages: int
    returned_bytes: int
    freed_bytes: int
    stalls: int
    exposed_wait_s: float
    resident_bytes: int
    peak_resident_bytes: int
    away_bytes: int
    peak_away_bytes: int

class Ledger:
    """Which storages an engine knows, and what it counts (csrc/engine/ledger.h)."""

    def keep(self, reason: str, nbytes: int) -> None: ...
    def tell_once(self, reason: str, message: str) -> None: ...
    def offer(self, nbytes: int) -> None: ...
    def set_reserved(self, nbytes: int) -> None: ...
    def reset(self) -> None: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def kept(self) -> dict[str, tuple[int, int]]: ...  # by reason: tensors, bytes of storages
    @property
    def known_storages(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...

class State(enum.Enum):
    RESIDENT = ...
    LEAVING = ...
    AWAY = ...
    RETURNING = ...

class EntryReference:
    def __call__(self) -> Entry | None: ...

TensorKey: TypeAlias = tuple[str, int, int, torch.dtype]  # unit, ordinal, nbytes, dtype

class ExpectationLimits:
    """What decides where nothing is known for sure (csrc/engine/expectations.h)."""

    worth: float  # of the bytes of a tensor
    retry_after: int  # encodes of one tensor
    trial_share: float  # of the bytes of an iteration
    margin: float
    margin_units: int  # of 8 bytes
    def __init__(self) -> None: ...

class Expectations:
    """What is expected of the tensors of one device (csrc/engine/expectations.h)."""

    def __init__(self, device: torch.device, limits: ExpectationLimits = ...) -> None: ...
    def __len__(self) -> int: ...
    def begin_iteration(self) -> None: ...
    # bytes of a frame as it was last seen: used, held, of the overflow
    def sizes(self, key: TensorKey) -> tuple[int, int, int] | None: ...

class Form(enum.Enum):
    BLOCK = ...
    FRAME = ...
    POOLED_FRAME = ...

class BlockSender:
    """Sends storages of one device to a pool (csrc/engine/block_form.h)."""

    def __init__(self, lane: Lane, pool: Pool) -> None: ...

class FrameSender:
    """Encodes storages of one device, and sends their frames to a pool if there is one
    (csrc/engine/frame_form.h)."""

    def __init__(
        self,
        lane: CodecLane,
        works_ahead: bool,
        copies: Lane | None = None,
        pool: Pool | None = None,
    ) -> None: ...

class Refused:
    """Why a storage was not sent (csrc/engine/transfers.h)."""

    @property
    def reason(self) -> str: ...  # in the statistics
    @property
    def why(self) -> str: ...  # which resource has run out; empty: none has

class Transfers:
    """What an engine sends by on one device (csrc/engine/transfers.h)."""

    def __init__(
        self,
        device: torch.device,
        expectations: Expectations,
        # What suits the device: where nobody names an action, and of what has no recipe; bytes of
        # the device for what does not fit frames, at least, and as a share of a forward's.
        traits: tuple[Action, Action, int, float],
    ) -> None: ...
    def set_blocks(self, blocks: BlockSender, /) -> None: ...
    def set_frames(self, form: Form, frames: FrameSender, /) -> None: ...
    def send(
        self, form: Form, storage: StorageRef, key: TensorKey
    ) -> tuple[AwayForm, Ticket] | Refused: ...
    def learn(self) -> None: ...
    def captures(self) -> bool: ...  # a graph is captured now, and nothing may leave
    def begin(self, leaving_bytes: int, nbytes: int, /) -> None:
        """A new forward; the last one saved `nbytes`. Raises memswap.TransferError."""

    def set_overflow_room(self, nbytes: int | None, /) -> None: ...
    def arena_bytes(self) -> int: ...  # of the device, for what does not fit frames
    def trim_arena(self) -> None: ...
    def check_decodes(self, wait: bool = False) -> None: ...  # raises memswap.TransferError
    @property
    def overflow_room(self) -> int | None: ...  # bytes that a plan has for that
    @property
    def awaited_reports(self) -> int: ...

class Span:
    """An operator that is timed (csrc/engine/durations.h)."""

class Durations:
    """How long operators take, from events in a few iterations (csrc/engine/durations.h)."""

    @property
    def measuring(self) -> bool: ...  # in this iteration
    def seconds(self, key: str, amount: float) -> float | None: ...  # None: not measured yet
    def start(self, key: str, amount: float, device: torch.device) -> Span | None: ...
    def stop(self, span: Span) -> None: ...

class WindowQueue:
    """Encodes and decodes that wait for a window (csrc/engine/window_queue.h)."""

    max_pending_bytes: int | None  # None: from what forwards defer
    leftovers_start: bool

    def start_now(self, entries: Sequence[Entry], /) -> None: ...
    def clear(self) -> None: ...
    def reset_counts(self) -> None: ...
    @property
    def pending(self) -> list[Entry]: ...
    @property
    def pending_bytes(self) -> int: ...
    @property
    def counts(self) -> dict[str, Any]: ...

class Windows:
    """Codec work of an engine that waits for windows (csrc/engine/windows.h)."""

    is_current: Callable[[torch.Stream], bool] | None  # None: by asking the device

    def open(self, seconds: float) -> None: ...
    def enter(self, seconds: float) -> None: ...
    def leave(self) -> None: ...
    @property
    def inside(self) -> bool: ...
    def end_forward(self) -> None: ...
    def begin_iteration(self) -> None: ...
    def bring(self, entries: Sequence[Entry]) -> None: ...
    @property
    def queue(self) -> WindowQueue: ...
    @property
    def durations(self) -> Durations: ...

class Schedule(enum.Enum):
    ITERATIONS = ...
    WINDOWS = ...
    BATCHES = ...

class Phase(enum.Enum):
    COLLECTED = ...
    OFFLOADING = ...
    OFFLOADED = ...
    LOADING = ...
    LOADED = ...

class BatchLimits:
    """Which storages of a batch travel together (csrc/engine/engine.h)."""

    small_bytes: int  # storages of more travel alone
    bucket_bytes: int  # most of what travels together

class Batch:
    """What one block of a group saved, and the four calls that move it (csrc/engine/batch.h)."""

    engine: Any  # the engine's object in Python: set by the group that begins the batch
    on_demand: Callable[[Batch], None] | None
    """Called, without the engine's lock, when a backward pass first demands one of its storages."""

    def __init__(self, engine: Engine, name: str, iteration: Iteration) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def iteration(self) -> Iteration: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def alive(self) -> bool: ...
    @property
    def launched(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def launch_offload(self) -> None: ...
    def wait_offload(self) -> None: ...
    def launch_load(self, readings: int = 1) -> None: ...
    def wait_load(self) -> None: ...
    def close(self) -> None: ...

class Entry(Known):
    """One saved storage that may leave (csrc/engine/entry.h)."""

    def notice_gone(self, wait: bool = False) -> bool: ...
    @property
    def state(self) -> State: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def reference(self) -> EntryReference: ...
    @property
    def identity(self) -> WeakStorage: ...
    @property
    def is_away(self) -> bool: ...
    @property
    def storage(self) -> StorageRef | None: ...
    @property
    def away(self) -> AwayForm | None: ...
    @property
    def departure(self) -> Ticket | None: ...
    @property
    def arrival(self) -> Ticket | None: ...
    @property
    def fetched(self) -> bool: ...
    @property
    def iteration(self) -> Iteration | None: ...
    @property
    def index(self) -> int: ...

class Departing:
    def __len__(self) -> int: ...
    def notice_gone(self, looks: int = ...) -> None: ...

#: (unit, ordinal, nbytes, dtype, action, releases, departures, fetches, departs, frame_nbytes,
#: for_recipe); no action: somebody is asked
PlanPlace: TypeAlias = tuple[
    str,
    int,
    int,
    torch.dtype,
    Action | None,
    Sequence[int],
    Sequence[int],
    Sequence[int],
    bool,
    int | None,
    bool,
]

class Plan:
    """What happens to each storage of an iteration (csrc/engine/plan.h)."""

    def __init__(
        self, device: torch.device, least_bytes: int, places: Sequence[PlanPlace]
    ) -> None: ...
    def __len__(self) -> int: ...

class Outcome:
    """How an iteration went, until it was asked (csrc/engine/course.h)."""

    @property
    def began_backward(self) -> bool: ...
    @property
    def changed(self) -> bool: ...  # left its plan, or saved clearly more or fewer bytes
    @property
    def unfit(self) -> bool: ...  # took more than was planned
    @property
    def refused(self) -> bool: ...  # the pool had no room for something
    @property
    def pooled_bytes(self) -> int: ...  # that were away then, or when backward began after that
    @property
    def peak_bytes(self) -> int: ...
    @property
    def over_budget_bytes(self) -> int: ...  # of `peak_bytes`, of all in flight
    @property
    def no_recipe(self) -> set[int]: ...  # places that were to be recomputed, and were not

class Course:
    """A plan of one iteration, and how it goes under it (csrc/engine/course.h)."""

    def follow(
        self, plan: Plan, nbytes: float, peak_bytes: int, budget_bytes: int | None, /
    ) -> None: ...  # expected to save so many bytes, and to take so many at most
    def leave_plan(self) -> None: ...
    @property
    def follows_plan(self) -> bool: ...
    @property
    def limit_bytes(self) -> int: ...
    def set_limit_bytes(self, bytes: int, /) -> None: ...

class Iteration:
    """One forward and the backward that belongs to it (csrc/engine/iteration.h)."""

    def learn_recipes(self) -> None: ...
    def set_recorder(self, recorder: Recorder | None, /) -> None: ...
    @property
    def course(self) -> Course: ...
    @property
    def proven(self) -> list[tuple[int, ProvenRecipe]]: ...  # by the storage's place
    @property
    def outcome(self) -> Outcome: ...
    def present_bytes(self, granularity: int) -> int: ...
    def entry(self, index: int) -> Entry | None: ...
    @property
    def over(self) -> bool: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mostly_alive(self) -> bool: ...  # most of what was saved is, for a backward that may come
    @property
    def sizes(self) -> list[int]: ...  # bytes of the storages
    @property
    def began_backward(self) -> bool: ...
    @property
    def own_prefetch_bytes(self) -> int: ...
    @property
    def least_prefetch_bytes(self) -> int: ...
    @property
    def leaving_bytes(self) -> int: ...

class StreakSeen:
    """Iterations that followed a plan while nobody was asked (csrc/engine/streak.h)."""

    @property
    def forwards(self) -> int: ...  # that began
    @property
    def ended(self) -> int: ...  # of them, those whose backward is over, as planned
    @property
    def in_flight(self) -> list[Iteration]: ...  # the others that saved something
    @property
    def most_in_flight(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...  # of those that ended

class Workspace:
    def __init__(
        self,
        gauge: MemoryGauge,
        parameters: list[torch.Tensor],
        granularity: int,
        other_nbytes: int,
        baseline_nbytes: int,
    ) -> None: ...
    def watch(self, iteration: Iteration) -> None: ...
    def arrive(self) -> None: ...
    def end(self) -> None: ...
    def record(self, marks: int) -> WorkspaceRecord: ...

class WorkspaceRecord:
    """What was on a device beside saved activations (csrc/engine/workspace.h)."""

    def __init__(
        self, extra_nbytes: Sequence[int], gradient_nbytes: Sequence[int], baseline_nbytes: int
    ) -> None: ...
    @property
    def extra_nbytes(self) -> list[int]: ...  # from each mark to the next, the most bytes
    @property
    def gradient_nbytes(self) -> list[int]: ...  # of these, gradients when the mark was over
    @property
    def baseline_nbytes(self) -> int: ...  # of these, what was there when the iteration began

class MemoryGauge:
    def __init__(self, device: torch.device) -> None: ...
    @property
    def now(self) -> int: ...
    @property
    def peak(self) -> int: ...
    def begin(self) -> None: ...

class Timeline:
    prefetch_bytes: int | None

    def __init__(self, prefetch_bytes: int | None) -> None: ...
    def begin(self) -> Iteration: ...

class Lock:
    def run(self, work: Callable[..., _T], /, *args: object) -> _T:
        """What a function returns that runs while the thread has the lock (csrc/engine/lock.h).

        A block of Python's would not give it back if Ctrl-C came as it ends.

        Raises:
            RuntimeError: the thread has the lock already.
        """

class Planning:
    """An engine's side of planning (csrc/engine/planning.h)."""

    @property
    def directed(self) -> bool: ...
    def set_directed(self, directed: bool, /) -> None: ...
    def set_plans_sources(self, plans: bool, /) -> None: ...
    def make_room(self, iteration: Iteration, index: int) -> None: ...
    def count_recomputed(self, storage: StorageRef) -> None: ...
    def sweep_in_use(self, in_flight: bool, /) -> None: ...
    def begin_streak(self, forwards: int, in_flight: int, leaving_bytes: int, /) -> None: ...
    def extend_streak(self) -> int | None: ...
    def end_streak(self) -> StreakSeen | None: ...

class Engine:
    """What becomes of the storages that autograd saves (csrc/engine/engine.h)."""

    def __init__(self, prefetch_bytes: int | None, schedule: Schedule = ...) -> None: ...
    @property
    def iteration(self) -> Iteration: ...
    @property
    def planning(self) -> Planning: ...
    @property
    def batch_limits(self) -> BatchLimits: ...  # of this engine: what is set there counts
    @property
    def recipes(self) -> Recipes | None:
        """What is known of the operators that made storages; None: nothing is recomputed."""
    @property
    def schedule(self) -> Schedule: ...
    @property
    def windows(self) -> Windows | None: ...
    def set_policy(self, policy: tuple[int, Action | None, bool, bool, list[str], int], /) -> None:
        """A PolicyTable: `min_bytes`, `action`, `asks`, `recipes`, `operators`, `proofs`."""

    def open_recipes(self) -> None: ...  # hears of operators from the next scope on
    def next_iteration(self) -> None: ...
    def set_persistent(self, tensors: Sequence[torch.Tensor]) -> None: ...
    def is_persistent(self, key: int, /) -> bool: ...
    def learn(self) -> None: ...
    def tell(self) -> None: ...  # warns of what there is to tell; without the engine's lock
    def demand(self, entry: Entry) -> StorageRef: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def lock(self) -> Lock: ...
    @property
    def departing(self) -> Departing: ...
    @property
    def timeline(self) -> Timeline: ...

class Handle:
    """What a pack hook returns (csrc/bind/hooks.cpp)."""

    def unpack(self) -> torch.Tensor: ...
    @property
    def entry(self) -> Any: ...
    @property
    def view(self) -> Any: ...
    @property
    def stays(self) -> bool: ...
    @property
    def tensor(self) -> Any: ...

def kept_handle(tensor: torch.Tensor, /) -> Handle: ...  # of a save whose tensor stays
def unpack(handle: Any, /) -> torch.Tensor: ...
def raise_inplace_edit(tensor: str, version: int, expected_version: int, /) -> NoReturn: ...
def observed() -> bool: ...

class HookScope:
    """One installation of an engine's hooks (csrc/bind/hooks.cpp)."""

    unit: str
    action: Action | None
    why_kept: str  # what `action` keeps
    group: int | None
    outer: Any
    ordinal: int
    covered: bool
    pushed: bool
    batch: Batch | None

    def __init__(self, engine: Engine) -> None: ...
    @property
    def engine(self) -> Any: ...
    def pack(self, tensor: torch.Tensor, /) -> Any: ...
    def pack_waiting(self) -> None: ...  # the operators of what waits have run

class IterationRecord:
    """What one iteration was like, in columns (csrc/engine/iteration_record.h)."""

    units: list[str]
    ordinals: list[int]
    nbytes: list[int]
    dtypes: list[torch.dtype]
    actions: list[Action]
    moved: list[bool]
    for_recipe: list[bool]
    held_until: list[int | None]
    last_demand: list[int | None]
    kept_until: list[int | None]
    others: list[list[str]]
    order: list[int]
    gaps_s: list[float]
    costs_s: list[float]
    windows_s: list[float]
    extra_nbytes: list[int]
    tail_s: float
    peak_bytes: int
    regions: list[tuple[str, list[int], int]]
    sends: list[tuple[float, int]]
    fetches: list[tuple[float, int]]

class Moment:
    """A point of a device's work, or of the host's time (csrc/engine/clock.h)."""

    def reached(self) -> bool: ...  # never waits

class Clock:
    """Of one device (csrc/engine/clock.h)."""

    def __init__(self, device: torch.device) -> None: ...
    def now(self) -> Moment | None: ...  # None while a graph is captured

def seconds_between(begin: Moment, end: Moment) -> float: ...  # both were reached

class Recorder:
    """Takes down one iteration (csrc/engine/recorder.h)."""

    workspace: Workspace | None

    def __init__(self, device: torch.device) -> None: ...
    def choose(
        self, unit: str, ordinal: int, nbytes: int, dtype: torch.dtype, action: Action, /
    ) -> None: ...
    def region(
        self, unit: str, inputs: Sequence[torch.Tensor], iteration: Iteration, least_bytes: int
    ) -> None: ...
    def close(self) -> None: ...
    def ready(self) -> bool: ...
    def wait(self) -> None: ...
    def take(self) -> IterationRecord | None: ...

NEVER: int  # a mark that there is not
NO_RECIPE: float  # seconds of a recipe that there is not

class StepRecord:
    """One training step in columns (csrc/engine/step_record.h)."""

    def __init__(
        self,
        *,
        nbytes: Sequence[int],
        held_frame_nbytes: Sequence[int],
        overflow_nbytes: Sequence[int],
        held_until: Sequence[int],
        last_demand: Sequence[int],
        gone_after: Sequence[int],
        recipe_s: Sequence[float],
        inner_nbytes: Sequence[int],
        recipe_sources: Sequence[Sequence[int]],
        for_recipe: Sequence[bool],
        order: Sequence[int],
        gaps_s: Sequence[float],
        windows_s: Sequence[float],
        extra_nbytes: Sequence[int],
    ) -> None: ...

class MachineRates:
    """How fast a machine copies, encodes and decodes: memswap.Rates."""

    def __init__(
        self,
        *,
        d2h_bytes_per_s: float,
        h2d_bytes_per_s: float,
        duplex_d2h_bytes_per_s: float,
        duplex_h2d_bytes_per_s: float,
        encode_bytes_per_s: float,
        decode_bytes_per_s: float,
        copy_latency_s: float,
        codec_latency_s: float,
        copy_share: float,
        inline_codec: bool,
    ) -> None: ...

class Replay:
    """What a plan makes of a step (csrc/engine/replay.h)."""

    @property
    def resident_bytes(self) -> list[int]: ...  # at each mark, the most of it
    @property
    def mark_s(self) -> list[float]: ...  # when each mark was over
    @property
    def peak_bytes(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...  # of these, for what does not fit frames
    @property
    def moved_bytes(self) -> int: ...
    @property
    def pooled_bytes(self) -> int: ...
    @property
    def total_exposed_s(self) -> float: ...
    @property
    def idle(self) -> list[int]: ...  # storages that moved although nobody needed their room
    @property
    def exposed_s(self) -> list[float]: ...  # by storage: waits, and work of its codec
    @property
    def releases(self) -> list[tuple[int, int]]: ...  # mark, send that is released there
    @property
    def departures(self) -> list[tuple[int, int]]: ...  # mark, frame that is released there
    @property
    def fetches(self) -> list[tuple[int, int]]: ...  # demanded storage, one that starts back then
    @property
    def work(self) -> list[tuple[int, int, float, float]]: ...  # what, storage, begin and end

class ReplayedPlan:
    """A plan, and its replay (csrc/engine/replay.h)."""

    @property
    def actions(self) -> bytes: ...
    @property
    def found(self) -> Replay: ...

def replay(
    step: StepRecord,
    rates: MachineRates,
    actions: bytes,
    budget_bytes: int | None,
    spans: bool = ...,
) -> Replay: ...
def replay_without_idle(
    step: StepRecord, rates: MachineRates, actions: bytes, budget_bytes: int | None
) -> ReplayedPlan: ...

class AwayForm:
    """Where a storage's bytes wait (csrc/engine/away.h)."""

    def bring(self) -> tuple[StorageRef, Ticket]: ...
    def wait_sent(self) -> None: ...  # what comes next comes after its way to a pool
    @property
    def device_nbytes(self) -> int: ...
    @property
    def pool_nbytes(self) -> int: ...
    @property
    def can_fetch_ahead(self) -> bool: ...

class BlockForm(AwayForm):
    """Raw bytes in a block of a pool (csrc/engine/block_form.h)."""

    def bring_into(self, leaving: StorageRef, departure: Ticket) -> Ticket: ...

class ProvenRecipe:
    """A recipe that a plan may count on (csrc/engine/proven_recipe.h)."""

    @property
    def words(self) -> str: ...  # "mul(silu(saved), saved)"
    @property
    def seconds(self) -> float: ...
    @property
    def made_nbytes(self) -> int: ...  # the most that it has made at once, its result included
    @property
    def saved(self) -> list[int | None]: ...  # what each "saved" is: a storage of the iteration

class Recipes:
    """The recipes of one engine (csrc/engine/recipes.h)."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def begin_iteration(self) -> None: ...
    def reset_runs(self) -> None: ...
    def before_edits(self, tensors: Sequence[torch.Tensor]) -> None: ...
    # unit, number and nbytes of a place; words, proofs and whether it has failed
    def learnt(self) -> list[tuple[tuple[str, int, int], tuple[str, int, bool]]]: ...
    @property
    def runs(self) -> int: ...
    @property
    def known_storages(self) -> int: ...

RECIPE_PROOFS: int

class VersionGuard:
    def __init__(self, tensor: torch.Tensor) -> None: ...
    @property
    def edited(self) -> bool: ...
    @property
    def version(self) -> int: ...
    @property
    def current_version(self) -> int: ...

class Ticket:
    def wait(self) -> None: ...
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    def abandon(self) -> None: ...
    def failed(self) -> bool: ...
    def storage(self) -> StorageRef | None: ...

class Block:
    @property
    def nbytes(self) -> int: ...
    @property
    def data_ptr(self) -> int: ...
    def write(self, source: torch.Tensor) -> None: ...
    def read(self, destination: torch.Tensor) -> None: ...
    def used_by(self, ticket: Ticket) -> None: ...
    def uses(self) -> list[Ticket]: ...

class Pool:
    def allocate(self, nbytes: int) -> Block | None: ...
    def reserve(self, nbytes: int) -> None: ...
    def wait_reserved(self) -> bool: ...
    def trim(self) -> int: ...
    def set_overflow(self, overflow: Pool) -> None: ...
    @property
    def pageable_bytes(self) -> int: ...  # as in the statistics
    def statistics(self) -> dict[str, int | float | str]: ...

class Lane:
    def send(
        self,
        storage: StorageRef,
        block: Block,
        offset: int = 0,
        nbytes: int | None = None,
        after: Sequence[Ticket] = ...,
    ) -> Ticket: ...
    def fetch(self, block: Block, after: Sequence[Ticket] = ...) -> tuple[StorageRef, Ticket]: ...
    def fetch_into(
        self,
        block: Block,
        storage: StorageRef,
        offset: int,
        after: Sequence[Ticket] = ...,
    ) -> Ticket: ...
    def gather(self, storages: Sequence[StorageRef]) -> tuple[StorageRef, list[int]]: ...
    def settle(self) -> None: ...
    def leaving_bytes(self) -> int: ...
    def set_max_leaving_bytes(self, nbytes: int) -> None: ...

class WorkerLane(Lane):
    def __init__(self, workers: int = 1, max_leaving_bytes: int = 0) -> None: ...
    def stop(self) -> None: ...

class LaneAround(Lane):
    """A lane around another one, to be derived from (csrc/lane/lane_around.h)."""

    def __init__(self, lane: Lane) -> None: ...

class StillLane(Lane):
    """A lane that moves nothing, for benchmarks (csrc/lane/lane_around.h)."""

    def __init__(self, lane: Lane, storage: StorageRef, ticket: Ticket) -> None: ...

class StreamLane(Lane):
    def __init__(self, device: torch.device, max_leaving_bytes: int, chunk_bytes: int) -> None: ...
    @property
    def send_stream(self) -> torch.Stream: ...
    @property
    def fetch_stream(self) -> torch.Stream: ...

class StagedLane(Lane):
    """Between an accelerator and a file, through pinned memory (csrc/lane/staged_lane.h)."""

    def __init__(
        self,
        copies: StreamLane,
        files: WorkerLane,
        pinned: Pool,
        pageable: Pool,
        device: torch.device,
        max_staging_bytes: int,
    ) -> None: ...
    @property
    def send_stream(self) -> torch.Stream: ...
    @property
    def fetch_stream(self) -> torch.Stream: ...
    def staged_bytes(self) -> int: ...
    def finish_writes(self) -> None: ...
    def take_failure(self) -> str: ...  # once

def capture(tensor: torch.Tensor) -> SavedView | None: ...
def storage_key(tensor: torch.Tensor) -> int: ...
def part(whole: StorageRef, offset: int, nbytes: int) -> StorageRef: ...

can_lend: bool  # with this torch

def lend(shell: StorageRef, memory: StorageRef, offset: int, nbytes: int) -> None: ...
def take_back(shell: StorageRef, message: str) -> None: ...
def is_lent(tensor: torch.Tensor) -> bool: ...
def accumulator_has_hooks(leaf: torch.Tensor) -> bool: ...
def count_holders(tensor: torch.Tensor) -> tuple[int, int]: ...
def take_bytes(tensor: torch.Tensor, message: str) -> tuple[StorageRef, StorageRef]: ...
def give_bytes(tensor: torch.Tensor, shell: StorageRef, bytes: StorageRef) -> None: ...
def make_host_pool(
    device: torch.device,
    budget: int | None,
    slab: int,
    numa_node: int | None = None,
    pageable: bool = True,
    keeps_pages: bool = True,
) -> Pool: ...
def make_disk_pool(path: str, budget: int | None, extent: int) -> Pool: ...

class HostLimits:
    available: int
    group: int | None
    lockable: int | None
    locked: int
    free_bytes: int

def host_limits(root: str = "/") -> HostLimits: ...
def numa_nodes(root: str = "/") -> int: ...
def numa_node_of_pci(address: str, root: str = "/") -> int | None: ...

# ---------------------------------------------------------- codec: csrc/codec/, csrc/bind/codec.cpp
# dtype, layout and mode are the codes of docs/format.md sections 2 and 3 (memswap.codec has names
# for them); a unit is 8 bytes.

#: dtype, layout (None: by a sample, in host memory), var_capacity in units (None: the worst case)
FrameOptions: TypeAlias = tuple[int, int | None, int | None]

class FrameSizes:
    """Sizes of a frame, known before anything is encoded."""

    elements: int
    blocks: int
    fixed_nbytes: int  # header, slabs, records
    max_var_units: int  # with so much var every encode fits
    max_nbytes: int  # fixed_nbytes + 8 * max_var_units

def frame_sizes(dtype: int, layout: int, elements: int) -> FrameSizes: ...  # ValueError: no such

class FrameReport:
    """What the encoder found."""

    elements: int
    blocks: int
    dtype: int
    layout: int
    frame_nbytes: int  # fixed part, var_used and overflow_used
    var_capacity: int  # units
    var_used: int  # units
    overflow_used: int  # units
    zeros: int
    center_sum: int
    status: int

class FrameWatch:
    """Outlives the EncodedStorage; holds no memory of the device."""

    def report(self) -> FrameReport | None: ...

class EncodedStorage:
    """One storage's bytes, encoded. May be dropped at any time, on any thread."""

    @property
    def nbytes(
        self,
    ) -> int: ...  # held now; a pool's where the frame was swapped, else the device's
    @property
    def overflow_nbytes(self) -> int: ...  # of the device's arena, held beside nbytes
    @property
    def device_nbytes(self) -> int: ...  # of the device, now
    def wait_sent(self) -> None: ...  # what comes next comes after its way to a pool
    @property
    def swapped(self) -> bool: ...
    def report(self) -> FrameReport | None: ...  # None: not known yet; never waits
    def watch(self) -> FrameWatch: ...

class CodecLane:
    @property
    def last_refusal(self) -> str: ...  # why encode or encode_to last returned None
    def encode(
        self, storage: StorageRef, options: FrameOptions
    ) -> tuple[EncodedStorage, Ticket] | None: ...
    def encode_to(
        self,
        storage: StorageRef,
        options: FrameOptions,
        lane: Lane | None,  # copies the frame; a worker codec lane does it itself
        pool: Pool,
    ) -> tuple[EncodedStorage, Ticket] | None: ...
    def decode(self, encoded: EncodedStorage) -> tuple[StorageRef, Ticket]: ...
    def settle(self) -> None: ...
    def leaving_bytes(self) -> int: ...
    def set_max_leaving_bytes(self, nbytes: int) -> None: ...

class WorkerCodecLane(CodecLane):
    def __init__(
        self,
        workers: int,
        pool: Pool,  # frames; ordinary memory
        outputs: Pool | None = None,  # decoded storages; None: the same pool
        max_leaving_bytes: int = 0,
    ) -> None: ...
    def stop(self) -> None: ...

class StreamCodecLane(CodecLane):
    def __init__(
        self,
        device: torch.device,
        max_leaving_bytes: int = 0,
        arena_budget: int = 0,  # bytes of device memory for what does not fit var; 0: none
        arena_chunk: int = 16 << 20,  # bytes taken at a time, at least
        arena_pool: Pool | None = None,  # of pinned memory, before the device's is taken
    ) -> None: ...
    @property
    def encode_stream(self) -> torch.Stream: ...
    @property
    def decode_stream(self) -> torch.Stream: ...
    @property
    def control_stream(self) -> torch.Stream: ...  # reads headers back
    def arena_statistics(self) -> dict[str, int]: ...
    def set_arena_budget(self, nbytes: int) -> None: ...
    def set_overflow_room(self, nbytes: int | None) -> None: ...  # exactly so many, once for all
    def trim_arena(self) -> int: ...
    def decode_status(self) -> int: ...  # waits for the decodes; 0: all were in order
    def take_decode_status(self) -> int: ...  # never waits; what was found is told once

def register_codec(device_type: str, capsule: object) -> None: ...
def codec_capsule(device: torch.device) -> object | None: ...
def codec_name(device: torch.device) -> str | None: ...

# By device type: why this build has no codec for it, and how to get one.
codecs_left_out: dict[str, str]

# Why the device's codec must not encode a dtype in a layout there, or ""; and all that its
# self-check found wrong, a sentence each.
def codec_fault(device: torch.device, dtype: int, layout: int) -> str: ...
def codec_faults(device: torch.device) -> list[str]: ...

# Frames as tensors of bytes (csrc/codec/tensors.h), behind memswap.encode and memswap.decode.
class DamagedFrameError(RuntimeError): ...

def dtype_code(dtype: torch.dtype) -> int: ...
def encode_tensor(
    tensor: torch.Tensor, dtype: int, layout: int, checksum: bool
) -> torch.Tensor: ...
def choose_layout(tensor: torch.Tensor, dtype: int) -> int: ...  # waits for a device
def exact_frame(frame: torch.Tensor) -> torch.Tensor: ...
def decode_tensor(
    frame: torch.Tensor,
    size: list[int],
    dtype: torch.dtype,
    check_decode: bool,  # which waits
    layout: int | None,
    /,
) -> torch.Tensor: ...
def portable_frame(frame: torch.Tensor) -> torch.Tensor: ...
def read_header(frame: torch.Tensor) -> FrameReport: ...
def frame_of(bytes: memoryview) -> torch.Tensor: ...  # a copy in host memory
def bytes_of(frame: torch.Tensor) -> bytes: ...  # in host memory, contiguous
def spare_pool() -> Pool: ...
