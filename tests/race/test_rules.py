"""Ordering rules 2 to 6, broken inside the engine: the promise that each one keeps must fail.

test_edges.py breaks the machine under an engine that is right. Here the engine is wrong, by a
wrapped lane, a wrapped pool or a patched method, in the way that others got it wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from broken_edges import on_every_lane
from helpers import EVERYTHING, new_input, new_stack, same_bits
from race_workloads import (
    DEVICE,
    EAGER,
    MATRIX,
    Workload,
    WrappedLane,
    compute_streams,
    expected,
    fetch_stream,
    lanes_opened,
    new_pool,
    observe,
    one_stream,
    send_stream,
    two_streams,
    two_streams_in_turn,
    until_forgotten,
)

import memswap
from memswap._native import native
from memswap.engine import hook_scope as scope_module
from simdev import _C, laboratory, mutations

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]


# ---------------------------------------------------------------- promises
def promise_no_race(
    workload: Workload, breaking: Callable[[], Any] = contextlib.nullcontext, pool: str = "64MiB"
) -> None:
    for schedule in MATRIX:
        seen = observe(schedule, workload, breaking, prefetch_bytes=0, pool=pool)
        assert not seen.reports, f"stream order: {schedule}: {seen.reports[0]}"


def promise_same_bits(
    workload: Workload, breaking: Callable[[], Any] = contextlib.nullcontext, pool: str = "64MiB"
) -> None:
    right = expected(workload)
    for schedule in MATRIX:
        seen = observe(schedule, workload, breaking, prefetch_bytes=0, pool=pool)
        assert not seen.differs_from(right), f"same bits: {schedule}: gradients differ"


def promise_held_tensors_are_unharmed() -> None:
    """Rule 4."""
    for schedule in MATRIX:
        with laboratory(schedule):
            x = new_input(DEVICE).requires_grad_()
            saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
            with saved:
                held = x.exp()
                alias = held[1:]
                loss = (held.sin() * held).sum()
            try:
                harmed = not same_bits(held, new_input(DEVICE).exp())
                harmed = harmed or not same_bits(alias, new_input(DEVICE).exp()[1:])
            except RuntimeError:  # its storage is too small: whoever launches a read is told
                harmed = True
            del saved, held, alias, loss, x
        assert not harmed, f"held tensors: {schedule}: a tensor that the user holds was released"


def promise_edits_are_noticed(swapped: bool = True) -> None:
    """Rule 5."""
    policy = EVERYTHING if swapped else memswap.Policy(action=memswap.Action.KEEP, min_bytes=1)
    for schedule in MATRIX:
        with laboratory(schedule) as lab:
            x = new_input(DEVICE).requires_grad_()
            with memswap.saved_tensors(policy, pool=new_pool(), prefetch_bytes=0):
                y = x.exp()
            torch.accelerator.synchronize()  # or the edit would meet the send
            y.add_(1)
            raised = False
            try:
                y.sum().backward()
            except RuntimeError as error:
                raised = "modified by an inplace operation" in str(error)
            del x, y
            until_forgotten(lab)
        assert raised, f"edits: {schedule}: backward used a saved tensor that was edited in place"


def promise_no_record_stream(breaking: Callable[[], Any] = contextlib.nullcontext) -> None:
    """Rule 3: on one stream no free has to wait for a recorded stream."""
    most = 0

    def watched(region: Any) -> list[torch.Tensor]:
        nonlocal most
        model = new_stack(DEVICE, depth=1)
        for step in range(3):
            with region():
                loss = model(new_input(DEVICE, seed=step))
            most = max(most, _C.memory_stats(0)["deferred"])
            loss.backward()
            del loss
            most = max(most, _C.memory_stats(0)["deferred"])
        return []

    for schedule in MATRIX:
        observe(schedule, watched, breaking, prefetch_bytes=0)
        assert most == 0, f"record_stream: {schedule}: {most} frees waited for a recorded stream"


class Recording(WrappedLane):
    """Knows which storages left."""

    keys: set[int]

    def send(self, storage: Any, block: Any) -> Any:
        self.keys.add(storage.key)
        return self.lane.send(storage, block)


def promise_parameters_stay() -> None:
    """Rule 6."""
    keys: set[int] = set()

    def react(lane: Any) -> Any:
        recording = Recording(lane)
        recording.keys = keys
        return recording

    with laboratory(EAGER), lanes_opened(react):
        model = new_stack(DEVICE, depth=1)
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)  # a frozen one is nobody's leaf
        with memswap.saved_tensors(EVERYTHING, pool=new_pool()):
            loss = model(new_input(DEVICE).requires_grad_())
        parameters = {native.StorageRef(parameter).key for parameter in model.parameters()}
        loss.backward()
        del loss, model, parameter
    assert keys, "nothing moved: the promise says nothing"
    assert not keys & parameters, "parameters: the storage of a parameter was sent away"


@pytest.mark.parametrize("workload", [one_stream, two_streams], ids=lambda w: w.__name__)
def test_an_unbroken_engine_keeps_every_promise(workload: Workload) -> None:
    promise_no_race(workload)
    promise_same_bits(workload)
    promise_no_race(two_streams_in_turn, pool="32KiB")
    promise_no_record_stream()
    promise_held_tensors_are_unharmed()
    promise_edits_are_noticed(swapped=True)
    promise_edits_are_noticed(swapped=False)
    promise_parameters_stay()


# ---------------------------------------------------------------- broken lanes and pools
class Struck(WrappedLane):
    """A broken lane that counts how often it did its wrong."""

    def __init__(self, lane: Any) -> None:
        super().__init__(lane)
        self.hits = 0


class AsksInsideItsOwnStream(Struck):
    """Rule 2: the current stream is asked for after the lane's own has been made current."""

    def send(self, storage: Any, block: Any) -> Any:
        self.hits += 1
        with self.lane.send_stream:
            return self.lane.send(storage, block)


class FetchesInsideItsOwnStream(Struck):
    """Rules 2 and 3: so the returned storage is allocated there as well.

    The ticket notices that it is waited for elsewhere and tells the allocator: no race, but every
    free then has to wait, which is what the rule is about.
    """

    def fetch(self, block: Any) -> Any:
        self.hits += 1
        with self.lane.fetch_stream:
            return self.lane.fetch(block)


class RemembersAStream(Struck):
    """Rule 2: the stream that was current at the first call is taken for the current one."""

    def __init__(self, lane: Any) -> None:
        super().__init__(lane)
        self.first: torch.Stream | None = None

    def remembered(self) -> torch.Stream:
        self.hits += 1
        if self.first is None:
            self.first = torch.accelerator.current_stream()
        return self.first

    def send(self, storage: Any, block: Any) -> Any:
        with self.remembered():
            return self.lane.send(storage, block)

    def fetch(self, block: Any) -> Any:
        with self.remembered():
            return self.lane.fetch(block)


class LetsGoAtOnce(Struck):
    """Rule 3: the storage is let go of before the send is ordered before its memory's reuse."""

    def send(self, storage: Any, block: Any) -> Any:
        ticket = self.lane.send(storage, block)
        sends = send_stream(self.lane)
        with mutations.drop_waits(waiter=compute_streams(self.lane), source=sends) as dropped:
            ticket.wait()
            self.hits += dropped.hits
        return ticket


def broken_lanes(kind: type[Struck]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    class Hits:
        lanes: list[Struck]

        @property
        def hits(self) -> int:
            return sum(lane.hits for lane in self.lanes)

    @contextlib.contextmanager
    def breaking() -> Iterator[Hits]:
        hits = Hits()
        hits.lanes = []

        def react(lane: Any) -> Any:
            hits.lanes.append(kind(lane))
            return hits.lanes[-1]

        with lanes_opened(react):
            yield hits

    return breaking


@pytest.mark.parametrize(
    ("kind", "workload"),
    [
        (AsksInsideItsOwnStream, one_stream),
        (RemembersAStream, two_streams),
        (LetsGoAtOnce, one_stream),
    ],
    ids=lambda value: value.__name__,
)
def test_a_broken_lane_breaks_its_promises(kind: type[Struck], workload: Workload) -> None:
    with pytest.raises(AssertionError, match="stream order: eager"):
        promise_no_race(workload, broken_lanes(kind))
    with pytest.raises(AssertionError, match="same bits"):
        promise_same_bits(workload, broken_lanes(kind))


def test_returning_into_another_streams_memory_breaks_the_promise() -> None:
    with pytest.raises(AssertionError, match="record_stream: lazy"):
        promise_no_record_stream(broken_lanes(FetchesInsideItsOwnStream))


def test_a_pool_that_forgets_the_tickets_of_a_block_breaks_its_promises() -> None:
    """The pool believes that every return has ended, and hands ranges out without their tickets.

    Nobody but the pool asks whether a return has ended.
    """
    lied = 0

    @contextlib.contextmanager
    def breaking() -> Iterator[Any]:
        nonlocal lied
        lies = on_every_lane(lambda lane: mutations.lying_queries(source=fetch_stream(lane)))
        with lies() as counter:
            try:
                yield counter
            finally:
                lied += counter.hits

    with pytest.raises(AssertionError, match="stream order"):
        promise_no_race(two_streams_in_turn, breaking, pool="32KiB")
    with pytest.raises(AssertionError, match="same bits"):
        promise_same_bits(two_streams_in_turn, breaking, pool="32KiB")
    assert lied > 0, "the lie never changed an answer"


# ---------------------------------------------------------------- a broken engine
def test_releasing_what_somebody_holds_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = scope_module.HookScope.pack

    def releasing(self: Any, tensor: torch.Tensor) -> Any:
        handle = pack(self, tensor)
        if type(handle) is native.Handle and not handle.stays:
            self.engine.settle()
            tensor.untyped_storage().resize_(0)
        return handle

    monkeypatch.setattr(scope_module.HookScope, "pack", releasing)
    with pytest.raises((AssertionError, RuntimeError), match=r"held tensors|illegal|storage"):
        promise_held_tensors_are_unharmed()


@pytest.mark.parametrize("swapped", [True, False], ids=["moved", "kept"])
def test_skipping_the_version_check_breaks_the_promise(
    swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved_unpack(self: Any) -> torch.Tensor:
        storage = self.entry.engine.demand(self.entry)
        return self.view.rebuild(storage, shares_counter=not self.entry.fetched)

    def unpack(handle: Any) -> torch.Tensor:
        if type(handle) is not native.Handle:
            return handle.unpack()
        return handle.tensor if handle.stays else moved_unpack(handle)

    monkeypatch.setattr(scope_module, "unpack", unpack)
    with pytest.raises(AssertionError, match="edits: eager"):
        promise_edits_are_noticed(swapped)


def test_an_edit_during_the_send_is_an_error_and_never_wrong_data() -> None:
    """The copy and the edit race, and what the copy then holds is never read."""
    for schedule in MATRIX:
        with laboratory(schedule) as lab:
            x = new_input(DEVICE).requires_grad_()
            with memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0):
                y = x.exp()
            y.add_(1)
            total = y.sum()
            del y
            torch.accelerator.synchronize()
            try:
                total.backward()
                said = "nothing"
            except RuntimeError as error:
                said = str(error)
            assert "modified by an inplace operation" in said, f"backward said {said}"
            del x, total
            until_forgotten(lab)
            reports = lab.forgive()
        assert all("'aten::add' (write" in report for report in reports), reports


def test_knowing_parameters_by_their_type_alone_breaks_the_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = scope_module.HookScope.pack

    def packed(self: Any, tensor: torch.Tensor) -> Any:
        known = isinstance(tensor, torch.nn.Parameter)
        return pack(self, tensor if known else tensor.detach())  # nobody's leaf

    monkeypatch.setattr(scope_module.HookScope, "pack", packed)
    monkeypatch.setattr(
        scope_module, "is_frozen_parameter", lambda t: isinstance(t, torch.nn.Parameter)
    )
    with pytest.raises(AssertionError, match="parameters: the storage"):
        promise_parameters_stay()
