"""manage(model) that is left all choices declines where what moves frees little and takes time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget_layers import rates_for
from helpers import assert_nothing_left, assert_same_gradients, gradients
from torch import nn

import memswap
from memswap import Action
from memswap.planning import worth
from memswap.planning.holding import MOST_BEGUN, SAMPLES

pytestmark = pytest.mark.one_schedule

WIDTH, ROWS = 256, 128  # what a layer saves is larger than 64 KiB

#: After so many iterations a comparison is over, and has been read.
DECIDED = worth.WARM_UP + 2 * SAMPLES


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() + x


class Model(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Whole(nn.Module):
    """A model without repeated blocks is a unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).sin().square().mean()


def new_model(device: torch.device, kind: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(device)


def loss(model: nn.Module, device: torch.device, rows: int = ROWS) -> torch.Tensor:
    found: torch.Tensor = model(torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH).to(device))
    return found


def step(model: nn.Module, device: torch.device, rows: int = ROWS) -> list[torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss(model, device, rows).backward()
    return gradients(model)


class Clock:
    """What an iteration takes: a second if it is a plain one, and more if something moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, longer: float) -> None:
        clock = self
        self.now_s, self.longer, self.manager = 0.0, longer, None

        class Moment(float):
            def reached(self) -> bool:
                return True

        class OfDevice:
            def __init__(self, device: torch.device) -> None: ...

            def now(self) -> Moment:
                return Moment(clock.now_s)

        monkeypatch.setattr(worth, "Clock", OfDevice)
        monkeypatch.setattr(worth, "seconds_between", lambda begin, end: end - begin)

    def moved(self, manager: memswap.types.Manager, body: Callable[[], object]) -> int:
        """Storages that moved in one iteration, which takes its time."""
        manager.reset_stats()
        body()
        found = manager.stats().moved_storages
        self.now_s += 1 + self.longer * (found > 0)
        return found


@pytest.mark.parametrize("kind", [Model, Whole])
def test_what_frees_little_and_takes_time_stays_and_the_plan_says_so(device, monkeypatch, kind):
    """Statistics are reset in between, as training loops do that print them."""
    model, clock = new_model(device, kind), Clock(monkeypatch, longer=0.1)
    plain = step(model, device)
    with memswap.manage(model) as manager:
        found = []
        for _ in range(DECIDED + (kind is Whole)):  # whose first call is not seen to begin one
            body = lambda: assert_same_gradients(step(model, device), plain)  # noqa: E731
            found.append(clock.moved(manager, body))
            assert manager.plan is None
        assert all(found[: worth.WARM_UP]), "it declined before anything was compared"
        assert sum(moved == 0 for moved in found) == SAMPLES, "half of the others are plain"
        for _ in range(4):
            assert clock.moved(manager, body) == 0, "what was declined is moved"
        plan = manager.plan
        assert plan is not None and plan.moved_bytes == 0 and plan.declined
        assert plan.peak_bytes == plan.kept_peak_bytes > 0
        assert "declined, everything stays: moving" in str(plan)
        assert "10.0% longer than the model's own" in str(plan) and "does not pay" in str(plan)
        assert plan.why_declined() in manager.report()
    assert manager.plan is plan, "it is told afterwards as well"
    assert_nothing_left(manager.stats())


def run(
    manager: memswap.types.Manager, clock: Clock, body: Callable[[], object], number: int
) -> int:
    """In how many of so many iterations everything stayed."""
    return sum(clock.moved(manager, body) == 0 for _ in range(number))


def test_what_takes_no_longer_moves_on(device, monkeypatch):
    model, clock = new_model(device), Clock(monkeypatch, longer=0.005)
    with memswap.manage(model) as manager:
        assert run(manager, clock, lambda: step(model, device), DECIDED) == SAMPLES
        assert run(manager, clock, lambda: step(model, device), 8) == 0
        assert manager.plan is None and "declined" not in manager.report()


@pytest.mark.parametrize("least", ["LEAST_BYTES", "LEAST_SHARE"])
def test_where_more_is_freed_no_step_is_plain(device, monkeypatch, least):
    """The bytes that are saved are not taken to see what that costs."""
    model, clock = new_model(device), Clock(monkeypatch, longer=9.0)
    monkeypatch.setattr(worth, "LEAST_BYTES", 0)
    monkeypatch.setattr(worth, "LEAST_SHARE", 0.0)
    if least == "LEAST_SHARE":  # of 1.5 MiB of parameters
        monkeypatch.setattr(worth, "LEAST_SHARE", 1 / 64)
    with memswap.manage(model) as manager:
        assert run(manager, clock, lambda: step(model, device), DECIDED + 8) == 0
        assert manager.plan is None


def test_without_memory_for_a_plain_step_none_is_tried(device, monkeypatch):
    monkeypatch.setattr(worth, "free_bytes", lambda device: 0)
    model, clock = new_model(device), Clock(monkeypatch, longer=9.0)
    with memswap.manage(model) as manager:
        assert run(manager, clock, lambda: step(model, device), DECIDED + 8) == 0


def test_a_longer_sequence_moves_from_its_first_step_on(device, monkeypatch):
    """Short ones were found not to pay. A long one may need the memory."""
    model, clock = new_model(device), Clock(monkeypatch, longer=0.1)
    plain, longer = step(model, device), step(model, device, 4 * ROWS)
    with memswap.manage(model) as manager:
        run(manager, clock, lambda: step(model, device), DECIDED)
        for _ in range(3):
            short = lambda: assert_same_gradients(step(model, device), plain)  # noqa: E731
            assert clock.moved(manager, short) == 0
            long = lambda: assert_same_gradients(step(model, device, 4 * ROWS), longer)  # noqa: E731
            assert clock.moved(manager, long) > 0
        assert manager.plan is not None


def test_long_sequences_before_the_ones_that_were_compared_say_nothing(device, monkeypatch):
    """As with batches that are sorted by length, the longest first."""
    monkeypatch.setattr(worth, "LEAST_BYTES", 2 * 2**20)
    model, clock = new_model(device), Clock(monkeypatch, longer=0.1)
    with memswap.manage(model) as manager:
        for _ in range(3):
            assert clock.moved(manager, lambda: step(model, device, 8 * ROWS)) > 0
        run(manager, clock, lambda: step(model, device), DECIDED)
        assert manager.plan is not None, "the short ones were not declined"
        assert clock.moved(manager, lambda: step(model, device)) == 0
        assert clock.moved(manager, lambda: step(model, device, 8 * ROWS)) > 0


def test_of_forwards_in_flight_one_stays(device, monkeypatch):
    """What was declined is little for one forward, and much for many."""
    model, clock = new_model(device), Clock(monkeypatch, longer=0.1)
    plain = step(model, device)
    with memswap.manage(model) as manager:
        run(manager, clock, lambda: step(model, device), DECIDED + 1)
        manager.reset_stats()
        losses, moved = [], [0]
        for _ in range(4):
            losses.append(loss(model, device))
            moved.append(manager.stats().moved_storages)
        assert moved[1] == 0 < moved[2] < moved[3] < moved[4]
        for one in losses:
            model.zero_grad(set_to_none=True)
            one.backward()
            assert_same_gradients(gradients(model), plain)
        del one, losses
        assert clock.moved(manager, lambda: step(model, device)) == 0


class Sparse(Model):
    """Has a sparse buffer, and is given a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(ROWS).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to_dense())


@pytest.mark.cpu_only
def test_sparse_tensors_are_inputs_and_buffers_like_others(device, monkeypatch):
    model, clock = new_model(device, Sparse), Clock(monkeypatch, longer=0.1)
    x = torch.eye(ROWS, WIDTH)
    with memswap.manage(model) as manager:
        for layout in (x.to_sparse(), x.to_sparse_csr()):
            run(manager, clock, lambda x=layout: model(x).backward(), DECIDED)
        assert manager.plan is not None


def test_what_is_given_up_is_not_told_any_more(device, monkeypatch):
    """Calls turn out to be no iterations, so everything moves from then on."""
    model, clock = new_model(device, Whole), Clock(monkeypatch, longer=0.1)
    with memswap.manage(model) as manager:
        run(manager, clock, lambda: step(model, device), DECIDED + 2)
        assert manager.plan is not None
        (loss(model, device, 4 * ROWS) + loss(model, device, 4 * ROWS)).backward()
        assert clock.moved(manager, lambda: step(model, device)) > 0
        assert manager.plan is None


def test_beside_a_longer_one_in_flight_what_was_declined_moves(device, monkeypatch):
    """Its recipes may read what the operators of a plain one would edit unseen."""
    model, clock = new_model(device), Clock(monkeypatch, longer=0.1)
    plain, longer = step(model, device), step(model, device, 4 * ROWS)
    with memswap.manage(model) as manager:
        run(manager, clock, lambda: step(model, device), DECIDED + 1)
        in_flight = loss(model, device, 4 * ROWS)
        body = lambda: assert_same_gradients(step(model, device), plain)  # noqa: E731
        assert clock.moved(manager, body) > 0
        model.zero_grad(set_to_none=True)
        in_flight.backward()
        assert_same_gradients(gradients(model), longer)
        assert clock.moved(manager, body) == 0


def test_what_was_declined_is_tried_again(device, monkeypatch):
    monkeypatch.setattr(worth, "RETIME_AFTER", 8)
    model, clock = new_model(device), Clock(monkeypatch, longer=0.1)
    with memswap.manage(model) as manager:
        body = lambda: step(model, device)  # noqa: E731
        run(manager, clock, body, DECIDED)
        assert run(manager, clock, body, 8) == 8
        clock.longer = 0.0  # it has become faster
        assert run(manager, clock, body, worth.WARM_UP) == 0
        assert run(manager, clock, body, 2 * SAMPLES) == SAMPLES
        assert run(manager, clock, body, 16) == 0 and manager.plan is None


@pytest.mark.parametrize(
    "options",
    [
        {"policy": memswap.Policy(action=Action.SWAP)},
        {"policy": memswap.Policy(fn=lambda tensor, info: Action.SWAP)},
        {"windows": memswap.Windows()},
        {"pool": None},
        {"budget": "75%", "rates": rates_for(torch.device("cpu"))},
    ],
    ids=["action", "function", "windows", "pool", "budget"],
)
def test_what_somebody_asked_for_is_not_declined(device, new_pool, monkeypatch, options):
    model, clock = new_model(device), Clock(monkeypatch, longer=9.0)
    if "pool" in options:
        options = {"pool": new_pool()}
    with memswap.manage(model, **options) as manager:
        assert run(manager, clock, lambda: step(model, device), DECIDED + 8) == 0


def test_layers_that_somebody_named_are_not_compared(device, monkeypatch):
    model, clock = new_model(device), Clock(monkeypatch, longer=9.0)
    with memswap.manage(model.layers) as manager:
        assert run(manager, clock, lambda: step(model, device), DECIDED + 8) == 0


def test_forwards_in_flight_at_a_time_are_not_compared(device, monkeypatch):
    """What a plain one's operators edit, a recipe of the other one may read."""
    model, clock = new_model(device), Clock(monkeypatch, longer=9.0)
    model.zero_grad(set_to_none=True)
    loss(model, device).backward()
    loss(model, device).backward()
    plain = gradients(model)

    def two() -> None:
        model.zero_grad(set_to_none=True)
        first, second = loss(model, device), loss(model, device)
        second.backward()
        first.backward()
        assert_same_gradients(gradients(model), plain)

    with memswap.manage(model) as manager:
        assert run(manager, clock, two, MOST_BEGUN + 8) == 0
        assert manager.plan is None


def test_a_model_that_is_called_twice_in_a_forward_is_not_compared(device, monkeypatch):
    """Two calls of a unit that is the whole model are one iteration where something moves."""
    model, clock = new_model(device, Whole), Clock(monkeypatch, longer=9.0)

    def twins() -> None:
        model.zero_grad(set_to_none=True)
        (loss(model, device) + loss(model, device, ROWS // 2)).backward()

    with memswap.manage(model) as manager:
        assert run(manager, clock, twins, DECIDED + 8) == 0


def test_compiled_layers_are_not_compared(device, monkeypatch):
    """Hooks that come and go would have a layer compiled once more."""
    model, clock = new_model(device), Clock(monkeypatch, longer=9.0)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for layer in model.layers:
        layer.compile(backend=backend)
    with memswap.manage(model) as manager:
        run(manager, clock, lambda: step(model, device), 2)
        compiled = len(graphs)
        run(manager, clock, lambda: step(model, device), DECIDED + 8)
        assert len(graphs) == compiled, "comparing has compiled a layer once more"
