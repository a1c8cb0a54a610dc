"""What the forward holds at its peak stays as it is: its frame would only raise the peak.

csrc/engine/held_at_peak.h says how that is found out; tests/cpp/held_at_peak_test.cpp has the
choice alone.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    assert_nothing_left,
    assert_same_gradients,
    collect,
    flush_autograd,
    random,
    same_bits,
)
from torch import nn

import memswap

REASON = "held at the peak"
LEARNING_STEPS = 4
WIDTH, ROWS = 64, 256


class Wide(nn.Module):
    """A residual stream, which the caller holds beside a wide product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(nn.functional.gelu(self.into(self.norm(x))))


class Model(nn.Module):
    """Layers, and after them something that nobody manages."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Wide() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def new_model(device: torch.device) -> Model:
    return Model().to(device, torch.bfloat16)


def new_input(device: torch.device, rows: int = ROWS, seed: int = 1) -> torch.Tensor:
    return random(device, rows, WIDTH, seed=seed).bfloat16().requires_grad_()


def gradients_of(loss: torch.Tensor, model: Model, **how: bool) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **how))


def kept(stats: memswap.types.Stats) -> int:
    """Tensors that stayed for being held at the peak."""
    return stats.kept[REASON].tensors if REASON in stats.kept else 0


def stepped(manager: memswap.types.Manager, model: Model, x: torch.Tensor) -> memswap.types.Stats:
    """The statistics of one step, whose gradients are plain training's."""
    expected = plain(model, x)
    manager.reset_stats()
    assert_same_gradients(gradients_of(model(x), model), expected)
    return manager.stats()


def plain(model: Model, x: torch.Tensor) -> list[torch.Tensor]:
    copy = Model(len(model.layers)).to(x.device, x.dtype)
    copy.load_state_dict(model.state_dict())
    return gradients_of(copy(x), copy)


ACTIONS = ("encode", "recompute")


@pytest.mark.cpu_only
@pytest.mark.parametrize("action", ACTIONS)
def test_a_stream_that_is_held_stays_the_peak_is_lower_and_no_bit_differs(
    device: torch.device, action: str
) -> None:
    model, x = new_model(device), new_input(device)
    policy = memswap.Policy(action=action, min_bytes=1024)
    peaks = {}
    # Who asks for a window of no bytes has nothing stay at the end of the forward.
    for window in ("auto", 0):
        with memswap.manage(model.layers, policy, prefetch_bytes=window) as manager:
            for _ in range(LEARNING_STEPS + 1):
                stepped(manager, model, x)
            stats = stepped(manager, model, x)
        assert (kept(stats) > 0) == (window == "auto")
        peaks[window] = stats.peak_resident_bytes
        assert stats.resident_bytes == 0
    frame = 0.6 * ROWS * WIDTH * 2
    assert peaks["auto"] <= peaks[0] - frame, "the stream's frame stands beside it"


@pytest.mark.accelerator
def test_where_nobody_knows_what_is_gone_nothing_stays_for_it(device: torch.device) -> None:
    model, x = new_model(device), new_input(device)
    policy = memswap.Policy(action="encode", min_bytes=1024)
    with memswap.manage(model.layers, policy) as manager:
        for _ in range(3):
            assert kept(stepped(manager, model, x)) == 0


@pytest.mark.cpu_only
def test_under_a_plan_the_plan_says_what_stays(device: torch.device) -> None:
    model, x = new_model(device), new_input(device)
    with memswap.manage(model.layers, memswap.Policy(min_bytes=1024), budget="70%") as manager:
        for _ in range(5):
            assert kept(stepped(manager, model, x)) == 0
            plan = manager.wait_for_plan()
        assert plan is not None
        stats = stepped(manager, model, x)
    assert stats.peak_resident_bytes == plan.peak_bytes


@pytest.mark.cpu_only
def test_a_shape_that_was_not_seen_before_has_frames_and_learns(device: torch.device) -> None:
    model = new_model(device)
    policy = memswap.Policy(action="encode", min_bytes=1024)
    with memswap.manage(model.layers, policy) as manager:
        for rows in (ROWS, ROWS, 2 * ROWS, 2 * ROWS, ROWS):
            stats = stepped(manager, model, new_input(device, rows))
            assert stats.moved_storages > 0
        assert kept(stats) == 0, "another shape's choice"
        assert kept(stepped(manager, model, new_input(device))) > 0


@pytest.mark.cpu_only
@pytest.mark.parametrize("action", ACTIONS)
def test_a_graph_may_run_again_beside_another_and_be_dropped(
    device: torch.device, action: str
) -> None:
    model, x, other = new_model(device), new_input(device), new_input(device, seed=2)
    expected, others = plain(model, x), plain(model, other)
    policy = memswap.Policy(action=action, min_bytes=1024)
    with memswap.manage(model.layers, policy) as manager:
        for _ in range(LEARNING_STEPS + 1):
            stepped(manager, model, x)
        manager.reset_stats()
        first, second, third = model(x), model(other), model(x)
        assert kept(manager.stats()) > 0
        del third
        for _ in range(2):
            assert_same_gradients(gradients_of(second, model, retain_graph=True), others)
            assert_same_gradients(gradients_of(first, model, retain_graph=True), expected)
        del first, second
        flush_autograd(device)
        collect()
        assert_nothing_left(manager.stats())


@pytest.mark.cpu_only
def test_an_edit_of_what_is_held_is_refused_in_autograds_words(device: torch.device) -> None:
    model, x = new_model(device), new_input(device)
    policy = memswap.Policy(action="encode", min_bytes=1024)
    streams: list[torch.Tensor] = []
    with memswap.manage(model.layers, policy) as manager:
        for _ in range(3):
            stepped(manager, model, x)
        manager.reset_stats()
        layer = model.layers[-1]
        handle = layer.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        loss = model(x)
        handle.remove()
        assert kept(manager.stats()) > 0
        before = streams[-1].detach().clone()
        with torch.no_grad():
            streams[-1].add_(1)
        assert not same_bits(before, streams[-1])
        with pytest.raises(memswap.InplaceEditError):
            loss.backward()


@pytest.mark.cpu_only
def test_what_is_held_no_longer_becomes_a_frame_again(device: torch.device) -> None:
    """A caller that holds each layer's input, and then does not."""
    model, x = new_model(device), new_input(device)
    policy = memswap.Policy(action="encode", min_bytes=1024)
    held: list[torch.Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args: held.append(args[0]))
        for layer in model.layers
    ]
    with memswap.manage(model.layers, policy) as manager:

        def step() -> int:
            manager.reset_stats()
            loss = model(x)
            del held[:]
            loss.backward()
            return kept(manager.stats())

        while_held = [step() for _ in range(4)][-1]
        for handle in handles:
            handle.remove()
        later = [step() for _ in range(4)][-1]
    assert while_held > later, f"{while_held} stayed while they were held, and {later} since"
