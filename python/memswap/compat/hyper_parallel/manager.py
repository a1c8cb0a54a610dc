"""HyperParallel's swap manager: groups by name, and the schedule of layers that are linked.

[Note: Links]
A link says two things: the first layer's group leaves after its forward, and the second one's
backward brings it back. So the schedule needs a name and a flag for each layer: which group comes
before it, and whether any comes after it. A layer without a next one stays, since backward begins
there. The first link on either side counts. What is in a group is not the schedule's affair: what
`swap_wrapper` and `checkpoint_wrapper` choose inside the layer, and what users add.

A layer's backward begins when the gradient of one of its outputs is there, or, where no output
carries one, when the first tensor that was saved in it is demanded. Hooks on modules would say it
too, but they make the output a view, which others may not edit in place.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize, ref

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from memswap._warn import UsersLine
from memswap.compat.hyper_parallel.groups import SwapBatch, SwapGroup
from memswap.compat.hyper_parallel.tensors import Storage
from memswap.engine.action import Action, TensorInfo
from memswap.engine.autograd import in_backward
from memswap.engine.transfers import check_pool
from memswap.groups import Groups
from memswap.hooks.module_hooks import ModuleHooks
from memswap.hooks.units import persistent_tensors
from memswap.planning.policy import Policy, Restricted, checked_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from memswap._C import Batch
    from memswap.engine.stats import Stats
    from memswap.engine.transfers import Pool


class SwapManager:
    """Groups by name, and chains of layers. ``SwapManager()`` is always the same object.

    Layers are known weakly: a model that is gone takes its groups along.
    """

    _instance: ClassVar[SwapManager | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __new__(cls) -> SwapManager:
        with cls._making:
            if cls._instance is None:
                made = super().__new__(cls)
                made._begin()
                cls._instance = made
            return cls._instance

    def __deepcopy__(self, memo: dict[int, object]) -> SwapManager:
        return self

    def __reduce__(self) -> tuple[type[SwapManager], tuple[()]]:
        return SwapManager, ()

    def _begin(self) -> None:
        self._policy = Policy(Action.SWAP, min_bytes=1)
        self._pool: Pool | None = None
        self._shared: Groups | None = None
        self._groups: dict[str, SwapGroup] = {}
        self._links: WeakKeyDictionary[nn.Module, Link] = WeakKeyDictionary()
        self._hooks = ModuleHooks()
        self._layer_count = 0
        self._running = _Running()
        self._last_name = ""
        self._numbers = count(1)
        self._told = False
        #: What wrappers allow, by the unit that their scopes name.
        self.wrappers: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def configure(self, policy: Policy | None = None, *, pool: Pool | None = None) -> None:
        """Choose memswap's own terms, before anything is linked or added.

        Args:
            policy: what moves of that which is chosen; default: all of it, swapped, of any size.
                Patterns are not looked at: wrappers choose the modules.
            pool: where bytes go; see :class:`memswap.saved_tensors`.

        Raises:
            RuntimeError: there are groups already.
        """
        if self._groups:
            raise RuntimeError(
                f"SwapManager().configure(): found {len(self._groups)} group(s) already; call it "
                "before layers are linked and storages added, or remove() first"
            )
        check_pool(pool)
        swap = Policy(Action.SWAP, min_bytes=1)
        chosen = swap if policy is None else checked_policy(policy)
        self._policy = replace(chosen, include=(), exclude=())
        self._pool, self._shared = pool, None

    @property
    def shared(self) -> Groups:
        """What moves the groups."""
        if self._shared is None:
            self._shared = Groups(Restricted(self._policy, self._allows), pool=self._pool)
        return self._shared

    def _allows(self, tensor: torch.Tensor, info: TensorInfo) -> bool:
        wrapper = self.wrappers.get(info.unit)
        return wrapper is None or bool(wrapper.allows(tensor))

    # --- groups by name ---------------------------------------------------------------------------

    def add_storage(self, group_name: str, storage: Storage) -> None:
        """Add a storage to a group, which is made if it is new.

        In the forward of a linked layer, with the layer's group: it travels with what the layer
        saves there.
        """
        self._told = True
        running = self._running.calls
        if running and running[-1].link.name == group_name:
            running[-1].batch.add(storage)
        else:
            self._made(group_name).add(storage)

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
        """The group of the linked layer that began last, also after its end, or what was set.

        A thread that has run no layer and set no name sees what any thread named last. Empty before
        the first.
        """
        name = self._running.name
        return self._last_name if name is None else name

    def set_current_group_name(self, group_name: str) -> None:
        """Set it by hand. What wrapped modules choose goes to this group until the next layer."""
        self._name(group_name)
        self._running.by_hand = bool(group_name)

    def collecting(self) -> Batch | None:
        """What is saved now by the wrappers' choice belongs to this batch.

        None: no linked layer runs and no name was set, so each wrapper has a schedule of its own.
        """
        running = self._running
        if running.by_hand:
            batch = self._made(self.get_current_group_name()).collecting()
        elif running.calls:
            batch = running.calls[-1].batch
        else:
            return None
        self._told = True
        return batch.saved

    def stats(self) -> Stats:
        """What was done so far, for all groups and chains."""
        return self.shared.stats()

    def remove(self) -> None:
        """Take the hooks off all layers and forget all groups, names and terms.

        Graphs that are alive can still run backward.
        """
        self._hooks.remove()
        for layer in list(self._links):
            layer.__dict__.pop("_swap_group_name", None)
        if self._shared is not None:
            self._shared.settle()
        self._begin()

    # --- layers -----------------------------------------------------------------------------------

    def set_forward_prefetch_layer(self, first_layer: nn.Module, second_layer: nn.Module) -> None:
        """Link two layers: the first one's group leaves after its forward, and returns when the
        second one's backward begins. To be called for each pair, in any order and any number of
        times. It moves what wrappers choose in the layers and what is added to their groups;
        :func:`memswap.chain` collects by itself.

        Raises:
            TypeError: not two modules.
        """
        for layer in (first_layer, second_layer):
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    f"set_forward_prefetch_layer(): found {type(layer).__name__}, expected two "
                    "layers"
                )
        first, second = self._link(first_layer), self._link(second_layer)
        first.has_next = True
        if second.previous is None:
            second.previous = ref(first)

    def _link(self, layer: nn.Module) -> Link:
        link = self._links.get(layer)
        if link is None:
            name = f"swap_group_{self._layer_count}"
            self._layer_count += 1
            link = self._links[layer] = Link(self, name, self._made(name))
            self._hooks.add(layer, link, self._call_begins, begins_first=True)
            layer._swap_group_name = name
            finalize(layer, self._forget, name, ref(link.group)).atexit = False
        return link

    def _forget(self, name: str, group: ref[SwapGroup]) -> None:
        if name in self._groups and self._groups[name] is group():
            del self._groups[name]
        if not self._groups:
            self._shared = None  # with its pool

    def _made(self, name: str) -> SwapGroup:
        if name not in self._groups:
            self._groups[name] = SwapGroup(name, self.shared)
        return self._groups[name]

    def _group(self, name: str) -> SwapGroup:
        if name not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            raise RuntimeError(
                f"Group {name} does not exist. Groups so far: {known}; add_storage() makes one."
            )
        return self._groups[name]

    def _name(self, name: str) -> None:
        self._running.name = self._last_name = name

    # --- what links say ---------------------------------------------------------------------------

    def _call_begins(
        self, link: Link, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _LinkedCall | None:
        if in_backward():
            return None  # a layer that is computed again
        self._name(link.name)
        self._running.by_hand = False
        batch = link.begin(next(self._numbers))
        if batch.before() is None and torch.is_grad_enabled():
            engine = self.shared.engine
            lasting = persistent_tensors(list(self._links))  # sharding may have replaced parameters
            engine.lock.run(engine.set_persistent, lasting)
        return _LinkedCall(self._running, link, batch)

    def notice_empty(self, line: UsersLine) -> None:
        """Nobody has put anything into a chain that is at work. Said once."""
        if not self._told:
            self._told = True
            line.warn(
                "memswap: SwapManager().set_forward_prefetch_layer() schedules what is in the "
                "layers' groups, and nothing is: wrap the layers (swap_wrapper, "
                "checkpoint_wrapper), or let memswap.chain(layers) collect by itself"
            )


class _Running(threading.local):
    """What a thread runs."""

    def __init__(self) -> None:
        self.calls: list[_LinkedCall] = []
        self.name: str | None = None
        self.by_hand = False


class _LinkedCall:
    """One call of a linked layer, and the batch that it fills."""

    def __init__(self, running: _Running, link: Link, batch: SwapBatch) -> None:
        self._running = running
        self.link = link
        self.batch = batch

    def enter(self, call: object) -> None:
        """It begins."""
        self._running.calls.append(self)

    def leave(self, output: object) -> None:
        """It ends."""
        self.abandon()
        self.link.end(self.batch, output)

    def abandon(self) -> None:
        """It was interrupted: what it has saved so far stays where it is."""
        if self in self._running.calls:
            self._running.calls.remove(self)


class Link:
    """A layer's place in the schedule. See [Note: Links]. Owned by the layer's hooks.

    Args:
        manager: whose schedule it is.
        name: of the layer's group.
        group: that collects what the layer saves.
    """

    def __init__(self, manager: SwapManager, name: str, group: SwapGroup) -> None:
        self._manager = manager
        self.name = name
        self.group = group
        self.previous: ref[Link] | None = None
        self.has_next = False
        self.line = UsersLine.here()
        self._newest: ref[SwapBatch] | None = None
        self._number = 0  # of the last forward

    def begin(self, number: int) -> SwapBatch:
        """A forward begins; forwards are numbered over all layers."""
        batch = self.group.begin()
        previous = None if self.previous is None else self.previous()
        if previous is self:
            batch.before = ref(batch)
        elif previous is not None and previous._newest is not None:
            ran = previous._number > self._number  # in this forward, too
            batch.before = previous._newest if ran else batch.before
        self._newest, self._number = ref(batch), number
        return batch

    def end(self, batch: SwapBatch, output: object) -> None:
        """A forward ends: its group leaves, and that of the layer before has left."""
        if self.has_next:
            self.group.launch_offload(batch=batch)
        else:
            self.group.keep(batch)
        before = batch.before()
        if before is not None and before.launched:
            before.wait_offload()
        reached: Callable[[torch.Tensor], None] = _Reached(self, batch)
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(reached)

    def backward_begins(self, batch: SwapBatch) -> None:
        """A gradient of one of the layer's outputs is there."""
        batch.reached(wait=True)
        for storage in batch.storages():
            self.group.add(storage)  # it may leave again
        if self.has_next and not batch.alive:
            self._manager.notice_empty(self.line)


class _Reached:
    """What a gradient's arrival is told to. The graph owns it, and it the batch."""

    __slots__ = ("_batch", "_link")

    def __init__(self, link: Link, batch: SwapBatch) -> None:
        self._link = link
        self._batch = batch

    def __call__(self, gradient: torch.Tensor) -> None:
        self._link.backward_begins(self._batch)
