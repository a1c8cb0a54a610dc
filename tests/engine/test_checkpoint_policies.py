"""memswap.checkpoint: whatever the policy decides, the bits are the same and no more runs again."""

from __future__ import annotations

import pytest
import torch
from checkpoint_helpers import (
    DOUBLE,
    LEAVE,
    CheckpointPolicy,
    aten,
    checkpointing,
    double,
    forward,
    gradients_of,
    policy_of,
    runs,
)
from helpers import (
    assert_released,
    assert_same_gradients,
    let_sends_end,
    new_input,
    new_stack,
    random,
    train_step,
)
from torch.utils import checkpoint as torch_checkpoint

import memswap


@pytest.mark.every_action("swap", "encode")
@pytest.mark.parametrize("inputs", [False, True], ids=["inputs stay", "inputs leave"])
def test_gradients_are_the_plain_ones_and_torchs(device, new_pool, inputs, _action):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))

    def theirs(layer, h):
        return torch_checkpoint.checkpoint(layer, h, use_reentrant=False)

    assert_same_gradients(train_step(model, lambda: forward(model, theirs, x)), expected)
    swap_inputs = memswap.Action(_action) if inputs else False
    ours = checkpointing(pool, LEAVE[_action], swap_inputs=swap_inputs)
    for _ in range(3):
        found = train_step(model, lambda: forward(model, ours.checkpoint, x))
        assert_same_gradients(found, expected)
    stats = ours.stats()
    # Three layers with four matrix products (and those of attention) in each of three steps.
    assert stats.offered_tensors >= 3 * 3 * (4 + inputs)
    assert stats.moved_storages >= 3 * 3 * 3 and stats.returned_storages > 0
    assert_released(ours, pool)


@pytest.mark.one_schedule
@pytest.mark.parametrize("decision", list(CheckpointPolicy), ids=lambda policy: policy.name)
def test_every_policy_gives_the_plain_gradients(device, new_pool, decision):
    model, x, pool = new_stack(device, depth=2), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    ours = checkpointing(pool, decision)
    for _ in range(2):
        found = train_step(model, lambda: forward(model, ours.checkpoint, x))
        assert_same_gradients(found, expected)
    assert (ours.stats().offered_tensors > 0) is ("RECOMPUTE" not in decision.name)
    assert_released(ours, pool, moved=decision in LEAVE.values())


def times_run(policy, x, **options):
    """How often an operator runs in the forward and the recomputation of a region."""

    def fn(x):
        return double(x.exp()).sin().tanh()

    runs.clear()
    found = gradients_of(fn, x, policy_fn=policy, min_bytes=1, **options)
    times = len(runs)
    assert_same_gradients(found, gradients_of(fn, x))
    return times


@pytest.mark.one_schedule
@pytest.mark.parametrize("decision", list(CheckpointPolicy), ids=lambda policy: policy.name)
def test_what_is_saved_or_left_does_not_run_again(device, new_pool, decision):
    times = times_run(policy_of(decision, [DOUBLE]), random(device, 8, 8), pool=new_pool())
    assert times == (2 if "RECOMPUTE" in decision.name else 1)


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    "policy",
    [
        [DOUBLE],
        policy_of(torch_checkpoint.CheckpointPolicy.MUST_SAVE, [DOUBLE]),
        policy_of(torch_checkpoint.CheckpointPolicy.PREFER_SAVE, [DOUBLE]),
        policy_of(True, [DOUBLE], otherwise=False),
        policy_of(
            torch_checkpoint.CheckpointPolicy.MUST_SAVE,
            [DOUBLE],
            otherwise=torch_checkpoint.CheckpointPolicy.MUST_RECOMPUTE,
        ),
    ],
    ids=["op list", "MUST_SAVE", "PREFER_SAVE", "bools", "MUST_RECOMPUTE"],
)
def test_torchs_own_policies_are_accepted_as_they_are(device, policy):
    assert times_run(policy, random(device, 8, 8)) == 1


@pytest.mark.one_schedule
def test_torchs_offload_policies_swap(device, new_pool):
    offload = getattr(torch_checkpoint.CheckpointPolicy, "MUST_CPU_OFFLOAD", None)
    if offload is None:
        pytest.skip("this torch has no policy that offloads")
    pool, x = new_pool(), random(device, 8, 8).requires_grad_()
    ours = checkpointing(pool, offload)
    ours.checkpoint(lambda x: (x @ x).sin(), x).sum().backward()
    assert ours.stats().moved_storages == 1
    assert_released(ours, pool)


@pytest.mark.one_schedule
def test_bad_policies_are_named(device):
    x = random(device, 4, 4).requires_grad_()
    with pytest.raises(TypeError, match="expected a function"):
        memswap.checkpoint(torch.sin, x, policy_fn=3)
    with pytest.raises(ValueError, match=r"aten\.mm\.default"):
        memswap.checkpoint(torch.sin, x, policy_fn=[aten.mm])
    with pytest.raises(TypeError, match=r"returned 'save' for aten\.sin\.default"):
        memswap.checkpoint(torch.sin, x, policy_fn=lambda *_: "save")
    with pytest.raises(TypeError, match="swap_inputs='yes'"):
        memswap.checkpoint(torch.sin, x, swap_inputs="yes")
    with pytest.raises(TypeError, match="pool=4"):
        memswap.checkpoint(torch.sin, x, pool=4)


@pytest.mark.one_schedule
def test_policy_sees_what_torchs_would(device):
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append((op, tuple(ctx.op_output.shape), ctx.is_recompute, len(args)))
        return False

    x = random(device, 2, 4).requires_grad_()
    memswap.checkpoint(lambda x: x.exp() * 2, x, policy_fn=policy).sum().backward()
    assert seen == [(aten.exp.default, (2, 4), False, 1), (aten.mul.Tensor, (2, 4), False, 2)]


def test_what_does_not_shrink_stays_and_is_counted(device, new_pool):
    """Random float32 bits: nobody can encode them shorter."""
    pool = new_pool()
    noise = torch.randint(0, 256, (1 << 16,), generator=torch.Generator().manual_seed(0))
    x = noise.to(torch.uint8).view(torch.float32).nan_to_num(1.0).to(device)
    ours = memswap.Checkpointing(
        policy_of(CheckpointPolicy.MUST_ENCODE, [aten.neg.default]),
        pool=pool,
        min_bytes=1,
        prefetch_bytes=0,
    )
    expected = gradients_of(lambda x: x.neg().sin(), x)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        ours.checkpoint(lambda x: x.neg().sin(), leaf).sum().backward()
        assert_same_gradients([leaf.grad], expected)
        let_sends_end(ours, device)
    assert "does not shrink" in ours.stats().kept
    assert_released(ours, pool)


def test_small_outputs_stay_and_are_counted(device, new_pool):
    pool = new_pool()
    ours = memswap.Checkpointing(policy_of(CheckpointPolicy.MUST_SWAP), pool=pool)
    x = random(device, 8, 8).requires_grad_()
    ours.checkpoint(lambda x: (x @ x).sin(), x).sum().backward()
    assert ours.stats().kept["small"].tensors == 1 and ours.stats().moved_storages == 0
