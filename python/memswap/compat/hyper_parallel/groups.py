"""HyperParallel's groups of storages by name, and chains of layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from memswap.activations import persistent_storages
from memswap.compat.hyper_parallel.tensors import Storage, new_engine
from memswap.groups import Group
from memswap.layer_chain import CollectedCall, Track
from memswap.module_hooks import ModuleHooks

if TYPE_CHECKING:
    from memswap._C import WeakStorage
    from memswap.engine.group import Generation
    from memswap.engine.stats import Stats
    from memswap.engine.transfer import Pool
    from memswap.groups import Groups
    from memswap.planning.policy import Policy


class SwapGroup:
    """Storages that move together. Each launch takes what has come since the last one."""

    def __init__(self, group_name: str, engine: Groups | None = None) -> None:
        self.group_name = group_name
        self._group = Group(group_name, groups=new_engine() if engine is None else engine)
        self._storages: list[ref[Storage]] = []  # in the order in which they came
        self._away: list[tuple[Generation, list[ref[Storage]]]] = []  # one for each launch
        self._loading: list[list[ref[Storage]]] = []

    def add(self, storage: Storage) -> None:
        """Add a storage; the caller goes on owning it."""
        if all(one() is not storage for one in self._storages):
            self._storages.append(ref(storage))

    def launch_offload(self, copy_stream: torch.Stream | None = None) -> None:
        """Start sending everything that was added and is on the device."""
        fresh = [one for one in self._storages if one() is not None]
        self._storages = []
        if not fresh and self._away:
            return
        generation = self._group.begin()
        for storage in living(fresh):
            storage.launch_offload(generation)
        generation.launch_offload()
        self._away.append((generation, fresh))

    def wait_offload(self) -> None:
        """What follows comes after the last launch.

        Raises:
            GroupError: nothing was launched.
        """
        if not self._away:
            self._group.begin().wait_offload()  # says what to do
        for generation, _ in self._away:
            generation.wait_offload()
        for _, storages in self._away:
            for storage in living(storages):
                storage.wait_offload()

    def launch_load(self, copy_stream: torch.Stream | None = None) -> None:
        """Start bringing back what was launched first and not loaded since: one microbatch.

        Raises:
            GroupError: nothing was launched.
        """
        self._away = [one for one in self._away if list(living(one[1])) or one is self._away[-1]]
        if not self._away:
            if not self._loading:
                self._group.begin().launch_load()  # says what to do
            return
        _, storages = self._away.pop(0)
        for storage in living(storages):
            storage.launch_load()
        self._loading.append(storages)

    def wait_load(self) -> None:
        """What follows on this stream may use what was loaded.

        Raises:
            GroupError: no load was launched.
        """
        if not self._loading:
            self._group.begin().wait_load()  # says what to do
        for storages in self._loading:
            for storage in living(storages):
                storage.wait_load()
                self.add(storage)  # it may leave again
        self._loading = self._loading[-1:]


def living(references: list[ref[Storage]]) -> Iterator[Storage]:
    """Those that somebody still owns."""
    for reference in references:
        storage = reference()
        if storage is not None:
            yield storage


class SwapManager:
    """Groups by name, and chains of layers, of one model.

    Args:
        policy: memswap's own terms; default: what suits the device, of any size.
        pool: where bytes go; see :class:`memswap.saved_tensors`.
    """

    def __init__(self, policy: Policy | None = None, *, pool: Pool | None = None) -> None:
        self.engine = new_engine(policy, pool)
        self._groups: dict[str, SwapGroup] = {}
        self._current = _Current()
        self._chains: list[_Linked] = []

    def add_storage(self, group_name: str, storage: Storage) -> None:
        """Add a storage to a group, which is made if it is new."""
        if group_name not in self._groups:
            self._groups[group_name] = SwapGroup(group_name, self.engine)
        self._groups[group_name].add(storage)

    def launch_offload(self, group_name: str, copy_stream: torch.Stream | None = None) -> None:
        """:meth:`SwapGroup.launch_offload`. RuntimeError: there is no such group."""
        self._group(group_name).launch_offload(copy_stream)

    def wait_offload(self, group_name: str) -> None:
        """:meth:`SwapGroup.wait_offload`. RuntimeError: there is no such group."""
        self._group(group_name).wait_offload()

    def launch_load(self, group_name: str, copy_stream: torch.Stream | None = None) -> None:
        """:meth:`SwapGroup.launch_load`. RuntimeError: there is no such group."""
        self._group(group_name).launch_load(copy_stream)

    def wait_load(self, group_name: str) -> None:
        """:meth:`SwapGroup.wait_load`. RuntimeError: there is no such group."""
        self._group(group_name).wait_load()

    def get_current_group_name(self) -> str:
        """The group of the layer that this thread runs; empty outside of them."""
        return self._current.name

    def set_current_group_name(self, group_name: str) -> None:
        """Set it by hand."""
        self._current.name = group_name

    def set_forward_prefetch_layer(self, first_layer: nn.Module, second_layer: nn.Module) -> None:
        """Chain two layers: what the first saves leaves, and returns when the second's backward
        begins. To be called for each pair, in any order and any number of times; a layer's first
        link counts.

        Raises:
            TypeError: not two modules.
            ValueError: both belong to chains already, and not to the same one.
        """
        for layer in (first_layer, second_layer):
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    f"set_forward_prefetch_layer(): found {type(layer).__name__}, expected two "
                    "layers"
                )
        before, after = self._chain_of(first_layer), self._chain_of(second_layer)
        if before is None and after is None:
            chain = _Linked(self.engine, self._current, len(self._chains))
            self._chains.append(chain)
            chain.insert(0, first_layer)
            chain.insert(1, second_layer)
        elif before is not None and after is None:
            if before.layers[-1] is first_layer:
                before.insert(len(before.layers), second_layer)
        elif before is None and after is not None:
            if after.layers[0] is second_layer:
                after.insert(0, first_layer)
        elif before is not after:
            raise ValueError(
                "set_forward_prefetch_layer(): both layers belong to other chains already; link "
                "layers in the order in which they run"
            )

    def stats(self) -> Stats:
        """What was done so far, for all groups and chains."""
        return self.engine.stats()

    def remove(self) -> None:
        """Take the hooks off all layers. Graphs that are alive can still run backward."""
        for chain in self._chains:
            chain.remove()
        self._chains.clear()

    def _chain_of(self, layer: nn.Module) -> _Linked | None:
        return next((c for c in self._chains if any(one is layer for one in c.layers)), None)

    def _group(self, name: str) -> SwapGroup:
        if name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise RuntimeError(
                f"Group {name} does not exist. Groups so far: {known}; add_storage() makes one."
            )
        return self._groups[name]


class _Current(threading.local):
    name = ""


class _Linked:
    """Layers that were linked one by one."""

    def __init__(self, engine: Groups, current: _Current, number: int) -> None:
        self.layers: list[nn.Module] = []
        self._track = Track(engine, distance=1)
        self._current = current
        self._number = number
        self._hooks = ModuleHooks()

    def insert(self, index: int, layer: nn.Module) -> None:
        self.layers.insert(index, layer)
        self.remove()
        engine = self._track.engine
        names = [f"swap_group_{self._number}_{n}" for n in range(len(self.layers))]
        self._track.groups = [engine.new(name) for name in names]
        for place, module in enumerate(self.layers):
            self._hooks.add(module, place, self._begin)

    def remove(self) -> None:
        self._hooks.remove()
        self._track.settle()

    def _begin(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CollectedCall | None:
        self._current.name = self._track.groups[index].name
        return self._track.begin(index, self._persistent)

    def _persistent(self) -> dict[int, WeakStorage]:
        return persistent_storages(self.layers)
