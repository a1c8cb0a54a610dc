"""Operators that are more than their output, inside checkpointed regions: views, edits, random
numbers, casts, subclasses, and functions that do not repeat themselves."""

from __future__ import annotations

import pytest
import torch
from checkpoint_helpers import (
    DOUBLE,
    LEAVE,
    CheckpointPolicy,
    aten,
    double,
    gradients_of,
    policy_of,
    runs,
)
from helpers import (
    assert_released,
    assert_same_gradients,
    flush_autograd,
    let_sends_end,
    random,
)
from subclasses import Pair
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import memswap
from memswap._native import native

EVERY_OP = [policy for policy in CheckpointPolicy if "RECOMPUTE" not in policy.name]
SAVING = pytest.mark.parametrize("decision", EVERY_OP, ids=lambda policy: policy.name)


def everything(decision):
    return lambda ctx, op, *args, **kwargs: decision


# --- views ------------------------------------------------------------------------------------


VIEWS = (aten.t.default, aten.slice.Tensor, aten.view.default, aten.split.Tensor)


@SAVING
@pytest.mark.one_schedule
@pytest.mark.parametrize("saved", ["every operator", "views only"])
def test_aliases_are_aliases_again(device, new_pool, decision, saved):
    """Views are made again on what came back, so the recomputation sees the same aliasing."""
    w = random(device, 8, 8)
    seen = []

    def fn(x):
        h = x @ w
        views = h.t(), h[2:], h.view(-1), h.detach(), torch.split(h, 4)[1]
        ours = h.untyped_storage().data_ptr()
        seen.append([view.untyped_storage().data_ptr() == ours for view in views])
        return sum(view.sin().exp().sum() for view in views)

    policy = everything(decision) if saved == "every operator" else policy_of(decision, VIEWS)
    x, pool = random(device, 8, 8, seed=1), new_pool()
    expected = gradients_of(fn, x)
    found = gradients_of(fn, x, policy_fn=policy, pool=pool, min_bytes=1)
    assert_same_gradients(found, expected)
    assert seen == [[True] * 5] * 3, "a view of the recomputation lies on another storage"


@pytest.mark.one_schedule
@pytest.mark.parametrize("decision", ["MUST_SAVE", "MUST_ENCODE"])
def test_what_is_kept_for_a_second_backward_keeps_nothing_else(device, new_pool, decision):
    """An output that stayed must not come to own the graph of the recomputation."""
    w, made = random(device, 8, 8), []

    def fn(x):
        h = x.exp()
        made.append(native.WeakStorage(native.StorageRef(h)))
        return (h @ w).sin()

    policy, x = policy_of(CheckpointPolicy[decision]), random(device, 8, 8, seed=1).requires_grad_()
    out = memswap.checkpoint(fn, x, policy_fn=policy, pool=new_pool()).sum()
    for _ in range(2):
        out.backward(retain_graph=True)
        if device.type != "cpu":
            flush_autograd(device)
        assert made[-1].expired(), "the recomputation outlives its backward"


@pytest.mark.every_action("swap", "encode")
def test_strides_and_offsets_come_back(device, new_pool, _action):
    pool = new_pool()
    ours = memswap.Checkpointing(
        policy_of(LEAVE[_action], [aten.transpose_copy.int, aten.mm.default, aten.clone.default]),
        pool=pool,
        min_bytes=1,
        prefetch_bytes=0,
    )
    seen = []

    def fn(x):
        outputs = [
            torch.mm(x, x),
            torch.clone(x.t()),  # keeps the strides of a transposed matrix
            torch.clone(x, memory_format=torch.contiguous_format),
        ]
        seen.append([(tuple(out.shape), out.stride(), out.storage_offset()) for out in outputs])
        return sum((out * out).exp().sum() for out in outputs)

    x = (random(device, 8, 8) / 8).requires_grad_()
    out = ours.checkpoint(fn, x)
    let_sends_end(ours, device)
    out.backward()
    assert seen[0] == seen[1]
    assert_same_gradients([x.grad], gradients_of(fn, x))
    del out
    assert_released(ours, pool)


# --- in-place edits ---------------------------------------------------------------------------


MUST = pytest.mark.parametrize("decision", ["MUST_SAVE", "MUST_SWAP", "MUST_ENCODE"])


@MUST
@pytest.mark.parametrize("through", ["itself", "a view"])
def test_an_edit_inside_the_region_is_noticed_and_the_op_named(device, new_pool, decision, through):
    def fn(x):
        h = x.exp()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # or the edit would meet the send
        (h if through == "itself" else h[2:]).mul_(2)
        return h.sin()

    x = random(device, 8, 8).requires_grad_()
    policy = policy_of(CheckpointPolicy[decision], [aten.exp.default])
    out = memswap.checkpoint(fn, x, policy_fn=policy, pool=new_pool(), min_bytes=1)
    with pytest.raises(memswap.InplaceEditError, match=rf"aten\.exp\.default .*{decision}"):
        out.sum().backward()


@MUST
def test_an_edit_after_the_region_is_noticed(device, new_pool, decision):
    policy, pool = policy_of(CheckpointPolicy[decision], [aten.exp.default]), new_pool()
    ours = memswap.Checkpointing(policy, pool=pool, min_bytes=1)
    x = random(device, 8, 8).requires_grad_()
    h = ours.checkpoint(lambda x: x.exp(), x)
    let_sends_end(ours, device)
    h.detach().add_(1)
    with pytest.raises(memswap.InplaceEditError, match=r"aten\.exp\.default"):
        h.sum().backward()


@pytest.mark.one_schedule
def test_an_output_that_was_only_preferred_is_computed_again_after_an_edit(device):
    def fn(x):
        return double(x.exp()).mul_(3).sin().exp()

    x = random(device, 8, 8)
    expected = gradients_of(fn, x)
    for decision, times in ((CheckpointPolicy.PREFER_SAVE, 2), (CheckpointPolicy.MUST_SAVE, None)):
        runs.clear()
        policy = policy_of(decision, [DOUBLE])
        if times is None:
            with pytest.raises(memswap.InplaceEditError):
                gradients_of(fn, x, policy_fn=policy)
        else:
            assert_same_gradients(gradients_of(fn, x, policy_fn=policy), expected)
            assert len(runs) == times


@pytest.mark.one_schedule
@pytest.mark.parametrize("decision", ["MUST_SAVE", "PREFER_SAVE", "MUST_SWAP", "MUST_ENCODE"])
def test_operators_that_write_their_argument_are_replayed_into_it(device, new_pool, decision):
    """torch's selective checkpoint cannot save them: it takes the write itself for an edit."""

    def fn(x):
        h = x * 2
        h.mul_(3).add_(1)  # only the last write is there at the end
        buffer = torch.empty_like(h)
        with torch.no_grad():
            torch.exp(h.detach(), out=buffer)
        return (h * buffer).sin()

    x, pool = random(device, 8, 8) / 8, new_pool()
    ours = memswap.Checkpointing(
        policy_of(CheckpointPolicy[decision], [aten.add_.Tensor, aten.exp.out]),
        pool=pool,
        min_bytes=1,
    )
    leaf = x.clone().requires_grad_()
    ours.checkpoint(fn, leaf).sum().backward()
    assert_same_gradients([leaf.grad], gradients_of(fn, x))
    if decision in ("MUST_SWAP", "MUST_ENCODE"):
        assert "written in place" in ours.stats().kept
    assert_released(ours, pool, moved=False)


@pytest.mark.one_schedule
def test_saving_whatever_can_be_saved_is_always_right(device):
    """PREFER_SAVE for every operator, in a function full of edits, views and random numbers."""

    def fn(x):
        h = nn.functional.dropout(x * 2, 0.5)
        h += 1
        h[1:].mul_(h[:-1].detach().clone())
        return nn.functional.relu(nn.functional.dropout(h.exp(), 0.3)).sin()

    x = random(device, 32, 32)
    torch.manual_seed(3)
    expected = gradients_of(fn, x)
    torch.manual_seed(3)
    found = gradients_of(fn, x, policy_fn=everything(CheckpointPolicy.PREFER_SAVE))
    assert_same_gradients(found, expected)


@pytest.mark.one_schedule
@SAVING
def test_operators_that_turn_their_argument_into_a_view_run_again(device, new_pool, decision):
    """What they write is a shape, which no saved output gives back."""

    def fn(x):
        y = (x + 1).unsqueeze_(0).sin()
        return ((y * 2).squeeze_(0).cos() * 2).t_().exp()

    def of_views(ctx, op, *args, **kwargs):
        chosen = torch.Tag.inplace_view in op.tags
        return decision if chosen else CheckpointPolicy.MUST_RECOMPUTE

    x = random(device, 24, 32)
    found = gradients_of(fn, x, policy_fn=of_views, pool=new_pool(), min_bytes=1)
    assert_same_gradients(found, gradients_of(fn, x))


@pytest.mark.one_schedule
@SAVING
def test_parts_that_count_their_own_edits_are_noticed(device, decision):
    """torch's GRU cell edits parts of its matrix products, whose version counters do not tell."""
    weight = random(device, 32, 32, seed=1)

    def fn(x):
        first, second = (x @ weight).unsafe_chunk(2, 1)
        return first.sigmoid_() * second.tanh_()

    x = random(device, 24, 32)
    options = {"policy_fn": policy_of(decision), "min_bytes": 1 << 20}
    if decision is CheckpointPolicy.PREFER_SAVE:
        assert_same_gradients(gradients_of(fn, x, **options), gradients_of(fn, x))
        return
    with pytest.raises(memswap.InplaceEditError, match="let the policy recompute aten"):
        gradients_of(fn, x, **options)


@pytest.mark.cpu_only  # a simulated device resizes no storage
@SAVING
def test_an_out_that_its_operator_resizes_is_resized_again(device, decision):
    weight = random(device, 32, 32, seed=1)

    def fn(x):
        out = x.new_empty(0)
        with torch.no_grad():
            torch.mm(x, weight, out=out)
        return x.sin() * out

    x = random(device, 24, 32)
    policy = policy_of(decision, [aten.mm.out])
    found = gradients_of(fn, x, policy_fn=policy, min_bytes=1)
    assert_same_gradients(found, gradients_of(fn, x))


def test_tensors_made_in_inference_mode_inside_a_region(device):
    """They have no version counter, and no operator can edit them either."""

    def fn(x):
        with torch.inference_mode():
            scale = float(x.detach().exp().sum())
        return x.sin() * scale

    x = random(device, 24, 32)
    policy = everything(CheckpointPolicy.MUST_ENCODE)
    found = gradients_of(fn, x, policy_fn=policy, min_bytes=1)
    assert_same_gradients(found, gradients_of(fn, x))


# --- random numbers ---------------------------------------------------------------------------


RANDOM = (aten.bernoulli.default, aten.native_dropout.default, aten.rand_like.default)


@pytest.mark.one_schedule
@SAVING
def test_what_draws_after_a_saved_dropout_draws_the_same_numbers_again(device, new_pool, decision):
    """torch's selective checkpoint recomputes the second mask with the numbers of the first."""

    def fn(x):
        first = torch.bernoulli(torch.full_like(x, 0.5))
        second = torch.bernoulli(torch.full_like(x, 0.5))
        return (x * first * second + torch.rand_like(x)).sin().exp()

    drawn = []

    def policy(ctx, op, *args, **kwargs):
        drawn.append(op)
        return decision if op in RANDOM and drawn.count(op) == 1 else False

    x = random(device, 32, 32)
    torch.manual_seed(5)
    expected = gradients_of(fn, x)
    after = torch.rand(3, device=device)
    ours = memswap.Checkpointing(policy, pool=new_pool(), min_bytes=1)
    torch.manual_seed(5)
    leaf = x.clone().requires_grad_()
    ours.checkpoint(fn, leaf).sum().backward()
    assert_same_gradients([leaf.grad], expected)
    assert torch.equal(torch.rand(3, device=device), after), "the region left the generator astray"


@pytest.mark.one_schedule
def test_generators_are_left_alone_where_the_user_says_so(device, new_pool):
    torch.manual_seed(5)
    x = random(device, 8, 8).requires_grad_()
    out = memswap.checkpoint(
        lambda x: (x * torch.bernoulli(torch.full_like(x, 0.5))).exp(),
        x,
        policy_fn=[aten.bernoulli.default],
        preserve_rng_state=False,
    )
    torch.manual_seed(9)
    out.sum().backward()
    found = torch.rand(3, device=device)
    torch.manual_seed(9)
    assert torch.equal(found, torch.rand(3, device=device))


# --- the context of the forward -----------------------------------------------------------------


@pytest.mark.one_schedule
@pytest.mark.every_action("swap", "encode")
def test_autocast_is_what_it_was_and_its_cache_does_not_shift_outputs(device, new_pool, _action):
    """A weight that both regions use is cast in the first forward, and in both recomputations."""
    shared = nn.Linear(16, 16).to(device)
    x, pool = random(device, 16, 16), new_pool()
    ours = memswap.Checkpointing(policy_of(LEAVE[_action]), pool=pool, min_bytes=1)

    def run(call):
        shared.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            h = call(lambda h: shared(h).sin().tanh(), leaf)
            out = call(lambda h: shared(h).cos().tanh(), h)
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        return [leaf.grad, shared.weight.grad, shared.bias.grad]

    expected = run(lambda fn, *args: fn(*args))
    for _ in range(2):
        assert_same_gradients(run(ours.checkpoint), expected)
    assert_released(ours, pool)


class Unsteady(nn.Module):
    """Does something else each time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        again = self.calls > 1
        h = x.exp()
        if again and self.kind == "another op more":
            h = h.exp()
        if again and self.kind == "another shape":
            h = h[:4]
        return h.exp().sin()


@pytest.mark.one_schedule
@pytest.mark.parametrize("kind", ["another op more", "another shape"])
def test_a_function_that_does_not_repeat_itself_is_told(device, new_pool, kind):
    x = random(device, 8, 8).requires_grad_()
    policy = policy_of(CheckpointPolicy.MUST_SWAP, [aten.exp.default])
    out = memswap.checkpoint(Unsteady(kind), x, policy_fn=policy, pool=new_pool(), min_bytes=1)
    expected = (memswap.RecomputeError, torch_checkpoint.CheckpointError)
    with pytest.raises(expected, match=r"aten\.exp\.default|more tensors|different"):
        out.sum().backward()


@pytest.mark.one_schedule
def test_early_stop_may_be_switched_off(device):
    x = random(device, 8, 8)
    for early_stop, times in ((True, 1), (False, 2)):
        runs.clear()
        # Its output is the region's: no backward needs it.
        gradients_of(lambda x: double(x.exp()), x, early_stop=early_stop)
        assert len(runs) == times
    runs.clear()
    with torch_checkpoint.set_checkpoint_early_stop(False):
        gradients_of(lambda x: double(x.exp()), x, policy_fn=[aten.exp.default])
    assert len(runs) == 2


@pytest.mark.one_schedule
@pytest.mark.parametrize("policy", [None, everything(CheckpointPolicy.PREFER_SAVE)])
def test_recomputation_ends_behind_the_operator_that_fills_what_it_saved(device, policy):
    """Rrelu's noise is saved before it is drawn, and in a region it may be the last save."""

    def gradients(call):
        torch.manual_seed(3)
        x = random(device, 8, 24).requires_grad_()
        out = call(lambda y: torch.rrelu(y, training=True), x * 1)
        stale = torch.full_like(x, torch.nan)
        del stale  # what is allocated next may get this memory
        out.sum().backward()
        return [x.grad]

    expected = gradients(lambda fn, y: fn(y))
    found = gradients(lambda fn, y: memswap.checkpoint(fn, y, policy_fn=policy, min_bytes=1))
    assert_same_gradients(found, expected)


# --- subclasses -------------------------------------------------------------------------------


@pytest.mark.every_action("swap", "encode")
def test_outputs_of_a_wrapper_subclass_leave_by_their_parts(device, new_pool, _action):
    pool = new_pool()
    policy = policy_of(LEAVE[_action], [aten.exp.default])
    ours = memswap.Checkpointing(policy, pool=pool, min_bytes=1, prefetch_bytes=0)

    def run(call):
        x = Pair(random(device, 16), random(device, 16, seed=1)).requires_grad_()
        out = call(lambda x: x.exp().sin().exp(), x)
        let_sends_end(ours, device)
        out.backward(Pair(torch.ones(16, device=device), torch.ones(16, device=device)))
        return [x.grad.a, x.grad.b]

    assert_same_gradients(run(ours.checkpoint), run(lambda fn, x: fn(x)))
    assert ours.stats().freed_bytes >= 2 * 16 * 4
    assert_released(ours, pool)


@pytest.mark.one_schedule
def test_fake_tensors_pass_through(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(8, 8, device="cpu", requires_grad=True)
        policy = policy_of(CheckpointPolicy.MUST_SWAP)
        memswap.checkpoint(lambda x: (x @ x).sin(), x, policy_fn=policy).sum().backward()
        assert x.grad is not None and x.grad.shape == (8, 8)
