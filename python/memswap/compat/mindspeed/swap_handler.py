"""MindSpeed's swap handler: the engine behind contexts, one for the process unless told otherwise.

[Note: One handler for the process]
``AsyncSwapHandler()`` is a singleton in MindSpeed, and its users rely on it: they give contexts a
tag and nothing else. So it is one here. It remembers the check that it was given, and weakly
everything else: an engine, with its pool and lanes, is made when the first context or tensor needs
it and belongs to these, so it is gone with them; towers know their contexts weakly.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize, ref

import torch

from memswap._warn import warn
from memswap.compat.mindspeed.swap_keys import (
    CheckFn,
    TensorKey,
    TensorKeyManager,
    TensorLocation,
    is_valid_for_swap,
)
from memswap.compat.mindspeed.swap_towers import Layer, Told, Tower
from memswap.engine.action import Action, TensorInfo
from memswap.groups import Added, Group, Groups
from memswap.planning.policy import Policy, Restricted, checked_policy

if TYPE_CHECKING:
    from memswap._C import Batch
    from memswap.engine.stats import Stats
    from memswap.engine.transfers import Pool


class Arrival:
    """When an added tensor is back: what an event behind its copy would tell."""

    __slots__ = ("_added",)

    def __init__(self, added: Added) -> None:
        self._added = added

    def query(self) -> bool:
        """Whether the tensor is there, or at least not on its way."""
        ticket = self._added.arrival
        return ticket is None or ticket.done()

    def wait(self, stream: object = None) -> None:
        """Order the current stream behind the copy; `stream` is taken and not used."""
        ticket = self._added.arrival
        if ticket is not None:
            ticket.wait()

    def synchronize(self) -> None:
        """Have the host wait for the copy."""
        ticket = self._added.arrival
        if ticket is not None:
            ticket.synchronize()


class SwapTensor:
    """A tensor that can be swapped. Its memory is free once the caller drops the tensor.

    Args:
        tensor: the tensor.
        key: what it is known by: ``(layer, index)``.
        group: the group that it moves with; None: it moves alone, through the engine of the
            handler that contexts without a handler share.
    """

    def __init__(self, tensor: torch.Tensor, key: TensorKey, group: Group | None = None) -> None:
        if group is None:
            group = AsyncSwapHandler().engine.new(f"tensor {key}")
            group.begin()
        self.key = key
        self.size = tensor.size()
        #: Elements of the storage behind the tensor.
        self.storage_size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.is_slice_tensor = self.storage_size != tensor.numel()
        self.batch: Batch = group.newest
        self._group = group  # a handler knows its groups weakly
        self._added = group.add(tensor)

    @property
    def device_tensor(self) -> torch.Tensor:
        """The tensor; brought back now if it is away."""
        return self._added.tensor()

    @property
    def host_tensor(self) -> torch.Tensor:
        """A copy of the tensor in host memory, made when this is read. It stays where it is."""
        return self._added.host_copy()

    @property
    def current_location(self) -> TensorLocation:
        """Where the bytes are, as far as the calls so far say."""
        return TensorLocation.HOST if self._added.away else TensorLocation.DEVICE

    @property
    def h2d_event(self) -> Arrival:
        """Its arrival: ``wait()`` orders the current stream behind it, ``query()`` asks."""
        return Arrival(self._added)

    def async_d2h(self, stream: torch.Stream | None = None) -> None:
        """Start sending this tensor and what was swapped with it; on the lane's own stream."""
        self.batch.launch_offload()

    def wait_d2h_finished(
        self, stream: torch.Stream | None = None, should_wait_streams: bool = True
    ) -> None:
        """What follows comes after the send. The order that is asked for is always kept."""
        if self.batch.launched:
            self.batch.wait_offload()

    def async_h2d(
        self,
        h2d_stream: torch.Stream | None = None,
        should_resize_storage: bool = True,
        working_stream: torch.Stream | None = None,
    ) -> None:
        """Start bringing this tensor and what was swapped with it back, into new memory.

        Args:
            h2d_stream: taken and not used.
            should_resize_storage: taken and not used: the memory is always new.
            working_stream: taken and not used.
        """
        if self.batch.launched:
            self.batch.launch_load()


class _Checks:
    """Which tensors may be swapped: by the context that saves them, or else for all alike."""

    def __init__(self, default: CheckFn | None) -> None:
        self.default = default
        self.of_group: dict[str, CheckFn | None] = {}

    def allows(self, tensor: torch.Tensor, info: TensorInfo) -> bool:
        check = self.of_group.get(info.unit) or self.default
        return check is None or bool(check(tensor))


class _OneForTheProcess(type):
    """Calls give the process's handler, unless they say how another one is to work."""

    _lock = threading.Lock()
    _instance: Any = None

    def __call__(
        cls,
        custom_check_fn: CheckFn | None = None,
        *,
        policy: Policy | None = None,
        pool: Pool | None = None,
    ) -> Any:
        if policy is not None or pool is not None:
            return super().__call__(custom_check_fn, policy=policy, pool=pool)
        with cls._lock:
            if cls._instance is None:
                cls._instance = super().__call__(custom_check_fn)
                return cls._instance
        shared = cls._instance
        if custom_check_fn is not None:
            shared.offer_check(custom_check_fn)
        return shared


class AsyncSwapHandler(metaclass=_OneForTheProcess):
    """The engine behind contexts: one for the process, or one with terms of its own.

    ``AsyncSwapHandler()`` always gives the same object, which contexts without ``handler=`` use.
    With a ``policy`` or a ``pool`` it gives a new one, for ``TensorSwapContext(handler=...)``.

    Args:
        custom_check_fn: whether a tensor may be swapped, for callers and contexts without a check.
        policy: memswap's own terms; default: swap everything, of any size.
        pool: where bytes go; see :class:`memswap.saved_tensors`.
    """

    def __init__(
        self,
        custom_check_fn: CheckFn | None = None,
        *,
        policy: Policy | None = None,
        pool: Pool | None = None,
    ) -> None:
        swap = Policy(Action.SWAP, min_bytes=1)
        chosen = checked_policy(swap if policy is None else policy)
        # Patterns name units, and the units here have names of this file's own.
        self._policy = replace(chosen, include=(), exclude=())
        self._pool = pool
        self._checks = _Checks(custom_check_fn)
        self._engine: ref[Groups] | None = None
        shared = policy is None and pool is None
        self._own_engine = None if shared else self.engine
        self._towers: dict[str, Tower] = {}
        self._told = Told()
        self._lock = threading.Lock()
        self._keys = TensorKeyManager()
        self._layers: WeakValueDictionary[int, Group] = WeakValueDictionary()
        self._told_check = False
        #: The swapped tensors that are alive, by key. (What contexts save has no keys.)
        self.key_to_swap_tensor: WeakValueDictionary[TensorKey, SwapTensor] = WeakValueDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> AsyncSwapHandler:
        return self

    def __reduce__(self) -> tuple[type[AsyncSwapHandler], tuple[()]]:
        return AsyncSwapHandler, ()  # another process has another one of its own

    @property
    def engine(self) -> Groups:
        """What moves: alive as long as a context, a swapped tensor or the caller holds it."""
        engine = None if self._engine is None else self._engine()
        if engine is None:
            # Not through self: the engine must not own the handler.
            engine = Groups(Restricted(self._policy, self._checks.allows), pool=self._pool)
            self._engine = ref(engine)
        return engine

    @property
    def custom_check_fn(self) -> CheckFn | None:
        """Whether a tensor may be swapped, where no context has a check of its own."""
        return self._checks.default

    def set_custom_check_fn(self, fn: CheckFn | None) -> None:
        """The check from now on."""
        self._checks.default = fn

    def offer_check(self, fn: CheckFn) -> None:
        """A check that came with a call for the process's handler: the first one counts."""
        if self._checks.default is None:
            self._checks.default = fn
        elif self._checks.default is not fn and not self._told_check:
            self._told_check = True
            warn(
                "memswap: AsyncSwapHandler(custom_check_fn): the handler of the process exists "
                "and keeps the check that it has; AsyncSwapHandler().set_custom_check_fn(fn) "
                "replaces it, and TensorSwapContext(tag, fn) has one of its own"
            )

    def stats(self) -> Stats:
        """What was done so far, by the engine that is alive."""
        return self.engine.stats()

    # --- for contexts -----------------------------------------------------------------------------

    def join(self, context: Layer, module_tag: str) -> tuple[Tower, int, Group]:
        """A context becomes the next layer of its tag: the tower, its place, and its group."""
        with self._lock:
            tower = self._towers.get(module_tag)
            if tower is None or not tower.contexts():
                tower = self._towers[module_tag] = Tower(module_tag, self._told)
            index = tower.add(context)
            name = f"{module_tag}[{index}]"
            while name in self._checks.of_group:  # in a tower of that tag that was ended
                name += "+"
            self._checks.of_group[name] = None
            finalize(context, self._checks.of_group.pop, name, None)
            return tower, index, self.engine.new(name)

    def last_index(self, module_tag: str) -> int:
        """The place of the last context of a tag; -1: there is none."""
        tower = self._towers.get(module_tag)
        return -1 if tower is None else tower.last_index

    def tags(self) -> list[str]:
        """The tags of the contexts that are alive."""
        return [tag for tag, tower in self._towers.items() if tower.contexts()]

    def end_tower(self, module_tag: str) -> None:
        """Contexts with this tag that are made from now on are another tower."""
        self._towers.pop(module_tag, None)

    def check_for(self, group: Group, fn: CheckFn | None) -> None:
        """The check of one context: nobody else's."""
        self._checks.of_group[group.name] = fn

    # --- one tensor after another, as saved-tensor hooks of one's own would -----------------------

    def get_swap_key(self, layer_idx: int) -> tuple[TensorKey, bool]:
        """The next key of a layer, and whether the layer before has completed."""
        return self._keys.get_key(layer_idx)

    def swap_out_cur_and_release_prev(
        self, tensor: torch.Tensor, layer_idx: int, layer_nums: int
    ) -> torch.Tensor | SwapTensor:
        """Swap a tensor out and wait for the layer before; the tensor itself if it may not.

        Args:
            tensor: what a layer saves.
            layer_idx: the layer's number, from 0.
            layer_nums: how many layers there are; what the last one saves stays.
        """
        if not is_valid_for_swap(tensor, self.custom_check_fn):
            return tensor
        key, completed = self.get_swap_key(layer_idx)
        if completed:
            self.release_device_tensor(layer_idx - 1)
        group = self._layers.get(layer_idx)
        if group is None:
            group = self._layers[layer_idx] = self.engine.new(f"layer {layer_idx}")
            group.begin()
        elif key[1] == 0:
            group.begin()
        swapped = self.key_to_swap_tensor[key] = SwapTensor(tensor, key, group)
        if layer_idx < layer_nums - 1:
            swapped.async_d2h()
        return swapped

    def wait_cur_and_prefetch_next(
        self, tensor: torch.Tensor | SwapTensor, prefetch: bool = True
    ) -> torch.Tensor:
        """The tensor, brought back; the layer before comes after it."""
        if not isinstance(tensor, SwapTensor):
            return tensor
        if prefetch:
            self.prefetch_tensors(*tensor.key)
        return tensor.device_tensor

    def exist(self, key: TensorKey) -> bool:
        """Whether a tensor of this key is alive."""
        return key in self.key_to_swap_tensor

    def release_device_tensor(self, layer_idx: int) -> None:
        """What follows comes after the sends of a layer; nothing if it saved nothing."""
        group = self._layers.get(layer_idx)
        if group is not None and group.newest.launched:
            group.newest.wait_offload()

    def prefetch_tensors(
        self,
        layer_idx: int,
        tensor_idx: int,
        h2d_stream: torch.Stream | None = None,
        d2h_stream: torch.Stream | None = None,
    ) -> None:
        """Start bringing back what comes after a tensor in backward.

        Args:
            layer_idx: of the tensor's key.
            tensor_idx: of the tensor's key.
            h2d_stream: taken and not used.
            d2h_stream: taken and not used.
        """
        for key in self._keys.get_prefetch_keys(layer_idx, tensor_idx):
            swapped = self.key_to_swap_tensor.get(key)
            if swapped is not None:
                swapped.async_h2d()

    @property
    def d2h_stream(self) -> torch.Stream:
        """The stream that sends. It belongs to the engine that is alive; see :attr:`engine`."""
        return self._stream("send_stream", "d2h_stream")

    @property
    def h2d_stream(self) -> torch.Stream:
        """The stream that brings back. As :attr:`d2h_stream`."""
        return self._stream("fetch_stream", "h2d_stream")

    def _stream(self, ours: str, name: str) -> torch.Stream:
        engine = self._own_engine = self.engine  # somebody knows its streams: it stays
        stream: torch.Stream | None = getattr(engine.lane(), ours, None)
        if stream is None:
            raise NotImplementedError(
                f"AsyncSwapHandler.{name}: this process has no accelerator, and tensors in host "
                "memory are copied by threads"
            )
        return stream
