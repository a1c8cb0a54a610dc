"""Ctrl-C at any line of memswap: later steps have the bits of earlier ones, and nothing is left.

A trace function raises it, at one line in a hundred of a step after another.
"""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_released, assert_same_gradients, gradients
from torch import nn

import memswap
from memswap import Action, Policy

pytestmark = pytest.mark.cpu_only

SOURCES = str(Path(memswap.__file__).parent)
X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def may_be_interrupted(frame: Any) -> bool:
    """Not where a handler begins, as a `with` block's exit: Python looks at signals later there."""
    instruction = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return instruction not in ("PUSH_EXC_INFO", "WITH_EXCEPT_START")


class Interrupt:
    """Ctrl-C before one line of memswap's, counted from where tracing begins."""

    def __init__(self, line: int) -> None:
        self.lines_left = line
        self.where = ""

    def trace(self, frame: Any, event: str, argument: object) -> Any:
        """Follow memswap's own functions alone."""
        return self.step if frame.f_code.co_filename.startswith(SOURCES) else None

    def step(self, frame: Any, event: str, argument: object) -> Any:
        if event == "line" and may_be_interrupted(frame):
            self.lines_left -= 1
            if self.lines_left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.step


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


def new_layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer() for _ in range(2)])


def step(layers: nn.ModuleList) -> list[torch.Tensor | None]:
    layers.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    x = X
    for layer in layers:
        x = layer(x)
    x.square().mean().backward()
    return gradients(layers)


MANAGED: dict[str, dict[str, Any]] = {
    "encode": {"policy": Policy(action=Action.ENCODE, min_bytes=1)},
    "swap": {"policy": Policy(action=Action.SWAP, min_bytes=1)},
    "both": {"policy": Policy(action=Action.ENCODE_SWAP, min_bytes=1)},
    "budget": {"policy": Policy(min_bytes=1), "budget": "80%"},
    "recompute": {"policy": Policy(min_bytes=1), "budget": "60%"},
}

#: Each way once: before there is a plan, or under one.
FEW = (("encode", 0), ("swap", 2), ("both", 5), ("budget", 5), ("recompute", 0), ("recompute", 5))


@pytest.mark.parametrize(
    ("how", "steps_before"),
    [
        pytest.param(how, steps, marks=() if (how, steps) in FEW else pytest.mark.slow)
        for how in MANAGED
        for steps in (0, 2, 5)
    ],
)
def test_a_step_that_was_interrupted_at_any_line_costs_nothing_else(tmp_path, how, steps_before):
    expected = step(new_layers())
    line, stride = 1 + steps_before, 97
    interrupted = 0
    while True:
        layers = new_layers()
        if how == "recompute":
            for layer in layers:
                memswap.checkpoint_module(layer)
        pool = memswap.DiskPool(tmp_path, budget="16MiB", extent="64KiB")
        manager = memswap.manage(layers, pool=pool, **MANAGED[how])
        for _ in range(steps_before):
            step(layers)
        interrupt = Interrupt(line)
        before = sys.gettrace()
        sys.settrace(interrupt.trace)
        try:
            step(layers)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        for _ in range(4):
            assert_same_gradients(step(layers), expected)
        manager.remove()
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert top is None, f"hooks are left by an interrupt at {interrupt.where}"
        assert_released(manager, pool)
        if not interrupt.where:
            break
        line += stride
    assert interrupted > 3
