"""HyperParallel's groups of storages: what leaves and returns together, one batch per launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from weakref import ref

import torch

from memswap.compat.hyper_parallel.tensors import Storage, lone_engine
from memswap.engine.autograd import NO_TASK, graph_task
from memswap.groups import Group

if TYPE_CHECKING:
    from memswap._C import Batch
    from memswap.groups import Groups


class SwapBatch:
    """What a group sends with one launch: saved tensors, and storages that were added by hand.

    Owns neither: its own batch knows saved tensors weakly, and users own storages.

    Attributes:
        saved: what autograd saves into it.
        before: the batch of the layer before, in the same forward; it is brought back next.
        loading: whether it was told to come back.
    """

    def __init__(self, saved: Batch) -> None:
        self.saved = saved
        self.before: Callable[[], SwapBatch | None] = _nothing
        self.loading = False
        self._storages: list[ref[Storage]] = []
        self._reached_by = NO_TASK
        saved.on_demand = _Demanded(ref(self))

    def add(self, storage: Storage) -> None:
        """Take a storage along; the caller goes on owning it."""
        if all(one() is not storage for one in self._storages):
            self._storages.append(ref(storage))

    def storages(self) -> Iterator[Storage]:
        """Those that somebody still owns."""
        return living(self._storages)

    @property
    def alive(self) -> bool:
        """Whether anything of it may still be asked for."""
        return self.saved.alive or any(True for _ in self.storages())

    @property
    def launched(self) -> bool:
        """Whether it was told to leave."""
        return self.saved.launched

    def launch_offload(self) -> None:
        """Start sending everything that is on the device."""
        for storage in self.storages():
            storage.launch_offload(self.saved)
        self.saved.launch_offload()

    def wait_offload(self) -> None:
        """What follows comes after the launch."""
        self.saved.wait_offload()
        for storage in self.storages():
            storage.wait_offload()

    def launch_load(self) -> None:
        """Start bringing back what is away; nothing where nothing was sent."""
        if self.launched:
            self.loading = True
            self.saved.launch_load()
            for storage in self.storages():
                storage.launch_load()

    def wait_load(self) -> None:
        """What follows on this stream may use the storages. (Saved tensors wait for themselves.)"""
        for storage in self.storages():
            storage.wait_load()

    def reached(self, wait: bool) -> None:
        """Backward begins here: the layer before comes next. Said once for each backward pass."""
        task = graph_task()
        if task == self._reached_by and task != NO_TASK:
            return
        if wait:
            self._reached_by = task
        self.launch_load()
        before = self.before()
        if before is not None and before is not self:
            before.launch_load()
        if wait and self.launched:
            self.wait_load()


class _Demanded:
    """What a batch calls when backward first demands of it."""

    __slots__ = ("_batch",)

    def __init__(self, batch: ref[SwapBatch]) -> None:
        self._batch = batch

    def __call__(self, saved: Batch) -> None:
        batch = self._batch()
        if batch is not None:
            batch.reached(wait=False)


class SwapGroup:
    """Storages that move together. Each launch takes what has come since the last one."""

    def __init__(self, group_name: str, engine: Groups | None = None) -> None:
        self.group_name = group_name
        self._group = Group(group_name, groups=lone_engine() if engine is None else engine)
        self._fresh: list[ref[Storage]] = []  # in the order in which they came
        self._collecting: SwapBatch | None = None  # what is saved into the group by name
        self._batches: list[SwapBatch] = []  # that may be asked for, in the order of their launches
        self._told: set[str] = set()  # which calls came so far

    def add(self, storage: Storage) -> None:
        """Add a storage; the caller goes on owning it."""
        self._fresh = [one for one in self._fresh if one() is not None]
        if all(one() is not storage for one in self._fresh):
            self._fresh.append(ref(storage))

    def begin(self) -> SwapBatch:
        """A new batch, for one forward."""
        self._batches = [batch for batch in self._batches if batch.alive]
        return SwapBatch(self._group.begin())

    def collecting(self) -> SwapBatch:
        """The batch of what is saved into the group by its name until the next launch."""
        if self._collecting is None:
            self._collecting = self.begin()
        return self._collecting

    def keep(self, batch: SwapBatch) -> None:
        """A batch stays on the device; backward may begin with it."""
        self._batches.append(batch)

    def launch_offload(
        self, copy_stream: torch.Stream | None = None, batch: SwapBatch | None = None
    ) -> None:
        """Start sending everything that was added and is on the device.

        Args:
            copy_stream: taken and not used.
            batch: what a layer has saved in this forward; None: what was saved by name.
        """
        if batch is None:
            batch, self._collecting = self._collecting, None
        if batch is None and not self._fresh and self._batches:
            return
        batch = self.begin() if batch is None else batch
        fresh, self._fresh = self._fresh, []
        for storage in living(fresh):
            batch.add(storage)
        batch.launch_offload()
        self._batches.append(batch)
        self._told.add("offload")

    def wait_offload(self) -> None:
        """What follows comes after the last launch.

        Raises:
            GroupError: nothing was launched.
        """
        if "offload" not in self._told:
            self._group.begin().wait_offload()  # says what to do
        for batch in self._batches:
            if batch.launched:
                batch.wait_offload()

    def launch_load(self, copy_stream: torch.Stream | None = None) -> None:
        """Start bringing back what was launched first and not loaded since: one microbatch.

        Raises:
            GroupError: nothing was launched.
        """
        if "offload" not in self._told:
            self._group.begin().launch_load()  # says what to do
        self._told.add("load")
        for batch in self._batches:
            if batch.launched and batch.alive and not batch.loading:
                batch.launch_load()
                return

    def wait_load(self) -> None:
        """What follows on this stream may use what was loaded.

        Raises:
            GroupError: no load was launched.
        """
        if "load" not in self._told:
            self._group.begin().wait_load()  # says what to do
        for batch in self._batches:
            if batch.loading:
                batch.wait_load()
                for storage in batch.storages():
                    self.add(storage)  # it may leave again
        self._batches = [batch for batch in self._batches if not batch.loading]


def living(references: list[ref[Storage]]) -> Iterator[Storage]:
    """Those that somebody still owns."""
    for reference in references:
        storage = reference()
        if storage is not None:
            yield storage


def _nothing() -> None:
    return None
