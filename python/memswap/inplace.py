"""swap_out and swap_in: one tensor that keeps its identity (optimizer state, buffers)."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

import torch

from memswap._native import native
from memswap._warn import warn
from memswap.engine.transfers import check_pool, complaints, default_pool, lane_to
from memswap.errors import NotSwappedError, SharedStorageError, TransferError

if TYPE_CHECKING:
    from memswap._C import Block, StorageRef
    from memswap.engine.lane import Lane, Ticket
    from memswap.engine.transfers import Pool

#: Where a tensor has its `Away`. Who takes a tensor's bytes sets it: they are taken once.
AWAY_ATTRIBUTE = "_memswap_away"


@dataclass(slots=True)
class Away:
    """The bytes of one tensor while it has none. The tensor owns this: they die together."""

    departure: Ticket
    shell: StorageRef
    """The tensor's own storage, without memory."""

    def arrived(self, storage: StorageRef, arrival: Ticket) -> StorageRef:
        """The bytes for what the current stream does next: fetched, or those of a failed send.

        Args:
            storage: into which they are fetched.
            arrival: of the fetch.

        Raises:
            memswap._C.TransferError: they cannot be read, and the send had not failed.
        """
        try:
            arrival.wait()
        except native.TransferError:
            kept = self.departure.storage()
            if kept is None:
                raise
            return kept  # the send failed, and the bytes never left
        return storage

    def give(self, tensor: torch.Tensor, storage: StorageRef) -> None:
        """Have the tensor own its bytes again, which ends this."""
        native.give_bytes(tensor, self.shell, storage)
        delattr(tensor, AWAY_ATTRIBUTE)


@dataclass(slots=True)
class _SwappedOut(Away):
    """The bytes of a tensor that :func:`swap_out` has moved."""

    pool: Pool
    block: Block
    lane: Lane


def swap_out(tensor: torch.Tensor, pool: Pool | None = None) -> bool:
    """Move the bytes of a tensor away; the tensor keeps its identity, shape and version.

    Until :func:`swap_in`, reading or writing the tensor raises an error that says so. The host does
    not wait for the copy. On an accelerator the memory is free for what follows on the current
    stream, which is ordered after the copy; on a CPU, once a thread has written the bytes.

    Args:
        tensor: a plain tensor that nobody else shares: no view, alias or autograd graph.
        pool: where the bytes go. Default: one pool for all tensors of the device that are away so,
            which is made for the first one and given back with the last; pass a pool to keep it.

    Returns:
        Whether the bytes are away. False: the pool had no room, and the tensor is as it was.

    Raises:
        TypeError: it is no tensor.
        SharedStorageError: somebody else can see the storage; says who.
        ValueError: the tensor is already away, or is no plain tensor with a storage.
        NotImplementedError: the pool cannot serve the tensor's device in this version.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"swap_out(): found {type(tensor).__name__}, expected a torch.Tensor")
    if getattr(tensor, AWAY_ATTRIBUTE, None) is not None:
        raise ValueError("swap_out(): the tensor is already swapped out; call swap_in() first")
    if native.capture(tensor) is None:
        raise ValueError(
            f"swap_out(): found {type(tensor).__name__} {list(tensor.shape)} on {tensor.device}; "
            "expected a plain strided tensor with at least one element"
        )
    shared = why_shared(tensor)
    if shared:
        raise SharedStorageError(
            f"swap_out(): {shared}. Emptying the storage would change what they see. Drop them "
            "first, or clone the tensor."
        )
    if pool is None:
        pool = shared_pool(tensor.device)
    check_pool(pool, tensor.device)
    block = pool.native.allocate(native.StorageRef(tensor).nbytes)
    if block is None:
        return False
    lane = lane_to(pool, tensor.device)
    for _, words in complaints(pool, lane, "tensors that went before, which are"):
        warn(f"memswap.swap_out: {words}")
    message = (
        f"memswap: this tensor ({tensor.dtype}, {list(tensor.shape)}) is swapped out; call "
        "memswap.swap_in(tensor) before using it"
    )
    storage, shell = native.take_bytes(tensor, message)
    try:
        departure = lane.send(storage, block)
    except BaseException:
        native.give_bytes(tensor, shell, storage)
        raise
    departure.abandon()  # or else it would hold the memory until somebody waits
    setattr(tensor, AWAY_ATTRIBUTE, _SwappedOut(departure, shell, pool, block, lane))
    return True


def swap_in(tensor: torch.Tensor) -> None:
    """Bring back the bytes of a tensor that :func:`swap_out` moved away.

    The tensor is the same object with the same storage, bytes and version; memory is allocated on
    the current stream, which waits for the copy.

    Raises:
        NotSwappedError: the tensor is not away.
        TransferError: the pool cannot give the bytes back; the tensor stays away.
    """
    away = getattr(tensor, AWAY_ATTRIBUTE, None)
    if away is None:
        raise NotSwappedError("swap_in(): the tensor is not swapped out; nothing to bring back")
    if not isinstance(away, _SwappedOut):
        raise NotSwappedError(
            "swap_in(): the tensor is state of a managed optimizer, not swapped out; look at it "
            "inside `with managed.present():` (memswap.manage_optimizer)"
        )
    storage, arrival = away.lane.fetch(away.block)
    try:
        storage = away.arrived(storage, arrival)
    except native.TransferError as error:
        raise TransferError(f"swap_in(): the bytes cannot be read back: {error}") from error
    away.give(tensor, storage)


#: The pools of tensors that went away without one, by process and device. Only the tensors own
#: them: with the last one that is away its pool goes, and its threads.
_shared_pools: WeakValueDictionary[tuple[int, torch.device], Pool] = WeakValueDictionary()
_making = threading.Lock()


def shared_pool(device: torch.device) -> Pool:
    """The pool that tensors of a device share where the user names none."""
    key = os.getpid(), device
    with _making:
        pool = _shared_pools.get(key)
        if pool is None:
            pool = _shared_pools[key] = default_pool(device)
        return pool


Holders: TypeAlias = tuple[int, int, int]
"""References to a tensor, its storage, and the storage's Python object."""


def why_shared(tensor: torch.Tensor, new: Holders | None = None) -> str:
    """Who else could see the tensor's bytes; an empty string if nobody.

    Counts references beside those of a new tensor, so no number here depends on how torch's Python
    objects hold its native ones.

    Args:
        tensor: the one that is asked about.
        new: those of a new tensor of its device (`holders_of_new`), where many are asked about.
    """
    of_tensor, of_storage, of_object = _holders(tensor)
    new_tensor, new_storage, new_object = new or holders_of_new(tensor.device)
    if of_tensor > new_tensor:
        return (
            "an autograd graph or other native code holds the tensor "
            f"({of_tensor - new_tensor} more reference(s) than a new tensor has)"
        )
    if of_storage > new_storage:
        return (
            f"{of_storage - new_storage} other holder(s) share its storage (a view, a detached "
            "alias, or a tensor that a graph saved)"
        )
    if of_object > new_object:
        return "somebody holds a Python UntypedStorage of the tensor"
    return ""


def holders_of_new(device: torch.device) -> Holders:
    """What a tensor has that nobody else can see."""
    return _holders(torch.empty(1, device=device))


def _holders(tensor: torch.Tensor) -> Holders:
    storage = tensor.untyped_storage()  # made if there is none yet, so it is always counted
    of_tensor, of_storage = native.count_holders(tensor)
    return of_tensor, of_storage, sys.getrefcount(storage)
