"""What orders a recipe on streams, broken on purpose: the detector and a schedule notice each.

csrc/engine/recipe.h, [Note: Run again], says where a recipe runs and what comes after it. What else
recipes are safe by is broken in C++ (tests/cpp/with_torch/recipe_mutations_test.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from broken_edges import Counter
from race_workloads import (
    DEVICE,
    MATRIX,
    Region,
    Workload,
    assert_silent_and_right,
    expected,
    observe,
    on_host,
    source_freed_elsewhere,
)

import memswap
from memswap.engine import hook_scope, recipes
from simdev import mutations

pytestmark = [pytest.mark.own_laboratory, pytest.mark.one_schedule]

RECOMPUTE = memswap.Policy(action="recompute", min_bytes=1)
OPTIONS = {"policy": RECOMPUTE, "prefetch_bytes": 0}

Unpack = Callable[[Any], torch.Tensor]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are used before they are proven."""
    monkeypatch.setattr(recipes, "PROOFS", 0)


def source_dropped_by_its_maker(region: Region) -> list[torch.Tensor]:
    """A source that the program holds until backward has run on another stream, and drops then: it
    knows of nobody who has read it there. Its memory goes back to the main stream."""
    main, other = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    found = []
    for step in range(3):
        leaf = torch.full((4096,), 0.25 + step, device=DEVICE, requires_grad=True)
        with other:
            gate = torch.full((4096,), 0.5, device=DEVICE, requires_grad=True)
        with region():
            source = leaf * 2
            made = source.sin()
            other.wait_stream(main)
            with other:
                loss = (made * gate).sum()
            made.record_stream(other)
        del made
        with other:
            (grad,) = torch.autograd.grad(loss, [gate])
        del loss, source
        filled = [torch.full((4096,), 9.0, device=DEVICE) for _ in range(4)]
        main.wait_stream(other)
        found.append(grad + filled[0])
        grad.record_stream(main)
        torch.accelerator.synchronize()  # the other stream's memory goes back to it
    return on_host(found)


def unpacking(broken: Callable[[Unpack, Any, Counter], torch.Tensor]) -> Callable[..., Any]:
    """Hooks whose unpack is a broken one."""

    @contextlib.contextmanager
    def breaking() -> Iterator[Counter]:
        counter, right = Counter(), hook_scope.unpack

        def unpack(handle: Any) -> torch.Tensor:
            return broken(right, handle, counter)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hook_scope, "unpack", unpack)
            yield counter

    return breaking


def on_another_stream(unpack: Unpack, handle: Any, counter: Counter) -> torch.Tensor:
    """The recipe runs, and nobody comes after the stream that it runs on."""
    counter.own += 1
    with torch.Stream(device=DEVICE):
        return unpack(handle)


def makers_come_before(unpack: Unpack, handle: Any, counter: Counter) -> torch.Tensor:
    """The stream on which the operator ran first does not come after its second run."""
    with mutations.drop_waits() as mutation:
        made = unpack(handle)
    counter.own += mutation.hits
    return made


#: What orders a recipe, what breaks it, and a program in which nothing else makes up for it.
EDGES: dict[str, tuple[Callable[[Unpack, Any, Counter], torch.Tensor], Workload]] = {
    "a recipe runs on the stream that asks": (on_another_stream, source_freed_elsewhere),
    "whoever frees a source comes after the recipe that reads it": (
        makers_come_before,
        source_dropped_by_its_maker,
    ),
}


@pytest.mark.parametrize("workload", [source_freed_elsewhere, source_dropped_by_its_maker])
def test_nothing_is_reported_where_nothing_is_broken(workload: Workload) -> None:
    assert_silent_and_right(workload, **OPTIONS)


@pytest.mark.parametrize("edge", EDGES)
def test_each_edge_is_needed(edge: str) -> None:
    broken, workload = EDGES[edge]
    right = expected(workload)
    struck = noticed = False
    for schedule in MATRIX:
        seen = observe(schedule, workload, unpacking(broken), **OPTIONS)
        struck = struck or seen.hits > 0
        noticed = noticed or bool(seen.reports) or seen.differs_from(right)
    assert struck, f"{edge}: the mutation never struck"
    assert noticed, f"{edge}: broken, and no schedule notices"
