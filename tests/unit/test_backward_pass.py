"""BackwardPass: an owner learns when a backward that it saw has ended, or has raised."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memswap.engine.training import BackwardPass

pytestmark = pytest.mark.cpu_only


class Owner:
    """Notes what it is told; looks whenever a gradient of one of its tensors arrives."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.fails = False
        self.backward = BackwardPass(self.ended, lambda: self.told.append("raised"))

    def ended(self) -> None:
        self.told.append("ended")
        if self.fails:
            raise RuntimeError("while it ended")

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.register_hook(lambda gradient: self.told.append(f"in {self.backward.look()}"))
        return tensor


def raises(gradient: torch.Tensor) -> None:
    raise ValueError("in backward")


def test_the_end_of_a_backward_is_told_once_and_after_all_events():
    owner, x = Owner(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        owner.told.clear()
        owner.watch(owner.watch(x * 2) * 3).sum().backward()
        assert owner.told == ["in True", "in True", "ended"]
        assert not owner.backward.runs and not owner.backward.look()
    assert owner.told == ["in True", "in True", "ended"], "a forward is no event of a backward"


def test_a_backward_inside_a_reentrant_checkpoint_ends_with_the_outer_one():
    owner, x = Owner(), torch.ones(3, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (owner.watch(y) if y.requires_grad else y) * 3  # the recompute is recorded alone

    y = owner.watch(checkpoint(region, x, use_reentrant=True) * 1)
    y.sum().backward()
    assert owner.told == ["in True", "in True", "ended"]


@pytest.mark.parametrize("again", [False, True], ids=["in a forward", "in another backward"])
def test_a_backward_that_raised_is_noticed_at_the_next_event(again):
    owner, x = Owner(), torch.ones(3, requires_grad=True)
    between = x * 2
    handle = between.register_hook(raises)
    y = owner.watch(between * 3).sum()
    with pytest.raises(ValueError, match="in backward"):
        y.backward(retain_graph=True)
    assert owner.told == ["in True"] and owner.backward.runs
    handle.remove()
    if again:
        y.backward()
        assert owner.told == ["in True", "raised", "in True", "ended"]
    else:
        assert not owner.backward.look()
        assert owner.told == ["in True", "raised"] and not owner.backward.runs


def test_an_end_that_raises_counts_as_a_backward_that_did():
    owner, x = Owner(), torch.ones(3, requires_grad=True)
    owner.fails = True
    with pytest.raises(RuntimeError, match="while it ended"):
        owner.watch(x * 2).sum().backward()
    assert not owner.backward.look()
    assert owner.told == ["in True", "ended", "raised"]
