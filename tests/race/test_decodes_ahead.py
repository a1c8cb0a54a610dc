"""Virtual time: at default settings decodes are on their way before they are needed.

The machine has room for every decode under a matrix product, and a host that runs ahead of it. How
far ahead of the demands decodes start is nobody's setting here: it follows from the windows of the
last backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from race_workloads import DEVICE, open_small_arenas
from timed_layers import ROOMY, Product
from torch import nn

import memswap
from memswap import Action, Policy, Windows
from memswap.compat.mindspeed import CompressHook, GlobalContext, GlobalContextConfig
from simdev import virtual_time

SIDE = 128
NBYTES = SIDE * SIDE * 2
STEPS, MEASURED = 6, 2  # and how many of them know no durations of operators
ENCODE = Policy(action=Action.ENCODE, min_bytes=1)

pytestmark = pytest.mark.one_schedule


class MegatronProduct(torch.autograd.Function):
    """As Megatron's linear layers have it: functions of torch, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient.matmul(weight), torch.matmul(gradient.t(), x)


class MegatronLayer(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(MegatronProduct.apply(x, self.linear.weight)).tanh()


def compress(layers: nn.ModuleList, step: list[int], async_funcs: list[str]) -> GlobalContext:
    """What MindSpeed's feature manager does to every layer."""
    ctx = GlobalContext(GlobalContextConfig(async_funcs=async_funcs))
    ctx.engine.policy = ENCODE  # however small they are
    for number, layer in enumerate(layers, start=1):

        def wrapped(x: torch.Tensor, forward: Any = layer.forward, uuid: int = number) -> Any:
            key = (uuid, ctx.get_absolute_order(step[0] == 0))
            ctx.pack_start(key)
            with CompressHook(key, ctx):
                result = forward(x)
            result.register_hook(lambda gradient: ctx.unpack_start(key))
            return result

        layer.forward = wrapped
    return ctx


class Steps:
    """Statistics of every step of a short training, and what backward held at most."""

    def __init__(self, how: str, depth: int) -> None:
        torch.manual_seed(0)
        kind = MegatronLayer if how == "async_funcs" else Product
        layers = nn.ModuleList(kind(SIDE) for _ in range(depth)).to(DEVICE, torch.bfloat16)
        batch = torch.randn(SIDE, SIDE).to(DEVICE, torch.bfloat16)
        step = [0]
        self.stats: list[memswap.types.Stats] = []
        with virtual_time(**ROOMY):
            if how != "manage":
                names = ["matmul"] if how == "async_funcs" else []
                doors: Any = compress(layers, step, names)
                engine = doors.engine
            else:
                doors = memswap.manage(layers, ENCODE, windows=Windows())
                engine = doors._engine
            for step[0] in range(STEPS):
                layers.zero_grad(set_to_none=True)
                x = batch
                for layer in layers:
                    x = layer(x)
                x.float().sum().backward()
                del x
                torch.accelerator.synchronize()
                self.stats.append(doors.stats())
                self.windows = doors.window_stats()
                engine.reset_stats()
        self.prefetch_bytes = engine.iteration.own_prefetch_bytes
        self.least_prefetch_bytes = engine.iteration.least_prefetch_bytes
        if how == "manage":
            doors.remove()


@pytest.mark.parametrize("depth", [10, 40, 80])
@pytest.mark.parametrize("how", ["manage", "compat", "async_funcs"])
def test_at_most_one_decode_in_twenty_stalls(how: str, depth: int) -> None:
    found = Steps(how, depth)
    for number, stats in enumerate(found.stats):
        decoded, stalls = stats.returned_storages, stats.stalls
        assert decoded >= depth, f"step {number}: only {decoded} were decoded in {depth} layers"
        # Nobody knows what the very first backward demands first; then durations are measured.
        most = decoded // 20 if number >= MEASURED else 1
        assert stalls <= most, f"step {number}: {stalls} of {decoded} decodes stall"
        assert "codec room" not in stats.kept, f"step {number}: something stayed"
    decoded = sum(stats.returned_storages for stats in found.stats)
    assert sum(stats.stalls for stats in found.stats) <= decoded // 20
    assert found.windows.decoded_in_windows == found.stats[-1].returned_storages
    windows = {"manage": 2, "compat": 2, "async_funcs": 3}[how]  # of a layer, or of its products
    assert found.windows.windows == windows * depth


@pytest.mark.parametrize("how", ["manage", "compat"])
def test_what_is_ahead_is_what_two_operators_need_however_deep_the_model_is(how: str) -> None:
    # A layer saves two storages; the one that was demanded last lies beside its frame.
    assert Steps(how, 20).prefetch_bytes == Steps(how, 40).prefetch_bytes == 5 * NBYTES


@pytest.mark.parametrize("how", ["manage", "compat"])
def test_a_host_far_ahead_waits_for_room_for_the_codec_and_keeps_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena for the worst cases of a third of a forward, as that of a large model is."""
    open_small_arenas(monkeypatch, 2 * 80 * NBYTES // 8)
    for number, stats in enumerate(Steps(how, 80).stats):
        assert stats.moved_storages > 80 and "codec room" not in stats.kept, f"step {number}"


def test_without_the_windows_of_the_last_backward_they_would_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least, engine = Steps("manage", 10).least_prefetch_bytes, Windows.engine

    def engine_that_knows_no_windows(options: Windows, policy: Any, pool: Any, _: Any) -> Any:
        return engine(options, policy, pool, least)  # of prefetching, whatever windows there were

    monkeypatch.setattr(Windows, "engine", engine_that_knows_no_windows)
    stats = Steps("manage", 10).stats[-1]
    assert stats.stalls > stats.returned_storages // 2, "the machine hides them whatever is done"
