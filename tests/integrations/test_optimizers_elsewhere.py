"""manage_optimizer with optimizers of other libraries: twenty steps, the same bits as without."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memswap
from memswap.optimizers.state import plain_tensors

#: By library and class: how it is made, and whether its step goes in chunks where one says so.
ELSEWHERE: dict[tuple[str, str], tuple[dict[str, Any], bool]] = {
    ("lion_pytorch", "Lion"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "AdEMAMix"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "AdaFactor"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "Adan"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "CAME"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "Lamb"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "Lion"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "Muon"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "Prodigy"): ({}, True),
    ("pytorch_optimizer", "SOAP"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "ScheduleFreeAdamW"): ({"lr": 1e-3}, True),
    ("pytorch_optimizer", "Shampoo"): ({"lr": 1e-3}, True),
    ("bitsandbytes.optim", "AdamW8bit"): ({"lr": 1e-3, "min_8bit_size": 1024}, False),
    ("bitsandbytes.optim", "Lion8bit"): ({"lr": 1e-4, "min_8bit_size": 1024}, False),
    ("torchao.optim", "AdamW4bit"): ({"lr": 1e-3}, True),
    ("torchao.optim", "AdamW8bit"): ({"lr": 1e-3}, True),
}
WIDTH, STEPS = 96, 20

Make = Callable[[list[Any]], torch.optim.Optimizer]


def train(make: Make, tmp_path: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    """Parameters and state after twenty steps; managed where there are options."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    given: list[Any] = list(model.parameters())
    if make is muon:
        given = [{"params": given, "use_muon": True}]
    optimizer = make(given)
    manager = None
    if options:
        pool = memswap.DiskPool(tmp_path, budget="64MiB", extent="1MiB")
        manager = memswap.manage_optimizer(optimizer, pool=pool, min_bytes=1, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    found = [one.detach() for one in model.parameters()]
    statistics = None if manager is None else manager.statistics()
    if manager is not None:
        manager.remove()
    for value in optimizer.state.values():
        found += plain_tensors(value)
    return [one.clone() for one in found], statistics


def muon(parameters: list[Any]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = importlib.import_module("pytorch_optimizer").Muon(parameters)
    return made


@pytest.mark.parametrize("chunked", [None, True])
@pytest.mark.parametrize(("library", "name"), ELSEWHERE)
def test_an_optimizer_of_another_library_steps_as_without(
    library: str, name: str, chunked: bool | None, tmp_path: Any
) -> None:
    options, in_chunks = ELSEWHERE[library, name]
    if chunked and not in_chunks:
        pytest.skip(f"the state of all of {name}'s parameters has the same tables in it")
    kind = getattr(pytest.importorskip(library), name)
    make = muon if name == "Muon" else lambda parameters: kind(parameters, **options)
    plain, _ = train(make, tmp_path)
    found, statistics = train(make, tmp_path, chunked=chunked, room="20KiB")
    assert statistics.away_bytes > 0, "nothing was away: this shows nothing"
    assert (statistics.chunks > 1) == bool(chunked)
    assert len(found) == len(plain)
    for number, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
        assert torch.equal(ours, theirs), f"tensor {number} of {list(theirs.shape)} differs"
