"""chain: layer after layer is offloaded in the forward and loaded ahead in the backward.

[Note: The chain]
After a layer's forward its group's offload is launched, and it is waited for after the next layer's
forward: the copy has one layer's time, and at most two layers' activations are there. The last
`distance` layers stay, because backward needs them before their copies would pay. In backward the
layer that is `distance` further is loaded when a layer begins.

A layer's backward begins when the first of its saved tensors is demanded. No hook of a tensor or a
module says that as well: a module hook on backward makes the output a view, and neither fires where
the output carries no gradient or `autograd.grad` is called on something inside the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary, ref

from torch import nn

from memswap._native import native
from memswap.hooks.blocks import named_units
from memswap.planning.policy import checked_policy
from memswap.schedules.scheduled import BatchSchedule, ScheduledModules

if TYPE_CHECKING:
    from memswap._C import Batch
    from memswap.engine.transfers import Pool
    from memswap.planning.policy import Policy


class _Pass:
    """One forward through the chain. Owned by its batches, which it knows weakly."""

    def __init__(self) -> None:
        self.batches: WeakValueDictionary[int, Batch] = WeakValueDictionary()
        self.last = -1


class _Reached:
    """What a batch calls when backward reaches its layer."""

    def __init__(self, schedule: LayersAhead, forward: _Pass, index: int) -> None:
        self._schedule = ref(schedule)
        self._forward = forward
        self._index = index

    def __call__(self, batch: Batch) -> None:
        schedule = self._schedule()
        if schedule is None:
            return
        first = max(self._index - schedule.distance, 0)
        with schedule.turns:
            for index in range(self._index, first - 1, -1):
                ahead = self._forward.batches.get(index)
                if ahead is not None and ahead.phase is not native.Phase.COLLECTED:
                    ahead.launch_load()


class LayersAhead(BatchSchedule):
    """The schedule of [Note: The chain].

    Args:
        layers: in the order of their forwards, by name.
        policy: which saved tensors move, and how.
        pool: where they go; None: a default pool of each device.
        distance: how many layers ahead of backward are brought back.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], policy: Policy, pool: Pool | None, distance: int
    ) -> None:
        super().__init__(layers, policy, pool)
        self.distance = distance
        self._index = {name: index for index, name in enumerate(layers)}
        self._forward = _Pass()
        self._waiting: Batch | None = None  # launched, not waited for yet

    def __repr__(self) -> str:
        return f"LayersAhead(distance={self.distance})"

    @property
    def distance(self) -> int:
        """How many layers ahead backward loads, and how many stay; may be set at any time."""
        return self._distance

    @distance.setter
    def distance(self, layers: int) -> None:
        if not isinstance(layers, int) or layers < 1:
            raise ValueError(f"chain(distance={layers!r}): expected 1 or more layers")
        self._distance = layers

    def opens(self, name: str) -> bool:
        if self._forward.last < self._index[name]:
            return self._forward.last < 0
        self._forward = _Pass()
        return True

    def began(self, name: str, batch: Batch) -> None:
        index = self._forward.last = self._index[name]
        self._forward.batches[index] = batch
        batch.on_demand = _Reached(self, self._forward, index)

    def ended(self, name: str, batch: Batch) -> None:
        before, self._waiting = self._waiting, None
        if self._index[name] < len(self._index) - self.distance:
            batch.launch_offload()
            self._waiting = batch
        if before is not None and before.phase in (native.Phase.OFFLOADING, native.Phase.OFFLOADED):
            before.wait_offload()

    def settle(self) -> None:
        self._waiting = None
        super().settle()


def chain(
    layers: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    policy: Policy | None = None,
    *,
    distance: int = 1,
    pool: Pool | None = None,
) -> ScheduledModules:
    """Offload each layer's saved activations after its forward; load them ahead in backward.

    A fixed schedule: where :func:`memswap.manage` learns an order and moves so many bytes ahead,
    this moves whole layers. Adds forward hooks and nothing else, like ``manage``.

    Args:
        layers: in the order in which forward runs them; see :func:`memswap.manage`. A forward may
            leave layers out. Several forwards may be alive, one begun after the other has left the
            chain.
        policy: which saved tensors move; default ``Policy()``.
        distance: how many layers ahead of backward a layer is loaded, and how many stay at the end;
            ``schedule.distance`` of what is returned may be set at any time.
        pool: where they go; see :class:`memswap.saved_tensors`.

    Returns:
        Statistics, pause and resume, and the way to end it.

    Raises:
        TypeError: an element is no module.
        ValueError: no layers, one of them twice, or a ``distance`` below 1.
    """
    units = named_units(layers, "chain()")
    return ScheduledModules(
        units, LayersAhead(units, checked_policy(policy), pool, distance), "chain()"
    )
