"""Frames under a budget: encode and encode_swap are the planner's to choose, and a budget holds.

Whatever is encoded: random stacks of layers whose activations shrink by more, by less and not at
all, on every schedule; and values that stop shrinking after the plan was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import planned_stacks
import pytest
import torch
from planned_stacks import COMPUTE, LAZY, Layer
from race_workloads import DEVICE, new_pool
from torch import nn

import memswap
from memswap import Action, Rates
from memswap._native import native
from memswap.engine import transfers
from memswap.planning import followed, verdicts
from memswap.planning.director import BudgetDirector
from memswap.planning.profile import measure_codec
from simdev import laboratory, virtual_time

CODED = (Action.ENCODE, Action.ENCODE_SWAP)


def machine(link_gb_per_s: float, codec_gb_per_s: float) -> Rates:
    link, codec = (link_gb_per_s * 1e9,) * 4, (codec_gb_per_s * 1e9,) * 2
    return Rates("simulated", *link, *codec, copy_latency_s=0.5e-6, codec_latency_s=0.5e-6)


#: What the planner is to choose: a link that is too slow for raw bytes; one that is next to none.
LINK_BOUND = machine(0.05, 50.0)
NO_LINK = machine(1e-4, 50.0)


class Masked(Layer):
    """Saves storages of one size: dense ones, half zeros, and a mask."""

    def __init__(self, side: int, repeats: int, generator: torch.Generator) -> None:
        super().__init__(side, repeats, generator)
        self.register_buffer("scale", torch.ones(side, side))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x[: self.side, : self.side].clone()
        for _ in range(self.repeats):
            inner = (inner @ self.weight).tanh() * self.scale
        inner = torch.where(inner > 0, inner * 2, inner * 3).relu() + inner
        return nn.functional.pad(inner, (0, x.shape[1] - self.side, 0, x.shape[0] - self.side))


class Twice(Layer):
    """Saves zeros, mostly, and uses what it saved first once more at its end.

    So its graph has a storage for longer than until the first demand; and frames are so short that
    room for backward is found without waiting for all of them to leave.
    """

    def __init__(self, side: int, repeats: int, generator: torch.Generator) -> None:
        super().__init__(side, repeats, generator)
        mask = torch.rand(side, side, generator=generator) < 0.1
        self.register_buffer("mask", mask.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[: self.side, : self.side] * self.mask
        last = (first @ self.weight) * self.mask * first
        return nn.functional.pad(last, (0, x.shape[1] - self.side, 0, x.shape[0] - self.side)) + x


class Stack(planned_stacks.Stack):
    """A random stack of layers that save what frames make shorter."""

    layer, sides, most_repeats, dtype = Masked, (64, 96, 128), 2, torch.bfloat16

    def __init__(self, seed: int, depth: int = 6) -> None:
        super().__init__(seed, depth)

    def collapse(self) -> None:
        """From now on the exponents of what layers save are wide apart: frames become longer."""
        for layer in self.layers:
            powers = torch.randint(-20, 20, layer.scale.shape, generator=self.generator)
            layer.scale.copy_((2.0**powers).to(DEVICE))

    def gradients(self) -> list[torch.Tensor]:
        return [gradient.view(torch.int16) for gradient in super().gradients()]


KEPT: dict[tuple[type[Layer], int], int] = {}


def kept_bytes(seed: int) -> int:
    """The peak of a stack of which nothing moves."""
    name = Stack.layer, seed
    if name not in KEPT:
        stack = Stack(seed)
        policy = memswap.Policy(min_bytes=1, recipes=False)
        with memswap.manage(
            stack.layers, policy, pool=new_pool(), budget="1GiB", rates=NO_LINK
        ) as manager:
            for _ in range(4):
                stack.step()
            KEPT[name] = manager.plan.kept_peak_bytes
    return KEPT[name]


class Trained:
    """Steady steps of a stack under a budget."""

    def __init__(
        self,
        seed: int,
        share: float,
        rates: Rates = NO_LINK,
        policy: memswap.Policy | None = None,
        collapses: bool = False,
        steps: int = 3,
    ) -> None:
        self.budget = int(share * kept_bytes(seed))
        stack = Stack(seed)
        policy = policy or memswap.Policy(min_bytes=1, recipes=False)
        manager = memswap.manage(
            stack.layers, policy, pool=new_pool(), budget=self.budget, rates=rates
        )
        for _ in range(5):
            stack.step()
        planned = manager.plan
        manager.reset_stats()
        if collapses:
            stack.collapse()
        for _ in range(steps):
            stack.step()
        self.found = stack.gradients()
        self.plan, self.stats = manager.plan, manager.stats()
        self.actions = {one.action for one in planned.storages}
        self.replanned = self.plan.storages != planned.storages
        (sent_by,) = manager._engine.open_transfers()
        self.arena = sent_by.codec_lane.arena_statistics()
        manager.remove()
        after = manager.stats()
        assert after.away_bytes == after.resident_bytes == 0, "something was left behind"
        del sent_by, manager
        plain = Stack(seed)
        if collapses:
            plain.collapse()
        plain.step()
        self.plain = plain.gradients()

    def check(self) -> None:
        assert all(map(torch.equal, self.found, self.plain)), "a gradient differs"
        assert self.plan.peak_bytes <= self.budget
        assert self.stats.peak_resident_bytes <= self.budget, (
            f"{self.stats.peak_resident_bytes} bytes were resident, {self.plan.peak_bytes} "
            f"planned, under a budget of {self.budget}"
        )
        assert self.arena["reserved_bytes"] <= self.plan.arena_bytes, "the arena has grown"


@pytest.mark.parametrize("rates", [LINK_BOUND, NO_LINK], ids=["link-bound", "no-link"])
def test_frames_are_chosen_where_they_pay_and_the_budget_holds(rates):
    found = Trained(1, 0.7, rates)
    found.check()
    assert set(CODED) <= found.actions, "not every kind of frame was chosen"
    assert found.stats.encoded_storages > 0
    assert found.stats.peak_resident_bytes <= found.plan.peak_bytes


@pytest.mark.parametrize("action", CODED)
def test_values_that_stop_shrinking_cost_time_and_never_the_budget(action):
    policy = memswap.Policy(action=action, min_bytes=1)
    found = Trained(1, 0.8, LINK_BOUND, policy, collapses=True)
    assert action in found.actions, "nothing was to be encoded"
    found.check()
    assert not found.replanned, "that was to be another plan's merit"


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_frames_that_stay_longer_than_planned_lead_to_another_plan(monkeypatch):
    monkeypatch.setattr(verdicts, "REFRAME_AFTER", 2)

    def train() -> None:
        found = Trained(1, 0.8, NO_LINK, collapses=True, steps=6)
        found.check()
        assert found.replanned, "the plan still hopes for shorter frames"

    with laboratory(LAZY):
        train()


def broken(name: str) -> contextlib.AbstractContextManager[None]:
    """The engine with one rule broken."""
    patch = pytest.MonkeyPatch()

    @contextlib.contextmanager
    def breaking() -> Iterator[None]:
        if name == "frames may be as long as they like":
            patch.setattr(followed, "frame_nbytes", lambda planned: None)
        elif name == "what does not fit stays":
            full = memswap.HostPool(device=DEVICE, budget="4KiB", slab="4KiB")
            patch.setattr(
                transfers.Transfers,
                "open_blocks",
                lambda own: native.BlockSender(own.lane, full.native),
            )
        elif name == "nobody waits for a frame to leave":
            patch.setattr(followed, "departs", lambda planned: False)
            made = followed.native_plan
            patch.setattr(
                followed,
                "native_plan",
                lambda plan, *rest: made(replace(plan, departures={}), *rest),
            )
        elif name == "each encode has an overflow of its own":
            patch.setattr(BudgetDirector, "_set_overflow_room", lambda self, transfers: None)
            open_lane = transfers.open_codec_lane
            patch.setattr(transfers, "open_codec_lane", lambda device, room: open_lane(device))
        try:
            yield
        finally:
            patch.undo()

    return breaking()


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("rule", "action"),
    [
        ("frames may be as long as they like", Action.ENCODE),
        ("frames may be as long as they like", Action.ENCODE_SWAP),
        ("what does not fit stays", Action.ENCODE),
        ("nobody waits for a frame to leave", Action.ENCODE_SWAP),
        ("each encode has an overflow of its own", Action.ENCODE),
    ],
)
def test_a_broken_rule_breaks_the_budget(rule, action):
    def train() -> None:
        with broken(rule):
            Trained(
                1, 0.8, LINK_BOUND, memswap.Policy(action=action, min_bytes=1), collapses=True
            ).check()

    with pytest.raises(AssertionError, match="bytes were resident"), laboratory(LAZY):
        train()


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("waits", [True, False])
def test_a_frame_that_has_not_left_when_its_storage_is_demanded_is_waited_for(monkeypatch, waits):
    """The graph has the storage for longer, and the plan has given the frame's room away."""
    monkeypatch.setattr(Stack, "layer", Twice)
    monkeypatch.setattr(BudgetDirector, "_set_limit", lambda self: None)  # nothing makes up for it
    if not waits:
        monkeypatch.setattr(followed, "departs", lambda planned: False)
    policy = memswap.Policy(action=Action.ENCODE_SWAP, min_bytes=1)
    with laboratory(LAZY):
        kept_bytes(3)
    with laboratory(LAZY):
        found = Trained(3, 0.8, LINK_BOUND, policy)
        left = sum(map(len, found.plan.departures.values()))
        assert 0 < left < sum(one.action in CODED for one in found.plan.storages)
        if waits:
            found.check()
        else:
            with pytest.raises(AssertionError, match="bytes were resident"):
                found.check()


LINK_GB_PER_S = 0.03


CODEC = {"encode_bytes_per_s": 2.8e9, "decode_bytes_per_s": 2.8e9}


def timed(
    action: Action | None,
    budget: int | None = 1 << 30,
    gb_per_s: float = LINK_GB_PER_S,
    codec: dict[str, float] = CODEC,
) -> tuple[float, memswap.types.Plan | None]:
    """Microseconds of a steady step, on a slow link or another, and its plan.

    `action` None: any but recomputing.
    """
    ways = ("d2h", "h2d", "duplex_d2h", "duplex_h2d")
    alone = {f"{way}_bytes_per_s": gb_per_s * 1e9 for way in ways}
    rates = replace(LINK_BOUND, **alone, **codec)

    def run() -> tuple[float, memswap.types.Plan | None]:
        stack, manager, plan = Stack(1, depth=8), None, None
        with virtual_time(**COMPUTE, h2d_gb_per_s=gb_per_s, d2h_gb_per_s=gb_per_s) as clock:
            if budget is not None:
                policy = memswap.Policy(
                    action=action, min_bytes=1, include=("4", "5", "6", "7"), recipes=False
                )
                manager = memswap.manage(
                    stack.layers, policy, pool=new_pool(), budget=budget, rates=rates
                )
            for _ in range(5):
                stack.step()
            began = clock.elapsed_us()
            stack.step()
            us = clock.elapsed_us() - began
        if manager is not None:
            plan = manager.plan
            manager.remove()
        return us, plan

    with laboratory(LAZY):
        return run()


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
def test_what_frames_cost_is_as_predicted_and_less_than_raw_copies_on_a_slow_link():
    plain_us, _ = timed(None, None)
    _, kept = timed(Action.SWAP)
    for share in (0.9, 0.8):
        budget = int(share * kept.kept_peak_bytes)
        us, plan = timed(Action.ENCODE_SWAP, budget)
        raw_us, _ = timed(Action.SWAP, budget)
        exposed_us, said_us = us - plain_us, plan.exposed_s * 1e6
        assert said_us > 0 and plan.moved_bytes > 0
        assert abs(exposed_us - said_us) <= 0.06 * plain_us + 0.15 * said_us, (
            f"{said_us:.0f} us exposed were predicted, {exposed_us:.0f} found in {plain_us:.0f}"
        )
    assert us < raw_us, f"{us:.0f} us with frames, {raw_us:.0f} with raw copies"
    free_us, plan = timed(None, budget)
    assert set(CODED) & {one.action for one in plan.storages}, "nobody chose frames"
    assert free_us <= 1.02 * us, f"{free_us:.0f} us as planned, {us:.0f} if told what to do"


def measured_codec() -> dict[str, float]:
    """What memswap.profile finds on the simulated device, with short tensors."""

    def run() -> dict[str, float]:
        with virtual_time(**COMPUTE, h2d_gb_per_s=3.0, d2h_gb_per_s=3.0):
            return measure_codec(DEVICE, 256 << 10)

    with laboratory(LAZY):
        return run()


@pytest.mark.own_laboratory
@pytest.mark.one_schedule
@pytest.mark.parametrize("gb_per_s", [0.3, 3.0])
def test_on_a_fast_link_the_codec_costs_no_more_than_measured_rates_predict(gb_per_s):
    """Storages are small: what an encode takes beside its bytes is half of it, and part of that
    runs beside compute, which a prediction does not count on."""
    codec = measured_codec()
    plain_us, _ = timed(None, None, gb_per_s)
    _, kept = timed(Action.SWAP, gb_per_s=gb_per_s)
    us, plan = timed(Action.ENCODE_SWAP, int(0.8 * kept.kept_peak_bytes), gb_per_s, codec)
    exposed_us, said_us = us - plain_us, plan.exposed_s * 1e6
    assert exposed_us > 0 and plan.moved_bytes > 0
    assert exposed_us - 0.01 * plain_us <= said_us <= 2 * exposed_us, (
        f"{said_us:.0f} us exposed were predicted, {exposed_us:.0f} found in {plain_us:.0f}"
    )
