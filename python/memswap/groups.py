"""Group: what autograd saves in a block, offloaded and loaded when a scheduler says so.

``saved_tensors`` and ``manage`` decide themselves when something moves. Whoever knows better (a
pipeline schedule, a chain of layers, an experiment) says it with four calls::

    groups = memswap.Groups(pool=pool)
    attention = groups.new("layer 3 attention")

    with attention as batch:            # collects; nothing moves by itself
        h = layer.attention(x)
    batch.launch_offload()              # the copies start, the forward goes on
    ...
    batch.wait_offload()                # from here on the memory is free
    ...
    batch.launch_load()                 # some time before backward gets there
    batch.wait_load()
    loss.backward()

A schedule that is late costs a stall: what backward demands and is not there is brought back then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from memswap._native import native
from memswap.engine.engine import Engine, Schedule
from memswap.engine.handle import Handle, unpack
from memswap.engine.hook_scope import HookScope, OpenBlocks
from memswap.engine.pools import present_device
from memswap.engine.stats import Stats
from memswap.engine.transfers import Pool, check_pool
from memswap.engine.uncopied import Uncopied
from memswap.errors import GroupError
from memswap.hooks.managed import Counted
from memswap.planning.policy import Policy, checked_policy

if TYPE_CHECKING:
    from memswap._C import Batch, Entry, StorageRef
    from memswap.engine.lane import Lane, Ticket


class Groups(Uncopied, Counted):
    """One engine (policy, pool, lanes) for several groups. A storage that two save moves once.

    Args:
        policy: which saved tensors a group can move, and how; default ``Policy()``. The group's
            name is the unit that the policy sees.
        pool: where they go; as for :class:`memswap.saved_tensors`.

    Raises:
        TypeError: no policy, no pool.
        NotImplementedError: ``pool`` cannot serve the tensors' device in this version.
    """

    def __init__(self, policy: Policy | None = None, *, pool: Pool | None = None) -> None:
        check_pool(pool)
        engine = Engine(checked_policy(policy), pool, prefetch_bytes=0, schedule=Schedule.BATCHES)
        super().__init__({"": engine})

    @property
    def engine(self) -> Engine:
        """For who builds on groups inside memswap."""
        return self._engine

    def lane(self) -> Lane | None:
        """What copies an accelerator's tensors; opened now if nothing was copied yet.

        None: there is no accelerator. For who builds on groups inside memswap.
        """
        ahead = [one for one in self.engine.open_transfers() if one.works_ahead]
        device = present_device(None, "Groups")
        if not ahead and device.type != "cpu" and (one := self.engine.transfers(device)):
            ahead = [one]
        return ahead[0].lane if ahead else None

    def new(self, name: str) -> Group:
        """A group of this engine. Names are for messages and policies and need not differ."""
        return Group(name, groups=self)

    def settle(self) -> None:
        """Order everything after the transfers under way, and drop the storages they hold."""
        self.engine.settle()


class Added:
    """A tensor that was added to a group by hand. Its group may move it while this is alive.

    The memory is freed only where nobody else holds the tensor: drop it after adding it.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @classmethod
    def to(cls, batch: Batch, tensor: torch.Tensor) -> Added:
        """Add a tensor to a batch; see :meth:`Group.add`."""
        return cls(HookScope(batch.engine, batch.name, batch=batch).pack(_with_version(tensor)))

    def tensor(self) -> torch.Tensor:
        """The tensor, detached; brought back now if it is away.

        Raises:
            InplaceEditError: it was edited since it was added.
        """
        return unpack(self._handle)

    @property
    def away(self) -> bool:
        """Whether the bytes have left, or are leaving."""
        handle = self._handle
        return isinstance(handle, native.Handle) and not handle.stays and handle.entry.is_away

    def host_copy(self) -> torch.Tensor:
        """The tensor's elements in new host memory. What is away stays away."""
        handle = self._handle
        if not isinstance(handle, native.Handle) or handle.stays:
            return unpack(handle).detach().to("cpu", copy=True)
        storage, arrival = handle.entry.engine.lock.run(_looked_at, handle.entry)
        if arrival is not None:
            arrival.wait()
        return handle.view.rebuild(storage, False).detach().to("cpu", copy=True)

    @property
    def arrival(self) -> Ticket | None:
        """Completion of its way back; None where it is not on its way."""
        handle = self._handle
        if not isinstance(handle, native.Handle) or handle.stays:
            return None
        ticket: Ticket | None = handle.entry.arrival
        return ticket


def _looked_at(entry: Entry) -> tuple[StorageRef, Ticket | None]:
    """An entry's storage, and what it is to be waited for; what is away stays away."""
    if entry.storage is not None:
        return entry.storage, entry.arrival
    storage = entry.identity.lock()
    if storage is None and entry.notice_gone(wait=True):
        assert entry.away is not None  # or it would not be gone
        return entry.away.bring()
    storage = storage or entry.storage  # a send that has failed gave it back
    assert storage is not None
    return storage, None


def _with_version(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of inference mode has no version, which handles ask for: one of its storage."""
    flagged = tensor.is_conj() or tensor.is_neg()
    if not tensor.is_inference() or tensor.layout is not torch.strided or flagged:
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return alias.set_(tensor.untyped_storage(), *place)


class Group(Uncopied):
    """A named group of saved tensors that moves when it is told to.

    ``with group as batch:`` collects what autograd saves inside, as ``saved_tensors`` would.
    Each outermost block begins a new :class:`Batch`, which has the four calls; a scheduler
    with several microbatches in flight keeps one for each, and no call touches another's. The same
    calls on the group are for the newest batch.

    Args:
        name: for messages; also the unit that the policy sees.
        policy: see :class:`Groups`.
        pool: see :class:`Groups`.
        groups: the engine to share with others, instead of ``policy`` and ``pool``.
    """

    def __init__(
        self,
        name: str,
        policy: Policy | None = None,
        *,
        pool: Pool | None = None,
        groups: Groups | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Group(name={name!r}): expected a str")
        if groups is not None and (policy is not None or pool is not None):
            raise TypeError(
                f"Group({name!r}): found groups= beside policy= or pool=; the engine has both"
            )
        if groups is not None and not isinstance(groups, Groups):
            raise TypeError(
                f"Group({name!r}, groups={groups!r}): found {type(groups).__name__}, expected a "
                "memswap.Groups or None"
            )
        self.name = name
        self._groups = Groups(policy, pool=pool) if groups is None else groups
        self._timeline = native.Timeline(0)
        self._newest: Batch | None = None
        self._batches: WeakSet[Batch] = WeakSet()
        self._open = OpenBlocks()
        self._paused = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<group {self.name!r}>"

    # --- collecting -------------------------------------------------------------------------------

    def __enter__(self) -> Batch:
        self._check_open("a block")
        batch = self._collecting() or self.begin()
        scope = HookScope(self._groups.engine, batch.name, batch=batch)
        self._open.enter(scope, installs=not self._paused)
        return batch

    def __exit__(self, *raised: object) -> None:
        self._open.leave()

    def begin(self) -> Batch:
        """Begin a batch without a block: for :meth:`add`, or for hooks of one's own."""
        engine = self._groups.engine
        batch = self._newest = engine.lock.run(self._begin)
        batch.engine = engine
        self._batches.add(batch)
        return batch

    def _begin(self) -> Batch:
        engine = self._groups.engine
        engine.tell_of_pools()  # of the batches before
        if engine.recipes is not None:
            engine.recipes.begin_iteration()
        return native.Batch(engine, self.name, self._timeline.begin())

    def add(self, tensor: torch.Tensor) -> Added:
        """Add a tensor by hand to the open block's batch, or else to the newest.

        What is no plain tensor, or the policy keeps, or belongs to a parameter, stays where it is.
        """
        self._check_open("add()")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"group {self.name!r}: add() found {type(tensor).__name__}, expected a torch.Tensor"
            )
        batch = self._collecting() or self._newest or self.begin()
        return Added.to(batch, tensor)

    def _collecting(self) -> Batch | None:
        """The batch of the block that the thread is in."""
        blocks = self._open.scopes
        return blocks[-1].batch if blocks else None

    @property
    def newest(self) -> Batch:
        """The batch that was begun last.

        Raises:
            GroupError: there was none yet.
        """
        if self._newest is None:
            raise GroupError(
                f"group {self.name!r}: nothing was collected yet; run a forward in `with group:` "
                "or add() a tensor first"
            )
        return self._newest

    def pause(self) -> None:
        """Blocks collect nothing until :meth:`resume`. What was collected can still be moved."""
        self._paused = True

    def resume(self) -> None:
        """Blocks collect again."""
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether blocks collect nothing now."""
        return self._paused

    def close(self) -> None:
        """End the group. Graphs that are alive can still run backward."""
        self._closed = True
        for batch in self._batches:
            batch.close()

    # --- moving: the newest batch ------------------------------------------------------------

    def launch_offload(self) -> None:
        """:meth:`Batch.launch_offload` of the newest batch."""
        self._check_open("launch_offload()")
        self.newest.launch_offload()

    def wait_offload(self) -> None:
        """:meth:`Batch.wait_offload` of the newest batch."""
        self._check_open("wait_offload()")
        self.newest.wait_offload()

    def launch_load(self) -> None:
        """:meth:`Batch.launch_load` of the newest batch."""
        self._check_open("launch_load()")
        self.newest.launch_load()

    def wait_load(self) -> None:
        """:meth:`Batch.wait_load` of the newest batch."""
        self._check_open("wait_load()")
        self.newest.wait_load()

    def stats(self) -> Stats:
        """What was done, by all groups of the engine."""
        return self._groups.stats()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._groups.reset_stats()

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise GroupError(
                f"group {self.name!r} was closed and is asked for {call}; make a new Group"
            )
