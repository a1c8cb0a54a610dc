"""What tests of managed optimizers share: every optimizer of torch, a small model, a training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from helpers import random, same_bits
from torch import nn
from torch.optim import Optimizer

import memswap
from memswap.optimizers import ManagedOptimizer
from memswap.optimizers.state import plain_tensors

#: Small enough that the state of the model goes in several chunks.
ROOM = 3 * 4096

Maker = Callable[[Iterable[Any]], Optimizer]

#: By name: how it is made, and the forms of its step.
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ASGD": ({"lr": 0.01}, ("single", "foreach")),
    "Adadelta": ({}, ("single", "foreach")),
    "Adafactor": ({"lr": 0.01}, ("single", "foreach")),
    "Adagrad": ({"lr": 0.01}, ("single", "foreach", "fused")),
    "Adam": ({"lr": 0.01, "amsgrad": True}, ("single", "foreach", "fused")),
    "AdamW": ({"lr": 0.01}, ("single", "foreach", "fused")),
    "Adamax": ({"lr": 0.01}, ("single", "foreach")),
    "Muon": ({"lr": 0.01}, ("single",)),
    "NAdam": ({"lr": 0.01}, ("single", "foreach")),
    "RAdam": ({"lr": 0.01}, ("single", "foreach")),
    "RMSprop": ({"lr": 0.01, "momentum": 0.9, "centered": True}, ("single", "foreach")),
    "Rprop": ({"lr": 0.01}, ("single", "foreach")),
    "SGD": ({"lr": 0.01, "momentum": 0.9}, ("single", "foreach", "fused")),
}
FORMS = [(name, form) for name, (_, forms) in OPTIMIZERS.items() for form in forms]


def maker(name: str, form: str = "single", **options: Any) -> Maker:
    """Makes an optimizer of torch.optim with the step's form forced."""
    kind = getattr(torch.optim, name)
    given = dict(OPTIMIZERS.get(name, ({}, ()))[0])
    if name != "Muon":
        given["foreach"] = form == "foreach"
    if form == "fused":
        given["foreach"], given["fused"] = None, True
    return lambda parameters: kind(parameters, **{**given, **options})


def new_model(device: torch.device, depth: int = 4, width: int = 24, seed: int = 0) -> nn.Module:
    """Linear layers without biases: parameters that every optimizer takes."""
    torch.manual_seed(seed)
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    return nn.Sequential(*layers).to(device)


def state_bits(optimizer: Optimizer, model: nn.Module) -> list[torch.Tensor]:
    """Parameters, and all state as `state_dict` gives it, in host memory."""
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    saved = optimizer.state_dict()["state"]
    for key in sorted(saved):
        for name in sorted(saved[key]):
            found += [tensor.cpu() for tensor in plain_tensors(saved[key][name])]
    return found


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected), "there is another number of state tensors"
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(ours, plain), f"tensor {number} of shape {list(plain.shape)} differs"


def loss_of(model: nn.Module, device: torch.device, step: int) -> torch.Tensor:
    width = model[0].weight.shape[1]
    return model(random(device, 3, width, seed=step)).square().mean()


def manage(optimizer: Optimizer, pool: Any = None, **options: Any) -> ManagedOptimizer:
    """Manages an optimizer so that everything moves, in several chunks."""
    return memswap.manage_optimizer(
        optimizer, pool=pool, **{"room": ROOM, "min_bytes": 1, **options}
    )


def train(
    device: torch.device,
    make: Maker,
    pool: Any = None,
    *,
    managed: bool,
    steps: int = 20,
    width: int = 24,
    around: Callable[[nn.Module, Optimizer, int], None] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Trains the model; the bits of parameters and state.

    Args:
        around: does a step, and whatever else; None: `zero_grad`, backward, `step`.
    """
    model = new_model(device, width=width)
    optimizer = make(model.parameters())
    manager = manage(optimizer, pool, **options) if managed else None
    for step in range(steps):
        if around is not None:
            around(model, optimizer, step)
            continue
        optimizer.zero_grad()
        loss_of(model, device, step).backward()
        optimizer.step()
    found = state_bits(optimizer, model)
    if manager is not None:
        numbers = manager.statistics()
        assert numbers.away_bytes > 0, "nothing is away: the test shows nothing"
        assert numbers.chunks != 1, "all parameters went in one chunk: the test shows little"
    return found


@functools.cache
def plain_training(
    device: torch.device,
    name: str,
    form: str = "single",
    *,
    around: Callable[[nn.Module, Optimizer, int], None] | None = None,
    steps: int = 20,
    capturable: bool = False,
) -> list[torch.Tensor]:
    """What `train` gives without memswap: the same under every schedule, so once for them all."""
    make = maker(name, form, **({"capturable": True} if capturable else {}))
    return train(device, make, managed=False, around=around, steps=steps)
