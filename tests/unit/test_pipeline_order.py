"""What a pipeline's order says, learnt or told: which chunk comes next, and how far it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memswap
from memswap._native import native
from memswap.schedules.pipeline import Itinerary, Slots, Step, split

F, B, W = 0, 1, 2


def happen(itinerary: Itinerary, actions: str) -> None:
    """ "F0 F0 B0.0 ...": forwards of a stage, backwards of (stage.chunk)."""
    for action in actions.split():
        kind, where = action[0], action[1:]
        if kind == "F":
            itinerary.forward(int(where))
        else:
            stage, chunk = (int(part) for part in where.split("."))
            itinerary.backward(Step(stage, chunk, F), B if kind == "B" else W)


def test_an_order_is_known_once_it_was_seen():
    itinerary = Itinerary()
    order = "F0 F0 F0 B0.0 B0.1 B0.2"
    happen(itinerary, order)
    assert itinerary.ahead() == ()
    itinerary.begin()
    happen(itinerary, "F0")
    assert itinerary.distance(Step(0, 0, F)) == 3
    assert itinerary.ahead()[:3] == (Step(0, 1, F), Step(0, 2, F), Step(0, 0, B))
    happen(itinerary, "F0 F0 B0.0")
    assert itinerary.ahead() == (Step(0, 1, B), Step(0, 2, B))


def test_another_number_of_microbatches_is_not_taken_for_the_known_one():
    itinerary = Itinerary()
    happen(itinerary, "F0 F0 B0.0 B0.1")
    itinerary.begin()
    happen(itinerary, "F0 F0 F0")
    assert itinerary.ahead() == ()
    assert itinerary.distance(Step(0, 0, F)) is None
    happen(itinerary, "B0.0 B0.1 B0.2")
    itinerary.begin()
    happen(itinerary, "F0 F0")
    assert itinerary.ahead()[0] == Step(0, 2, F), "of two known orders the latest is expected"
    happen(itinerary, "B0.0")
    assert itinerary.ahead() == (Step(0, 1, B),), "and dropped for the other one when it differs"


def test_two_readings_close_together_are_one_stay():
    itinerary = Itinerary()
    happen(itinerary, "F1 F1 B1.0 W1.0 B1.1 W1.1")
    itinerary.begin()
    happen(itinerary, "F1 F1")
    assert itinerary.readings(Step(1, 0, B), within=1) == 2
    assert itinerary.readings(Step(1, 1, B), within=1) == 2
    happen(itinerary, "B1.0")
    assert itinerary.distance(Step(1, 0, F)) == 1
    far = Itinerary()
    happen(far, "F1 F1 B1.0 B1.1 W1.0 W1.1")
    far.begin()
    happen(far, "F1 F1")
    assert far.readings(Step(1, 0, B), within=1) == 1, "its second reading is too far away"


class Action:
    def __init__(self, text: str) -> None:
        names = {
            "F": "FORWARD",
            "B": "FULL_BACKWARD",
            "I": "BACKWARD_INPUT",
            "W": "BACKWARD_WEIGHT",
        }
        self.stage_index, self.microbatch_index = int(text[0]), int(text[2:])
        self.computation_type = type("Kind", (), {"name": names[text[1]]})


def steps(text: str) -> list[tuple[Step, ...]]:
    return split([Action(one) for one in text.split()])


def test_a_schedules_order_becomes_periods():
    """Of one forward and one backward in turn, each pair is a period like the first."""
    pair = (Step(3, 0, F), Step(3, 0, B))
    assert steps("3F0 3B0 3F1 3B1 3F2 3B2") == [pair]
    both = (Step(1, 0, F), Step(1, 1, F), Step(1, 0, B), Step(1, 1, B))
    assert steps("1F0 1F1 1B0 1B1") == [both]


def test_a_split_backward_reads_twice_but_not_on_the_first_stage():
    for stage, readings in ((1, [0, 0, 1, 1, 2, 2]), (0, [0, 0, 1, 1])):
        order = " ".join(f"{stage}{one}" for one in ["F0", "F1", "I0", "I1", "W0", "W1"])
        assert [step.reading for step in steps(order)[0]] == readings


class Stage:
    def __init__(self, module: nn.Module, index: int) -> None:
        self.submod, self.stage_index = module, index


def test_wrong_arguments_are_refused():
    stage = Stage(nn.Linear(2, 2), 0)
    with pytest.raises(TypeError, match="PipelineStage"):
        memswap.manage_pipeline(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="given twice"):
        memswap.manage_pipeline([stage, stage])
    with pytest.raises(ValueError, match="no stages"):
        memswap.manage_pipeline([])
    with pytest.raises(ValueError, match="ahead=-1"):
        memswap.manage_pipeline(stage, ahead=-1)
    with pytest.raises(ValueError, match="min_gap=0"):
        memswap.manage_pipeline(stage, min_gap=0)


def by_hand(stage: Stage, order: str) -> list[torch.Tensor]:
    """A stage driven in an order by hand; its gradients."""
    stage.submod.zero_grad(set_to_none=True)
    losses: dict[int, torch.Tensor] = {}
    for action in order.split():
        number = int(action[1:])
        if action[0] == "F":
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            losses[number] = stage.submod(x).square().mean()
        else:
            losses.pop(number).backward()
    return [parameter.grad.clone() for parameter in stage.submod.parameters()]


@pytest.fixture
def loads(monkeypatch):
    """For each chunk in order: how many actions before its backward its load was launched."""
    found: list[tuple[str, int]] = []
    launch, notice = native.Batch.launch_load, Slots.backward
    clock = [0]

    def launched(batch, readings=1):
        if batch.phase in (native.Phase.OFFLOADING, native.Phase.OFFLOADED):
            found.append((str(id(batch)), clock[0]))
        launch(batch, readings)

    def backward(schedule, chunk, batch):
        clock[0] += 1
        before = [at for who, at in found if who == str(id(batch))]
        distances.append(clock[0] - before[-1] if before else -1)
        notice(schedule, chunk, batch)

    distances: list[int] = []
    monkeypatch.setattr(native.Batch, "launch_load", launched)
    monkeypatch.setattr(Slots, "backward", backward)
    return distances


ORDER = "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5"


def new_stage() -> Stage:
    torch.manual_seed(0)
    return Stage(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 1)


EVERYTHING = memswap.Policy(memswap.Action.SWAP, min_bytes=1)


def test_a_chunk_is_back_one_slot_before_its_backward(loads, tmp_path):
    stage = new_stage()
    expected = by_hand(stage, ORDER)
    with memswap.manage_pipeline(
        stage, policy=EVERYTHING, pool=memswap.DiskPool(tmp_path), min_gap=4
    ) as manager:
        by_hand(stage, ORDER)
        assert manager.stats().stalls > 0, "the first step cannot know the order"
        loads.clear()
        manager.reset_stats()
        found = by_hand(stage, ORDER)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert manager.stats().stalls == 0
        assert loads == [0, 1, 1, 1, 1, 1] or loads == [1] * 6, loads


def test_no_slot_ahead_means_a_stall_for_each_chunk(tmp_path):
    """Fails the promise on purpose: the load one slot before is what makes the stalls go away."""
    stage = new_stage()
    with memswap.manage_pipeline(
        stage, policy=EVERYTHING, pool=memswap.DiskPool(tmp_path), ahead=0
    ) as manager:
        by_hand(stage, ORDER)
        manager.reset_stats()
        by_hand(stage, ORDER)
        assert manager.stats().stalls == 6, "one for each chunk: the first tensor that is demanded"


def test_what_waits_is_away_and_what_is_needed_soon_stays(tmp_path):
    stage = new_stage()
    with memswap.manage_pipeline(
        stage, policy=EVERYTHING, pool=memswap.DiskPool(tmp_path), min_gap=4
    ) as manager:
        by_hand(stage, "F0 B0 F1 B1")
        manager.reset_stats()
        by_hand(stage, "F0 B0 F1 B1")
        assert manager.stats().moved_storages == 0, "a backward that follows at once needs no swap"
        for _ in range(2):
            manager.reset_stats()
            by_hand(stage, ORDER)
        stats = manager.stats()
        one = stats.moved_bytes // 6
        assert stats.moved_storages > 0
        assert stats.peak_resident_bytes <= 3 * one, "too many microbatches are there"


def test_a_copied_stage_is_not_managed(tmp_path):
    import copy

    stage = new_stage()
    with memswap.manage_pipeline(
        stage, policy=EVERYTHING, pool=memswap.DiskPool(tmp_path)
    ) as manager:
        copied = copy.deepcopy(stage.submod)
        copied(torch.ones(4, 8)).sum().backward()
        assert manager.stats().offered_tensors == 0


def test_evaluation_and_dropped_microbatches_leave_nothing(tmp_path):
    stage = new_stage()
    pool = memswap.DiskPool(tmp_path)
    with memswap.manage_pipeline(stage, policy=EVERYTHING, pool=pool) as manager:
        by_hand(stage, ORDER)
        with torch.no_grad():
            stage.submod(torch.ones(4, 8))
        dropped = [stage.submod(torch.ones(4, 8)) for _ in range(3)]
        del dropped
        expected = by_hand(stage, ORDER)
        manager.remove()
        found = by_hand(stage, ORDER)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert manager.stats().away_bytes == 0


def test_a_paused_pipeline_leaves_forwards_alone(tmp_path):
    stage = new_stage()
    expected = by_hand(stage, ORDER)
    pool = memswap.DiskPool(tmp_path)
    with memswap.manage_pipeline(stage, policy=EVERYTHING, pool=pool) as manager:
        assert manager.units == ("stage 1",)
        manager.pause()
        assert all(map(torch.equal, by_hand(stage, ORDER), expected))
        assert manager.stats().offered_tensors == 0
        manager.resume()
        assert all(map(torch.equal, by_hand(stage, ORDER), expected))
        assert manager.stats().moved_storages > 0
