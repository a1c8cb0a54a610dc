"""WindowQueue: which encodes and decodes start in which window, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import pytest

from memswap.engine.windows import LEAST_PENDING_BYTES, WindowQueue

RATE = 1e9  # bytes per second: a megabyte takes a millisecond
MB = 10**6


class FakeIteration:
    began_backward = False

    def __init__(self) -> None:
        self.demanded: set[int] = set()

    def was_demanded(self, index: int) -> bool:
        return index in self.demanded


class FakeEntry:
    def __init__(self, nbytes: int, iteration: FakeIteration) -> None:
        self.nbytes, self.iteration, self.index = nbytes, iteration, nbytes // MB
        self.reference = ref(self)


@dataclass
class FakePending:
    name: str
    owner: FakeEntry
    gain: float = 0.5
    stream: Hashable = "main"

    def __post_init__(self) -> None:
        self.entry, self.nbytes = ref(self.owner), self.owner.nbytes
        del self.owner  # a queue refers weakly


class FakeTicket:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(f"join {self.name}")


@dataclass
class FakeEngine:
    stream: str = "main"
    full: bool = False
    log: list[str] = field(default_factory=list)
    away: set[FakeEntry] = field(default_factory=set)

    def start(self, pending: Any) -> Any:
        if self.full:
            return None
        self.log.append(pending.name)
        return FakeTicket(pending.name, self.log)

    def fetch(self, entry: Any) -> bool:
        self.log.append(f"fetch {entry.nbytes // MB}")
        return entry in self.away

    def on_stream(self, stream: Hashable) -> bool:
        return stream == self.stream


class Bench:
    """A queue, its engine, and entries that are kept alive."""

    def __init__(self, **options: Any) -> None:
        self.queue = WindowQueue(**options)
        self.queue.encode_rate = self.queue.decode_rate = RATE
        self.engine = FakeEngine()
        self.iteration = FakeIteration()
        self.entries: dict[str, FakeEntry] = {}

    def defer(self, name: str, megabytes: float, **options: Any) -> None:
        entry = self.entries[name] = FakeEntry(int(megabytes * MB), self.iteration)
        self.queue.defer(FakePending(name, entry, **options), self.engine)

    def open(self, milliseconds: float) -> list[str]:
        """What the window starts and joins."""
        before = len(self.engine.log)
        self.queue.open(milliseconds * 1e-3, self.engine)
        return self.engine.log[before:]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_window_takes_what_fits_its_operator_and_later_ones_take_the_rest(bench: Bench) -> None:
    for name in "abcd":
        bench.defer(name, 1)
    assert bench.open(2.5) == ["a", "b"]
    assert bench.open(1) == ["join a", "join b", "c"]
    assert bench.open(5) == ["join c", "d"]
    assert bench.queue.stats().encoded_in_windows == 4
    assert bench.queue.stats().pending_bytes == 0


def test_what_does_not_fit_leaves_the_room_to_what_does(bench: Bench) -> None:
    bench.defer("large", 3)
    bench.defer("small", 1)
    assert bench.open(2) == ["small"]


def test_what_is_longer_than_every_window_starts_once_it_has_waited_so_long(bench: Bench) -> None:
    bench.defer("large", 3)
    assert [bench.open(2) for _ in range(4)] == [[], [], ["large"], []]
    assert bench.open(2) == ["join large"], "two windows later it has ended"


def test_what_frees_most_for_its_time_goes_first_and_ties_in_the_order_of_saving(
    bench: Bench,
) -> None:
    bench.defer("activation", 1, gain=0.3)
    bench.defer("another", 1, gain=0.3)
    bench.defer("mask", 1, gain=0.9)
    bench.defer("indices", 1, gain=0.7)
    assert bench.open(3) == ["mask", "indices", "activation"]
    assert bench.open(1)[-1] == "another"


def test_the_lane_is_not_given_more_than_it_can_end(bench: Bench) -> None:
    bench.defer("a", 2)
    bench.defer("b", 2)
    assert bench.open(3) == ["a"]
    assert bench.open(1) == ["join a", "b"], "it has waited for long enough to outlast a window"
    assert bench.open(0.5) == []
    assert bench.open(0.5) == [], "it should end with this window"
    assert bench.open(1) == ["join b"]


def test_an_encode_is_joined_only_when_it_should_have_ended(bench: Bench) -> None:
    bench.defer("a", 2)
    bench.open(2)
    bench.queue.close(bench.engine)
    assert bench.engine.log == ["a", "join a"]


def test_a_window_without_a_known_duration_starts_nothing(bench: Bench) -> None:
    bench.defer("a", 1)
    assert bench.open(0) == []
    assert bench.queue.stats().windows == 1


def test_an_encode_starts_only_on_the_stream_of_its_tensor(bench: Bench) -> None:
    bench.defer("here", 1)
    bench.defer("there", 1, stream="other")
    assert bench.open(5) == ["here"]
    bench.engine.stream = "other"
    assert bench.open(5) == ["there"], "nor is `here` joined from another stream"
    bench.engine.stream = "main"
    assert bench.open(5) == ["join here"]


def test_nothing_starts_once_its_backward_has_begun(bench: Bench) -> None:
    bench.defer("a", 1)
    bench.iteration.began_backward = True
    bench.queue.begin_backward(bench.engine)
    assert bench.open(5) == []
    stats = bench.queue.stats()
    assert (stats.kept_storages, stats.kept_bytes, stats.pending_bytes) == (1, MB, 0)


def test_what_is_under_way_is_joined_when_backward_begins(bench: Bench) -> None:
    bench.defer("a", 1)
    bench.open(1)
    bench.queue.begin_backward(bench.engine)
    assert bench.engine.log == ["a", "join a"]


def test_an_entry_that_died_is_forgotten(bench: Bench) -> None:
    bench.defer("a", 1)
    del bench.entries["a"]
    assert bench.open(5) == []
    assert bench.queue.stats().pending_bytes == 0
    assert bench.queue.stats().kept_storages == 0


def test_no_room_when_an_encode_starts_keeps_the_storage(bench: Bench) -> None:
    bench.defer("a", 1)
    bench.engine.full = True
    assert bench.open(5) == []
    assert bench.queue.stats().kept_storages == 1


def test_beyond_the_bound_encodes_start_without_a_window() -> None:
    bench = Bench(max_pending_bytes=2 * MB)
    for name in "abc":
        bench.defer(name, 1)
    assert bench.engine.log == ["a"]
    assert bench.queue.stats().started_at_bound == 1
    assert bench.queue.stats().pending_bytes == 2 * MB


def test_an_automatic_bound_is_an_eighth_of_a_forward() -> None:
    bench = Bench()
    most = LEAST_PENDING_BYTES // MB
    for i in range(16):
        bench.defer(f"first {i}", most)
    bench.queue.begin_iteration()
    bench.queue.end_forward(bench.engine)
    bench.engine.log.clear()
    for i in range(4):
        bench.defer(f"second {i}", most)
    assert bench.engine.log == ["second 0", "second 1"], "two of sixteen may wait"


@pytest.mark.parametrize("start", [True, False])
def test_what_waits_at_the_end_of_a_forward_starts_or_goes_on_waiting(start: bool) -> None:
    bench = Bench(leftovers_start=start)
    bench.defer("a", 1)
    bench.queue.end_forward(bench.engine)
    assert bench.engine.log == (["a"] if start else [])
    assert bench.queue.stats().started_at_end == int(start)
    assert bench.open(5) == ([] if start else ["a"])


def test_an_encode_that_raises_loses_no_other(bench: Bench) -> None:
    for name in "abc":
        bench.defer(name, 1)

    def broken(pending: Any) -> Any:
        raise RuntimeError("the driver is gone")

    start, bench.engine.start = bench.engine.start, broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="driver"):
        bench.open(5)
    bench.engine.start = start  # type: ignore[method-assign]
    assert bench.open(5)[-2:] == ["b", "c"]


def wanted(bench: Bench, *megabytes: int) -> list[FakeEntry]:
    entries = [FakeEntry(each * MB, bench.iteration) for each in megabytes]
    bench.engine.away.update(entries)
    return entries


def test_decodes_run_in_windows_in_the_order_of_demand(bench: Bench) -> None:
    bench.queue.want(wanted(bench, 1, 2, 3), 100 * MB, bench.engine)
    assert bench.open(3) == ["fetch 1", "fetch 2"]
    assert bench.open(3) == ["fetch 3"]
    assert bench.queue.stats().decoded_in_windows == 3


def test_decodes_come_before_encodes(bench: Bench) -> None:
    bench.defer("a", 1)
    bench.queue.want(wanted(bench, 1), 100 * MB, bench.engine)
    assert bench.open(1) == ["fetch 1"]


def test_half_of_the_prefetch_window_may_wait_and_the_rest_starts_at_once(bench: Bench) -> None:
    bench.queue.want(wanted(bench, 2, 3), 8 * MB, bench.engine)
    assert bench.engine.log == ["fetch 2"]
    assert bench.queue.stats().decoded_ahead == 1


def test_what_came_back_by_itself_costs_no_time(bench: Bench) -> None:
    entries = wanted(bench, 2, 2)
    bench.engine.away.remove(entries[0])
    bench.queue.want(entries, 100 * MB, bench.engine)
    assert bench.open(2) == ["fetch 2", "fetch 2"]
    assert bench.queue.stats().decoded_in_windows == 1


def test_what_was_demanded_before_its_window_is_not_brought_back_again(bench: Bench) -> None:
    bench.queue.want(wanted(bench, 1, 2), 100 * MB, bench.engine)
    bench.iteration.demanded.add(1)
    assert bench.open(5) == ["fetch 2"]
