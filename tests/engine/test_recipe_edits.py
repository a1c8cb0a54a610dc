"""Every input of a recipe is edited at every moment: autograd's gradient, or autograd's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    assert_nothing_left,
    assert_same_gradients,
    collect,
    flush_autograd,
    random,
)
from recipe_helpers import RECOMPUTE
from torch import nn

import memswap
from memswap.engine import recipes

#: Recipes have no lane of their own; tests/race breaks their edges under all schedules.
pytestmark = pytest.mark.few_schedules

#: What is edited: a computed input that something else saves and one that nothing saves, a
#: parameter, a plain tensor, an input of the input, and the result itself.
TARGETS = ("saved", "unsaved", "weight", "plain", "source", "result")
#: When: after the operator has run and before its result is saved; after that, within the block;
#: between forward and backward; in backward, by a hook, before anything is demanded and after some
#: of it was; between two backwards.
MOMENTS = (
    "before the save", "in the block", "before backward", "as backward begins", "in backward",
    "between backwards",
)  # fmt: skip

EDITS: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda t: t.mul_(1.5),
    "a view of it": lambda t: t.view(-1)[3:5].add_(1),
    "as output": lambda t: torch.exp(t.clone(), out=t),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "a copy into it": lambda t: t[1:].copy_(t[:-1].clone()),
}


class Calls(nn.Module):
    """A layer that does what it is called with."""

    def forward(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        return function()


class Door:
    """Runs a forward under memswap: in a block, or as a managed layer's."""

    def __init__(self, name: str) -> None:
        self.layer = Calls()
        if name == "saved_tensors":
            self.swap: Any = memswap.saved_tensors(RECOMPUTE)
        else:
            self.swap = memswap.manage([self.layer], RECOMPUTE)

    def __call__(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        if isinstance(self.swap, memswap.saved_tensors):
            with self.swap:
                return forward()
        return self.layer(forward)

    def settle(self) -> None:
        """Everything that was to leave has left."""
        self.swap._engine.settle()

    def learnt(self) -> list[Any]:
        return self.swap._engine.recipes.learnt()


class Program:
    """Three recipes over inputs of all kinds, and an edit somewhere."""

    def __init__(self, device: torch.device, target: str, moment: str, edit: str) -> None:
        self.device = device
        self.target, self.moment, self.edit = target, moment, EDITS[edit]
        self.refused = False
        self.saves_plain = target != "plain"  # or autograd would refuse each edit of it

    def gradients(self, door: Door | None) -> list[torch.Tensor]:
        """The gradients of one backward or two, or what autograd raises. No door: no memswap."""
        device = self.device
        weight = random(device, 8, 16, seed=1).requires_grad_()
        plain = random(device, 8, 16, seed=2)
        root = random(device, 8, 16, seed=3).requires_grad_()
        tensors = {"weight": weight, "plain": plain}

        def edits(moment: str) -> None:
            if moment == self.moment:
                # An edit of what autograd has saved may race with a copy whose bytes nobody uses.
                if door is not None and (self.refused or self.target == "plain"):
                    door.settle()
                with torch.no_grad():
                    self.edit(tensors[self.target].detach())

        def forward() -> torch.Tensor:
            tensors["source"] = source = root * 2
            tensors["saved"] = saved = source.exp()  # saves itself
            tensors["unsaved"] = unsaved = source.add(1).neg()  # nobody saves it
            tensors["result"] = y = (saved + unsaved).bfloat16().float() + weight
            z = torch.addcmul(unsaved, saved, plain, value=0.5)
            pair = torch.cat([saved, unsaved])
            loss = (plain[:1] * root).sum() if self.saves_plain else root.sum()
            edits("before the save")
            loss = loss + (y * y.detach()).sum() + (z.detach() * root.sin()).sum()
            loss = loss + (weight * y).sum() + (pair * pair.detach()).sum()
            if self.moment == "in backward":
                hooks.append(y.register_hook(lambda gradient: edits("in backward")))
            edits("in the block")
            return loss

        hooks: list[Any] = []
        try:
            loss = forward() if door is None else door(forward)
            edits("before backward")
            tensors = {one: tensors[one] for one in (self.target,)}
            wanted = [root, weight]
            if self.moment == "as backward begins":
                hooks.append(loss.register_hook(lambda gradient: edits("as backward begins")))
            found = list(torch.autograd.grad(loss, wanted, retain_graph=True))
            edits("between backwards")
            return [*found, *torch.autograd.grad(loss, wanted)]
        finally:
            for hook in hooks:  # which may hold what it hangs on
                hook.remove()


@pytest.mark.parametrize("door", ["saved_tensors", "manage"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("target", TARGETS)
def test_an_edit_gives_autograds_gradient_or_its_error(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    moment: str,
    edit: str,
    door: str,
) -> None:
    program = Program(device, target, moment, edit)
    try:
        expected = program.gradients(None)
    except RuntimeError as error:
        assert "inplace" in str(error)
        expected, program.refused = [], True
    for proofs in (0, recipes.PROOFS):
        monkeypatch.setattr(recipes, "PROOFS", proofs)
        opened = Door(door)
        for _ in range(4):
            try:
                found = program.gradients(opened)
            except RuntimeError as error:
                assert isinstance(error, memswap.InplaceEditError)
                in_sight = moment in ("before the save", "in the block")
                assert program.refused or not in_sight, f"refused what autograd allows: {error}"
                assert program.refused or not proofs, (
                    f"a place that was edited became a recipe: {error}"
                )
            else:
                assert not program.refused, "a result that autograd refuses"
                assert_same_gradients(found, expected)
        flush_autograd(device)
        collect()
        assert_nothing_left(opened.swap.stats())


@pytest.mark.parametrize("door", ["saved_tensors", "manage"])
@pytest.mark.parametrize("target", TARGETS)
def test_without_an_edit_all_of_these_are_recipes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, target: str, door: str
) -> None:
    """The test above says nothing if nothing is run again."""
    monkeypatch.setattr(recipes, "PROOFS", 0)
    program = Program(device, target, "never", "in place")
    opened = Door(door)
    assert_same_gradients(program.gradients(opened), program.gradients(None))
    words = {row[1][0] for row in opened.learnt()}
    assert any("cast" in one for one in words), words
    assert any("addcmul" in one for one in words), words
    assert any("cat" in one and "add" in one for one in words), words
    assert opened.swap.stats().recipe_runs > 0


@pytest.mark.parametrize("proofs", [0, recipes.PROOFS])
def test_an_edit_by_another_thread(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, proofs: int
) -> None:
    """It is outside of the block: the demand refuses, or the bytes had stayed."""
    import threading

    monkeypatch.setattr(recipes, "PROOFS", proofs)
    x = random(device, 8, 16).requires_grad_()
    weight = random(device, 8, 16, seed=1).requires_grad_()
    (expected,) = torch.autograd.grad((weight.double() * x).square().sum(), x)
    block = memswap.saved_tensors(RECOMPUTE)

    def edit() -> None:
        with torch.no_grad():
            weight.add_(0)

    for _ in range(4):
        with block:
            loss = (weight.double() * x).square().sum()
            thread = threading.Thread(target=edit)
            thread.start()
            thread.join()
        if proofs:
            assert_same_gradients(torch.autograd.grad(loss, x), [expected])
        else:
            with pytest.raises(memswap.InplaceEditError):
                torch.autograd.grad(loss, x)
