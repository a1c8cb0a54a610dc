"""Each ordering edge of sharding broken on purpose: under a late network, training must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memswap.parallel.schedule import ShardContext
from memswap.parallel.slots import Lease, SlotPool
from memswap.parallel.unit import Reduction, State, Unit
from ranks import Rank, distributed
from sharding import Net, adamw, loss_of, make_net, sharded, tokens_of, whole

Patch = Callable[[Any, str, Any], None]


def _weights_are_used_before_their_gather_is_waited(patch: Patch) -> None:
    def ready(unit: Unit) -> None:
        if unit.state is State.FETCHING:
            unit.state = State.READY

    patch(Unit, "ready", ready)


def _a_slot_is_given_away_while_its_unit_is_in_use(patch: Patch) -> None:
    original = SlotPool.take

    def take(pool: SlotPool, owner: str, nbytes: int, device: torch.device) -> Lease | None:
        lease = original(pool, owner, nbytes, device)
        if lease is None:
            for slot in pool._slots[device]:
                slot.owner = None
            lease = original(pool, owner, nbytes, device)
        return lease

    patch(SlotPool, "take", take)


def _gradients_are_used_before_their_reduction_is_waited(patch: Patch) -> None:
    def finish(reduction: Reduction) -> None:
        with torch.no_grad():
            for member, output in zip(reduction.members, reduction.outputs, strict=True):
                reduction.unit.give_gradient(member, output)

    patch(Reduction, "finish", finish)


def _gradients_are_recycled_before_their_reduction_is_waited(patch: Patch) -> None:
    original = Reduction.launch

    def launch(unit: Unit) -> Reduction:
        recycled = [member.grad for member in unit.trainable]
        reduction = original(unit)
        for gradient in recycled:
            if gradient is not None:
                gradient.zero_()
        return reduction

    patch(Reduction, "launch", launch)


def _weights_are_dropped_at_the_first_gradient(patch: Patch) -> None:
    def arrived(context: ShardContext, unit: Unit) -> None:
        context._pass.look()
        context._finish(unit)

    patch(ShardContext, "gradient_arrived", arrived)


def _weights_of_the_last_step_are_kept(patch: Patch) -> None:
    patch(Unit, "stale", False)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    mutation.__name__.removeprefix("_").replace("_", " "): mutation
    for mutation in (
        _weights_are_used_before_their_gather_is_waited,
        _weights_are_dropped_at_the_first_gradient,
        _weights_of_the_last_step_are_kept,
        _a_slot_is_given_away_while_its_unit_is_in_use,
        _gradients_are_used_before_their_reduction_is_waited,
        _gradients_are_recycled_before_their_reduction_is_waited,
    )
}


KEPT = "weights of the last step are kept"


@distributed(2)
@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_training_notices_when(rank: Rank, mutation: str | None) -> None:
    residency = "step" if mutation == KEPT else "use"  # only then are they
    start = make_net(layers=2)
    reference, _ = sharded(rank, start)
    _train_and_evaluate(reference, rank)
    with pytest.MonkeyPatch.context() as patched:
        if mutation is not None:
            MUTATIONS[mutation](patched.setattr)
        net, _ = sharded(rank, start, late=True, context={"slots": 1}, residency=residency)
        try:
            _train_and_evaluate(net, rank)
        except RuntimeError:  # weights that are not there, or not theirs
            assert mutation is not None
            return
    right = whole(reference)
    equal = all(torch.equal(value, right[name]) for name, value in whole(net).items())
    assert equal == (mutation is None), "training was the same with the edge broken"


def _train_and_evaluate(net: Net, rank: Rank) -> None:
    """An evaluation between backward and the optimizer's step leaves weights behind."""
    optimizer = adamw(net)
    for step in range(2):
        tokens = tokens_of(step, rank.size)[rank.rank]
        loss_of(net, tokens).backward()
        with torch.no_grad():
            loss_of(net, tokens)
        optimizer.step()
        optimizer.zero_grad()
