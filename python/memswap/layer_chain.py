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

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn

from memswap.activations import (
    checked_policy,
    named_units,
    persistent_tensors,
)
from memswap.engine.autograd import in_backward
from memswap.engine.group import Generation, GroupScope, Phase
from memswap.groups import Group, Groups
from memswap.hooks.managed import Managed
from memswap.planning.policy import Policy

if TYPE_CHECKING:
    from memswap.engine.group import GroupEngine
    from memswap.engine.transfer import Pool


class _Pass:
    """One forward through the chain. Owned by its generations, which it knows weakly."""

    def __init__(self) -> None:
        self.generations: WeakValueDictionary[int, Generation] = WeakValueDictionary()
        self.last = -1

    def begins_before(self, index: int) -> bool:
        return self.last < index


class _Reached:
    """What a generation calls when backward reaches its layer."""

    def __init__(self, track: Track, journey: _Pass, index: int) -> None:
        self._track = ref(track)
        self._journey = journey
        self._index = index

    def __call__(self, generation: Generation) -> None:
        track = self._track()
        if track is None:
            return
        first = max(self._index - track.distance, 0)
        for index in range(self._index, first - 1, -1):
            ahead = self._journey.generations.get(index)
            if ahead is not None and ahead.phase is not Phase.COLLECTED:
                ahead.launch_load()


class Track:
    """The schedule of [Note: The chain] for groups of one engine.

    Args:
        shared: the engine of the groups.
        distance: how many groups ahead backward loads, and how many stay at the end: at least one.
    """

    def __init__(self, shared: Groups, distance: int) -> None:
        self.shared = shared
        self.distance = distance
        self.groups: list[Group] = []
        self._journey = _Pass()
        self._waiting: Generation | None = None  # launched, not waited for yet

    def begin(
        self, index: int, persistent: Callable[[], list[torch.Tensor]]
    ) -> CollectedCall | None:
        """A layer's forward begins. None: autograd does not record it.

        `persistent`: asked, where a forward begins, for the storages of parameters and buffers.
        """
        if not torch.is_grad_enabled() or in_backward():
            return None
        group = self.groups[index]
        if not self._journey.begins_before(index):
            self._journey = _Pass()
        journey = self._journey
        engine = self.shared.engine
        with engine.lock:
            if journey.last < 0:
                engine.set_persistent(persistent())
            generation = group.begin()
            journey.last = index
            journey.generations[index] = generation
            generation.on_demand = _Reached(self, journey, index)
        return CollectedCall(engine, generation, functools.partial(self._collected, index))

    def _collected(self, index: int, generation: Generation) -> None:
        """The forward of a layer has ended."""
        before, self._waiting = self._waiting, None
        if index < len(self.groups) - max(self.distance, 1):
            generation.launch_offload()
            self._waiting = generation
        if before is not None and before.phase in (Phase.OFFLOADING, Phase.OFFLOADED):
            before.wait_offload()

    def settle(self) -> None:
        """Nothing more is to be waited for."""
        self._waiting = None
        self.shared.settle()


class CollectedCall(GroupScope):
    """One call of a module whose saved tensors are a generation."""

    __slots__ = ("_collected",)

    def __init__(
        self,
        engine: GroupEngine,
        generation: Generation,
        collected: Callable[[Generation], None],
    ) -> None:
        super().__init__(engine, generation)
        self._collected = collected

    def leave(self, output: object = None) -> None:
        super().leave()
        self._collected(self.generation)


class Chain(Managed):
    """What :func:`chain` returns: statistics, pause and resume, and the way to end it."""

    def __init__(
        self, units: Mapping[str, nn.Module], distance: int, policy: Policy, pool: Pool | None
    ) -> None:
        shared = Groups(policy, pool=pool)
        super().__init__(shared.engine)
        self._units = dict(units)
        self._track = Track(shared, distance)
        self._track.groups = [shared.new(name) for name in self._units]
        self._paused = False
        self._add(dict(enumerate(self._units.values())), "chain()")

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the layers, in the order given."""
        return tuple(self._units)

    @property
    def distance(self) -> int:
        """How many layers ahead backward loads, and how many stay; may be set at any time."""
        return self._track.distance

    @distance.setter
    def distance(self, layers: int) -> None:
        self._track.distance = checked_distance(layers)

    def pause(self) -> None:
        """Forwards that begin now are left alone. Graphs that are alive go on as they were."""
        self._paused = True

    def resume(self) -> None:
        """Forwards are offloaded again."""
        self._paused = False

    def remove(self) -> None:
        """Take the hooks off the layers. Graphs that are alive can still run backward.

        Raises:
            TransferError: backward has met a frame that is not what was encoded (broken memory).
        """
        self._hooks.remove()
        self._track.settle()
        super().remove()

    def _begin(
        self, key: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CollectedCall | None:
        return None if self._paused else self._track.begin(key, self._persistent)

    def _persistent(self) -> list[torch.Tensor]:
        return persistent_tensors(self._units.values())


def chain(
    layers: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    policy: Policy | None = None,
    *,
    distance: int = 1,
    pool: Pool | None = None,
) -> Chain:
    """Offload each layer's saved activations after its forward; load them ahead in backward.

    A fixed schedule: where :func:`memswap.manage` learns an order and moves a window of bytes,
    this moves whole layers. Adds forward hooks and nothing else, like ``manage``.

    Args:
        layers: in the order in which forward runs them; see :func:`memswap.manage`. A forward may
            leave layers out. Several forwards may be alive, one begun after the other has left the
            chain.
        policy: which saved tensors move; default ``Policy()``.
        distance: how many layers ahead of backward a layer is loaded, and how many stay at the end.
        pool: where they go; see :class:`memswap.saved_tensors`.

    Raises:
        TypeError: an element is no module.
        ValueError: no layers, one of them twice, or a ``distance`` below 1.
    """
    units = named_units(layers, "chain()")
    return Chain(units, checked_distance(distance), checked_policy(policy), pool)


def checked_distance(distance: int) -> int:
    """The distance, if it is one."""
    if not isinstance(distance, int) or distance < 1:
        raise ValueError(f"chain(distance={distance!r}): expected 1 or more layers")
    return distance
