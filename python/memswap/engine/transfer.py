"""Which pool and which lane serve the storages of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from memswap.engine.lane import Lane, open_lane
from memswap.engine.pools import DiskPool, HostPool

Pool: TypeAlias = HostPool | DiskPool


@dataclass(frozen=True, slots=True)
class Route:
    """Where storages of one device go, and on what."""

    pool: Pool
    lane: Lane


def default_pool(device: torch.device) -> Pool:
    """Pinned host memory for an accelerator; a nameless file for a CPU."""
    return DiskPool() if device.type == "cpu" else HostPool(device=device)


def check_pool(pool: Pool | None, device: torch.device | None = None) -> None:
    """Raise if ``pool`` is no pool, or if storages on ``device`` cannot go there yet."""
    if pool is None:
        return
    if not isinstance(pool, HostPool | DiskPool):
        raise TypeError(
            f"pool={pool!r}: found {type(pool).__name__}, expected a memswap.HostPool, a "
            "memswap.DiskPool or None"
        )
    if device is None:
        return
    if isinstance(pool, DiskPool) and device.type != "cpu":
        raise NotImplementedError(
            f"a DiskPool cannot take storages from {device} yet: they would have to pass through "
            "pinned memory (docs/status.md). Use a HostPool, or leave pool=None."
        )


class Routes:
    """The routes of one saver, opened when a device is first seen. Never shared between savers."""

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self._default_pools: dict[str, Pool] = {}
        self._routes: dict[torch.device, Route | None] = {}

    def to(self, device: torch.device) -> Route | None:
        """The route for ``device``, or None where its storages stay.

        Without a pool of the user's, storages in host memory stay wherever an accelerator is
        present: there, host memory is where others are swapped to.
        """
        try:
            return self._routes[device]
        except KeyError:
            route = self._routes[device] = self._open(device)
            return route

    def _open(self, device: torch.device) -> Route | None:
        pool = self._pool
        if pool is not None:
            if device.type == "cpu" and isinstance(pool, HostPool) and pool.pinned:
                return None
            check_pool(pool, device)
        elif device.type == "cpu" and torch.accelerator.is_available():
            return None
        else:
            pool = self._default_pools.get(device.type)
            if pool is None:
                pool = self._default_pools[device.type] = default_pool(device)
        return Route(pool, open_lane(device))

    def open_routes(self) -> list[Route]:
        return [route for route in self._routes.values() if route is not None]

    def bound_leaving(self, nbytes: int) -> None:
        for route in self.open_routes():
            route.lane.set_max_leaving_bytes(nbytes)

    def settle(self) -> None:
        for route in self.open_routes():
            route.lane.settle()
