"""HyperParallel's tensors that are sent and brought back by hand, and storages of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, ValuesView
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
from torch.utils._pytree import tree_iter

from memswap._native import native
from memswap._warn import warn
from memswap.errors import InplaceEditError
from memswap.groups import Added, Groups
from memswap.planning.policy import Policy

if TYPE_CHECKING:
    from memswap._C import Batch


class _Lone:
    """The engine of what moves alone: one, alive as long as something that it moves."""

    engine: ClassVar[ref[Groups] | None] = None


def lone_engine() -> Groups:
    """Groups that move tensors of any size, for what belongs to no manager; the caller holds it."""
    engine = None if _Lone.engine is None else _Lone.engine()
    if engine is None:
        engine = Groups(Policy(min_bytes=1))
        _Lone.engine = ref(engine)
    return engine


class SwapTensor:
    """A tensor that is sent and brought back by hand. Anything else passes through.

    In a :class:`SwapGroup` it moves with the group, through the group's engine.

    Args:
        val: the tensor, or anything else.
        funcname: for messages: what made it.
        group_swap: taken and not needed: storages of up to 1 MiB of a group always travel together.

    Attributes:
        ver: the tensor's version when this was made.
        size: bytes of its storage.
        storage_size: the same.
        is_slice_tensor: whether the storage has more elements than the tensor.
    """

    STATE_DEVICE = "device"
    STATE_HOST = "host"
    STATE_D2H = "d2h"
    STATE_H2D = "h2d"
    STATE_NON_TENSOR = "non_tensor"

    _told_early: ClassVar[bool] = False

    def __init__(self, val: Any, funcname: str = "", group_swap: bool = False) -> None:
        self._val = val
        self.funcname = funcname
        self.group_swap = group_swap
        self._added: Added | None = None
        self._engine: Groups | None = None  # where it moves alone
        self._batch: Batch | None = None
        self.ver: int | None = None
        self.size = self.storage_size = 0
        self.is_slice_tensor = False
        self._state = self.STATE_NON_TENSOR
        if isinstance(val, torch.Tensor):
            self.ver = _version(val)
            self.size = self.storage_size = val.untyped_storage().nbytes()
            self.is_slice_tensor = self.size != val.nbytes
            if not on_host(val):
                self._state = self.STATE_DEVICE

    def __repr__(self) -> str:
        return f"<SwapTensor state={self._state}>"

    @property
    def state(self) -> str:
        """``device``, ``d2h`` (leaving), ``host``, ``h2d`` (returning) or ``non_tensor``."""
        return self._state

    @property
    def val(self) -> Any:
        """:meth:`get_val`."""
        return self.get_val()

    @property
    def val_cpu(self) -> torch.Tensor | None:
        """While the bytes are away: a copy in host memory, made when this is read. Else None."""
        if self._added is None or self._val is not None:
            return None
        return self._added.host_copy()

    def get_val(self) -> Any:
        """The value. A tensor that is away is brought back now, which counts as a stall."""
        if self._added is not None and self._val is None:
            if self._state != self.STATE_H2D and not SwapTensor._told_early:
                SwapTensor._told_early = True
                warn(
                    f"memswap: SwapTensor.get_val(): found the state {self._state!r}, in which "
                    "HyperParallel raises RuntimeError; memswap brings the tensor back now, for "
                    "which this stream waits. Call async_load() or launch_load() ahead of it."
                )
            self._val = self._added.tensor()
            self.ver = _version(self._val)  # it may leave again
            self._state = self.STATE_DEVICE
        return self._val

    def async_offload(self) -> None:
        """Start sending the tensor away."""
        if not self._expect(self.STATE_DEVICE, "async_offload"):
            return
        self._engine = lone_engine()
        batch = self._engine.new("SwapTensor").begin()
        self.join(batch)
        batch.launch_offload()

    def wait_offload(self) -> None:
        """What follows comes after the send, and the memory is free."""
        if self._state != self.STATE_HOST and self._expect(self.STATE_D2H, "wait_offload"):
            assert self._batch is not None
            if self._batch.phase is not native.Phase.OFFLOADED:  # for all that left with it
                self._batch.wait_offload()
            self._state = self.STATE_HOST

    def async_load(self) -> None:
        """Start bringing the tensor back."""
        if self._expect(self.STATE_HOST, "async_load"):
            assert self._batch is not None
            self._batch.launch_load()
            self._state = self.STATE_H2D

    def wait_load(self) -> None:
        """What follows on this stream may use the tensor."""
        if self._state != self.STATE_DEVICE and self._expect(self.STATE_H2D, "wait_load"):
            assert self._batch is not None
            if self._batch.phase is not native.Phase.LOADED:  # for all that came with it
                self._batch.wait_load()
            self.get_val()

    def join(self, batch: Batch) -> None:
        """Leave with a batch, which its owner launches."""
        if self._state != self.STATE_DEVICE or not isinstance(self._val, torch.Tensor):
            return
        version = None if self.ver is None else self._val._version
        if version != self.ver or self._val.untyped_storage().nbytes() != self.size:
            raise InplaceEditError(
                f"SwapTensor {self.funcname!r}: the tensor {list(self._val.shape)} was edited in "
                f"place or resized since the SwapTensor was made: found version {version} and "
                f"{self._val.untyped_storage().nbytes()} bytes, expected version {self.ver} and "
                f"{self.size} bytes. Make the SwapTensor after the last edit, or of a copy."
            )
        self._added = Added.to(batch, self._val.detach())
        self._batch = batch
        self._val = None
        self._state = self.STATE_D2H

    def _expect(self, state: str, call: str) -> bool:
        if self._state == state:
            return True
        if self._state != self.STATE_NON_TENSOR:
            warn(
                f"SwapTensor.{call}(): found the state {self._state!r}, expected {state!r}; "
                "nothing was done"
            )
        return False


def _version(tensor: torch.Tensor) -> int | None:
    """None: tensors of inference mode have none."""
    return None if tensor.is_inference() else tensor._version


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is where others are swapped to."""
    return tensor.device.type == "cpu" and bool(torch.accelerator.is_available())


class Storage:
    """Values by key: those that are saved as they are, and :class:`SwapTensor` among the others."""

    def __init__(self) -> None:
        self.save_storage: dict[Any, list[Any]] = defaultdict(list)
        self.swap_storage: dict[Any, list[Any]] = defaultdict(list)
        self._engine: Groups | None = None  # where it moves alone

    def __getitem__(self, key: Any) -> list[Any]:
        """The list of a key among those that hold :class:`SwapTensor`; made if it is new."""
        return self.swap_storage[key]

    def values(self) -> ValuesView[list[Any]]:
        """The lists that hold :class:`SwapTensor`."""
        return self.swap_storage.values()

    def clear(self) -> None:
        """Let go of everything."""
        self.swap_storage.clear()
        self.save_storage.clear()

    def tensors(self) -> Iterator[SwapTensor]:
        """Every :class:`SwapTensor`, in the order of saving."""
        for values in self.swap_storage.values():
            for value in tree_iter(values):
                if isinstance(value, SwapTensor):
                    yield value

    def launch_offload(self, batch: Batch | None = None) -> None:
        """Start sending all that are on the device, together."""
        if batch is None:
            self._engine = lone_engine()
            batch = self._engine.new("Storage").begin()
            self.launch_offload(batch)
            batch.launch_offload()
            return
        for tensor in self.tensors():
            tensor.join(batch)

    def wait_offload(self) -> None:
        """What follows comes after the sends."""
        for tensor in self.tensors():
            if tensor.state == SwapTensor.STATE_D2H:
                tensor.wait_offload()

    def launch_load(self) -> None:
        """Start bringing all back that are away."""
        for tensor in self.tensors():
            if tensor.state == SwapTensor.STATE_D2H:
                tensor.wait_offload()
            if tensor.state == SwapTensor.STATE_HOST:
                tensor.async_load()

    def wait_load(self) -> None:
        """What follows on this stream may use them."""
        for tensor in self.tensors():
            if tensor.state == SwapTensor.STATE_H2D:
                tensor.wait_load()
