"""Link: when copies in two directions begin and end."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memswap.planning.rates import Rates


class Link:
    """Both directions of a link, each in order; slower while both are busy."""

    def __init__(self, rates: Rates) -> None:
        self._now = 0.0
        self._queues: tuple[deque[list[float]], deque[list[float]]] = (deque(), deque())
        self._rates = (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
        self._latency_s = rates.copy_latency_s
        self._slower = tuple(
            duplex / alone if alone and duplex else 1.0
            for duplex, alone in (
                (rates.duplex_d2h_bytes_per_s, rates.d2h_bytes_per_s),
                (rates.duplex_h2d_bytes_per_s, rates.h2d_bytes_per_s),
            )
        )
        self.begins: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self.ends: tuple[dict[int, float], dict[int, float]] = ({}, {})

    def add(self, direction: int, index: int, nbytes: int, ready_s: float) -> None:
        """A copy that may start at `ready_s`, which is never earlier than in calls before."""
        if self._queues[1 - direction]:
            self._run(ready_s)  # what it slows down, it slows down from here on
        seconds = self._latency_s + nbytes / self._rates[direction]
        self._queues[direction].append([index, seconds, ready_s])

    def end_s(self, direction: int, index: int) -> float:
        """When a copy ends, if nothing else is added before."""
        if index not in self.ends[direction]:
            self._run(inf, (direction, index))
        return self.ends[direction][index]

    def _run_alone(self, direction: int, until_s: float, until: tuple[int, int] | None) -> None:
        """Nothing goes in the other direction."""
        queue, begins, ends = self._queues[direction], self.begins[direction], self.ends[direction]
        now = self._now
        while queue and now < until_s:
            head = queue[0]
            begin_s = max(now, head[2])
            if begin_s >= until_s:
                break
            index, end_s = int(head[0]), begin_s + head[1]
            begins.setdefault(index, begin_s)
            if end_s > until_s:
                head[1] = end_s - until_s
                break
            now = ends[index] = end_s
            queue.popleft()
            if until is not None and until[1] == index:
                self._now = now
                return
        self._now = max(now, until_s) if until_s < inf else now

    def drain(self) -> None:
        """Let everything end."""
        self._run(inf)

    def _run(self, until_s: float, until: tuple[int, int] | None = None) -> None:
        queues = self._queues
        while True:
            for way in (0, 1):
                if not queues[1 - way]:
                    if until is None or until[0] == way:
                        self._run_alone(way, until_s, until)
                    return
            if until is not None and until[1] in self.ends[until[0]]:
                return
            heads = [queue[0] if queue else None for queue in queues]
            waiting = [head for head in heads if head is not None]
            if not waiting or self._now >= until_s:
                return
            active = [head is not None and head[2] <= self._now for head in heads]
            if not any(active):
                self._now = min(until_s, *(head[2] for head in waiting))
                continue
            both = all(active)
            after = min((head[2] for head in waiting if head[2] > self._now), default=inf)
            step_s = min(until_s, after) - self._now
            speeds = [self._slower[way] if both else 1.0 for way in (0, 1)]
            for way, head in enumerate(heads):
                if active[way] and head is not None:
                    self.begins[way].setdefault(int(head[0]), self._now)
                    step_s = min(step_s, head[1] / speeds[way])
            then = self._now + step_s
            for way, head in enumerate(heads):
                if active[way] and head is not None:
                    left_s = head[1] - step_s * speeds[way]
                    head[1] = left_s
                    if left_s <= 1e-12:
                        queues[way].popleft()
                        self.ends[way][int(head[0])] = then
            self._now = then
