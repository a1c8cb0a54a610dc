"""Transfers: the lanes, pools and codec of each device. What sends by them is native
(csrc/engine/transfers.h), and asks for each when it is first needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

import torch

from memswap._native import native
from memswap._warn import warn
from memswap.engine.action import Action
from memswap.engine.lane import (
    ARENA_SHARE,
    FIRST_ARENA_BYTES,
    Lane,
    open_codec_lane,
    open_lane,
    open_staged_lane,
    ordinary_pool,
    overflow_pool,
)
from memswap.engine.pools import IN_MEMORY, PAGEABLE, DiskPool, HostPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memswap._C import AwayForm, CodecLane, StorageRef, Ticket

Pool: TypeAlias = HostPool | DiskPool


def default_action(device: torch.device, pool: Pool | None) -> Action:
    """The action of a policy that names none, for a device.

    What a processor would encode it rather recomputes, which takes less time and no bytes at all; a
    storage without a proven recipe is encoded.
    """
    action = action_without_recipe(device, pool)
    return Action.RECOMPUTE if action is Action.ENCODE else action


def action_without_recipe(device: torch.device, pool: Pool | None) -> Action:
    """The action for a storage of a device that has no recipe.

    An accelerator's bytes go to the host. A processor has no larger memory of that speed behind its
    own, so its bytes become frames, unless somebody named a file for them.
    """
    if device.type == "cpu" and not isinstance(pool, DiskPool):
        return Action.ENCODE
    return Action.SWAP


def default_pool(device: torch.device) -> Pool:
    """Pinned host memory for an accelerator; a nameless file for a CPU."""
    if device.type != "cpu":
        return HostPool(device=device)
    pool = DiskPool()
    if pool.in_memory:
        warn(
            f"memswap: what is swapped goes to a file in {pool.path}, {IN_MEMORY}. Name a folder "
            "on a disk: pool=memswap.DiskPool(folder)"
        )
    return pool


def check_pool(pool: Pool | None, device: torch.device | None = None) -> None:
    """Raise if ``pool`` is no pool, or if storages on ``device`` cannot go there."""
    if pool is None:
        return
    if not isinstance(pool, HostPool | DiskPool):
        raise TypeError(no_pool(pool))
    if device is None or not isinstance(pool, HostPool) or not pool.pinned:
        return
    if device.type not in ("cpu", pool.device.type):
        raise NotImplementedError(
            f"this HostPool is pinned for {pool.device}, and {device} cannot copy to it. Use "
            f"memswap.HostPool(device={device.type!r}), or leave pool=None."
        )


def no_pool(found: object) -> str:
    """The message about an argument that is no pool."""
    said = (
        f"pool={found!r}: found {type(found).__name__}, expected a memswap.HostPool, a "
        "memswap.DiskPool or None"
    )
    if not isinstance(found, str | os.PathLike):
        return said
    return f"{said}. For a file in that folder: memswap.DiskPool({str(found)!r})"


def reaches_files(pool: Pool | None, device: torch.device) -> bool:
    """Whether bytes of a device have to pass through pinned memory on their way to a pool."""
    if device.type == "cpu":
        return False
    return isinstance(pool, DiskPool) or (pool is not None and pool.overflow is not None)


def lane_to(pool: Pool, device: torch.device) -> Lane:
    """The lane of a pool for who sends tensor by tensor: threads for each would add up.

    Who does so says itself when a tensor's memory is free in stream order. A bound beside that
    would have an accelerator wait for the first of two long tensors before the second one leaves.
    """
    lane: Lane | None = pool.lanes.get(device)
    if lane is None:
        lane = pool.lanes[device] = open_lane_to(pool, device)
        if device.type != "cpu":
            lane.set_max_leaving_bytes(0)
    return lane


def open_lane_to(pool: Pool | None, device: torch.device) -> Lane:
    """A new lane between a device and a pool."""
    return open_staged_lane(device) if reaches_files(pool, device) else open_lane(device)


def complaints(pool: Pool, lane: Lane, what: str) -> Iterator[tuple[str, str]]:
    """What users are to be told of a pool, once each: a word for it, and the sentence.

    Args:
        pool: where bytes go.
        lane: by which they go.
        what: was to go there, with a verb: "tensors, which are".
    """
    if isinstance(lane, native.StagedLane) and (failure := lane.take_failure()):
        yield "file", f"a file could not take {what} in host memory instead: {failure}"
    if isinstance(pool, HostPool) and (why := pool.take_pageable()):
        yield "pageable", PAGEABLE.format(why)


class Transfers(native.Transfers):
    """How storages leave one device. Lanes and pools are opened when they are first needed.

    Args:
        device: whose storages leave.
        pool: where swapped bytes go; None: a default pool, made when the first storage is swapped.
        default_pools: those that were made, by the type of their device.
    """

    def __init__(
        self, device: torch.device, pool: Pool | None, default_pools: dict[str, Pool]
    ) -> None:
        self.device = device
        self._pool = pool
        self._default_pools = default_pools
        self._lane: Lane | None = None
        self._codec_lane: CodecLane | None = None
        self._opened: set[native.Form] = set()
        #: A CPU's, for decoded storages.
        self._outputs: native.Pool | None = None
        #: An accelerator's, for what does not fit frames.
        self._overflow_pool: HostPool | None = None
        #: Whether the device works while the thread that asks goes on.
        self.works_ahead = device.type != "cpu"
        #: The action of a policy that names none.
        self.default_action = default_action(device, pool)
        #: The action for a storage that was to be recomputed and has no recipe.
        self.without_recipe = action_without_recipe(device, pool)
        #: How long frames are expected to be.
        self.expectations = native.Expectations(device)
        traits = (self.default_action, self.without_recipe, FIRST_ARENA_BYTES, ARENA_SHARE)
        super().__init__(device, self.expectations, traits)

    def open(self, form: native.Form) -> None:
        """Have a sender of a form, unless there is one already or no codec serves the device."""
        if form in self._opened:
            return
        if form is native.Form.BLOCK:
            self.set_blocks(self.open_blocks())
        elif frames := self.open_frames(form):
            self.set_frames(form, frames)
        self._opened.add(form)

    def send(
        self, form: native.Form, storage: StorageRef, key: tuple[str, int, int, torch.dtype]
    ) -> tuple[AwayForm, Ticket] | native.Refused:
        """Start sending a storage. (An engine's storages are sent natively.)

        Args:
            form: what it is sent as.
            storage: of the device.
            key: which tensor it is, step after step: see `Key`.

        Returns:
            The away form and its departure, or why the storage stays.
        """
        self.open(form)
        return super().send(form, storage, key)

    def open_blocks(self) -> native.BlockSender:
        """A sender of raw bytes."""
        return native.BlockSender(self.lane, self.pool.native)

    def open_frames(self, form: native.Form) -> native.FrameSender | None:
        """A sender of frames of a form; None where no codec serves the device."""
        if native.codec_name(self.device) is None:
            return None
        if form is native.Form.FRAME:
            return native.FrameSender(self.codec_lane, self.works_ahead)
        return native.FrameSender(self.codec_lane, self.works_ahead, self.lane, self.pool.native)

    @property
    def pool(self) -> Pool:
        """Where swapped bytes go."""
        if self._pool is not None:
            return self._pool
        kind = self.device.type
        if kind not in self._default_pools:
            self._default_pools[kind] = default_pool(self.device)
        return self._default_pools[kind]

    def use(self, pool: Pool, lane: Lane) -> None:
        """Send to a pool by a lane that others use as well, instead of ones of its own.

        Before anything was sent to a pool.
        """
        self._pool, self._lane = pool, lane

    @property
    def copies(self) -> bool:
        """Whether anything went to the pool so far."""
        return self._lane is not None

    @property
    def lane(self) -> Lane:
        """Copies raw bytes, and frames that go to a pool."""
        if self._lane is None:
            self._lane = open_lane_to(self._pool, self.device)
        return self._lane

    @property
    def codec_lane(self) -> CodecLane:
        """Encodes and decodes."""
        if self._codec_lane is None:
            if self.device.type == "cpu":
                pool, frames = self._pool, None
                # A frame is made in memory, and one that overflows would be in a file.
                if isinstance(pool, HostPool) and pool.overflow is None:
                    frames = pool.native
                self._outputs = ordinary_pool(keeps_pages=True)
                self._codec_lane = open_codec_lane(self.device, frames, self._outputs)
            else:
                self._overflow_pool = overflow_pool(self.device)
                self._codec_lane = open_codec_lane(self.device, self._overflow_pool.native)
        return self._codec_lane

    def describe_overflow(self) -> list[str]:
        """The host memory that was taken for frames that turn out longer than expected."""
        pool = self._overflow_pool
        if pool is None or not pool.statistics().reserved_bytes:
            return []
        return [f"for frames that turn out longer: {pool.describe()}"]

    def trim_outputs(self) -> None:
        """Give back what no decoded storage of a CPU uses."""
        if self._outputs is not None:
            self._outputs.trim()

    def complaints(self, what: str) -> Iterable[tuple[str, str]]:
        """What users are to be told of the pool, as far as something went there."""
        return () if self._lane is None else complaints(self.pool, self._lane, what)

    def settle(self) -> None:
        """Order the caller after everything under way, and drop the storages it holds."""
        # Frames are encoded before they are copied.
        for lane in (self._codec_lane, self._lane):
            if lane is not None:
                lane.settle()


class OpenTransfers:
    """The transfers of one engine, opened when a device is first seen. Engines share none."""

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self._default_pools: dict[str, Pool] = {}
        self._transfers: dict[torch.device, Transfers | None] = {}

    def to(self, device: torch.device) -> Transfers | None:
        """The transfers of ``device``, or None where its storages stay.

        Without a pool of the user's, storages in host memory stay wherever an accelerator is
        present: there, host memory is where others are swapped to.
        """
        try:
            return self._transfers[device]
        except KeyError:
            transfers = self._transfers[device] = self._open(device)
            return transfers

    def _open(self, device: torch.device) -> Transfers | None:
        pool = self._pool
        if pool is not None:
            if device.type == "cpu" and isinstance(pool, HostPool) and pool.pinned:
                return None
            check_pool(pool, device)
        elif device.type == "cpu" and torch.accelerator.is_available():
            return None
        return Transfers(device, pool, self._default_pools)

    def all(self) -> list[Transfers]:
        return [one for one in self._transfers.values() if one is not None]

    def pools(self) -> list[Pool]:
        """Those that something went to so far, each once."""
        return list({id(one.pool): one.pool for one in self.all() if one.copies}.values())

    def settle(self) -> None:
        for transfers in self.all():
            transfers.settle()

    def check_decodes(self) -> None:
        for transfers in self.all():
            transfers.check_decodes(wait=True)
