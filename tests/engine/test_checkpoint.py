"""memswap.checkpoint: the same bits whatever the policy, and what leaves is gone and comes back."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checkpoint_helpers import (
    DOUBLE,
    LEAVE,
    MATMULS,
    CheckpointPolicy,
    aten,
    double,
    gradients_of,
    policy_of,
    runs,
)
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    collect,
    gradients,
    let_sends_end,
    new_input,
    new_stack,
    random,
    train_step,
)
from torch.utils import checkpoint as torch_checkpoint

import memswap


def forward(model, call, x):
    """The stack's forward with each layer run by `call`."""
    x = model.enter(x)
    for layer in model.layers:
        x = call(layer, x)
    return x.square().mean()


def checkpointing(pool, decision=None, **options):
    policy = None if decision is None else policy_of(decision)
    return memswap.Checkpointing(policy, pool=pool, min_bytes=1, **options)


# --- policies -------------------------------------------------------------------------------------


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
    left = decision in LEAVE.values()
    assert (ours.stats().offered_tensors > 0) is left
    assert_released(ours, pool)


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


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.every_action("swap", "encode")
def test_what_left_is_gone_until_backward(device, new_pool, _action):
    pool = new_pool()
    ours = checkpointing(pool, LEAVE[_action])
    x, w = random(device, 64, 64), random(device, 64, 64, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x):
        return ((x @ w).sin() @ w).sin().sum()

    expected = gradients_of(fn, x)
    out = ours.checkpoint(fn, leaf)
    stats = let_sends_end(ours, device)
    assert stats.freed_bytes == stats.moved_bytes == 2 * 64 * 64 * 4
    out.backward()
    assert_same_gradients([leaf.grad], expected)
    assert ours.stats().returned_storages == 2
    assert_released(ours, pool)


def test_an_output_that_others_hold_is_not_freed_under_them(device, new_pool):
    """The region's own output is what the policy sends away; the caller reads it throughout."""
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP)
    x = random(device, 16, 16).requires_grad_()
    expected = (x @ x).detach().clone()
    for _ in range(3):
        out = ours.checkpoint(lambda x: x.sin().asin() * 0 + x @ x, x)
        kept = ours.checkpoint(lambda x: x @ x, x)
        let_sends_end(ours, device)
        assert torch.equal(kept, expected), "a swapped output was freed under its holder"
        (out.sum() + kept.sum()).backward()
        assert torch.equal(kept, expected)
    del out, kept
    assert_released(ours, pool)


def test_one_storage_moves_once_however_often_it_is_saved(device, new_pool):
    """A region's output is saved by its policy and, as the next region's input, by that one."""
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True, prefetch_bytes=0)
    x, w = random(device, 16, 16), random(device, 16, 16, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x):
        return x.sin() @ w

    h = ours.checkpoint(fn, leaf * 1)
    out = ours.checkpoint(fn, h).sum()
    del h
    stats = ours.stats()
    assert stats.moved_storages == 3 and stats.deduplicated_tensors == 1
    out.backward()
    assert_same_gradients([leaf.grad], gradients_of(lambda x: fn(fn(x * 1)), x))
    del out
    assert_released(ours, pool)


@pytest.mark.one_schedule
@pytest.mark.parametrize("ending", ["dropped", "error in forward", "error in backward", "no_grad"])
def test_nothing_is_left_behind(device, new_pool, ending):
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True)
    x = random(device, 16, 16).requires_grad_()

    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("backward says no")

    def fn(x):
        h = (x @ x).sin()
        if ending == "error in forward":
            raise ValueError("forward says no")
        return Refuse.apply(h.exp()) if ending == "error in backward" else h

    expects = pytest.raises(ValueError, match="says no")
    with expects if "error" in ending else contextlib.nullcontext():
        with torch.no_grad() if ending == "no_grad" else contextlib.nullcontext():
            out = ours.checkpoint(fn, x * 1)
            if ending == "error in backward":
                out.sum().backward()
    assert (ours.stats().moved_storages > 0) is (ending != "no_grad")
    if torch.__version__ < "2.13":  # torch's own hooks stay until the exception is dropped
        expects = None
        collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks are left"
    assert torch._C._len_torch_dispatch_stack() == 0, "a mode is left"
    out = expects = None
    collect()
    assert_released(ours, pool)


@pytest.mark.one_schedule
def test_eval_passes_between_steps_change_nothing(device, new_pool):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True)
    for _ in range(3):
        with torch.no_grad():
            forward(model, ours.checkpoint, x)
        with torch.inference_mode():
            forward(model, ours.checkpoint, x)
        forward(model, ours.checkpoint, x)  # with gradients, never used
        found = train_step(model, lambda: forward(model, ours.checkpoint, x))
        assert_same_gradients(found, expected)
    # Three layers with an input and four matrix products, or six where attention is decomposed.
    assert len(ours._saver.passage.sizes) <= 3 * 7, "forwards without a backward pile up"
    assert_released(ours, pool)


# --- inputs -----------------------------------------------------------------------------------


@pytest.mark.every_action("swap", "encode")
def test_inputs_leave_whether_positional_nested_or_by_name(device, new_pool, _action):
    pool = new_pool()
    action = memswap.Action(_action)
    ours = memswap.Checkpointing(swap_inputs=action, pool=pool, min_bytes=1, prefetch_bytes=0)
    raw = [random(device, 32, seed=seed) for seed in range(4)]

    def fn(a, pair, *, last, scale):
        return (a * pair[0]).sin() * (pair[1]["b"] * last).cos() * scale

    def run(call):
        leaves = [one.clone().requires_grad_() for one in raw]
        a, b, c, d = (leaf * 1 for leaf in leaves)
        out = call(fn, a, (b, {"b": c}), last=d, scale=2.0).sum()
        del a, b, c, d
        let_sends_end(ours, device)
        out.backward()
        return [leaf.grad for leaf in leaves]

    found = run(ours.checkpoint)
    assert ours.stats().moved_storages == 4
    assert ours.stats().freed_bytes == 4 * 32 * 4, "an input was held beside its away form"
    assert_same_gradients(found, run(lambda fn, *args, **kwargs: fn(*args, **kwargs)))
    assert_released(ours, pool)


def test_parameters_among_the_inputs_stay(device, new_pool):
    pool = new_pool()
    ours = memswap.Checkpointing(swap_inputs=True, pool=pool, min_bytes=1)
    weight = torch.nn.Parameter(random(device, 8, 8))
    frozen = torch.nn.Parameter(random(device, 8, 8, seed=1), requires_grad=False)
    ours.checkpoint(lambda a, b, c: (a @ b @ c).sin(), weight, frozen, weight.t()).sum().backward()
    assert ours.stats().moved_storages == 0 and ours.stats().kept["parameter"].tensors == 3


def test_an_input_edited_before_backward_is_noticed(device, new_pool):
    ours = memswap.Checkpointing(swap_inputs=True, pool=new_pool(), min_bytes=1)
    x = random(device, 8).requires_grad_()
    h = x * 1
    out = ours.checkpoint(lambda h: h.sin().exp(), h)
    let_sends_end(ours, device)
    h.detach().add_(1)
    with pytest.raises(memswap.InplaceEditError, match="modified by an inplace"):
        out.sum().backward()


# --- graphs -----------------------------------------------------------------------------------


@pytest.mark.every_action("swap", "encode")
def test_second_backward_finds_everything_again(device, new_pool, _action):
    """torch's selective checkpoint refuses here: it hands out what it saved only once."""
    pool = new_pool()
    ours = checkpointing(pool, LEAVE[_action], swap_inputs=memswap.Action(_action))
    x, w = random(device, 16, 16), random(device, 16, 16, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x):
        return ((x @ w).sin() @ w).sin()

    (expected,) = gradients_of(fn, x)
    out = ours.checkpoint(fn, leaf * 1).sum()
    for again in (True, True, False):
        leaf.grad = None
        out.backward(retain_graph=again)
        assert_same_gradients([leaf.grad], [expected])
    del out
    assert_released(ours, pool)


@pytest.mark.parametrize("decision", ["MUST_SAVE", "MUST_SWAP"])
def test_two_losses_that_use_parts_of_one_region(device, new_pool, decision):
    """Two backward passes without retain_graph; each recomputes the region for its part."""
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy[decision])
    x, w = random(device, 16, 16), random(device, 16, 16, seed=1)
    leaf = x.clone().requires_grad_()

    def fn(x, y):
        return (x @ w).sin().exp(), (y @ w).cos().exp()

    a, b = ours.checkpoint(fn, leaf, leaf)
    a.sum().backward()
    b.sum().backward()
    assert_same_gradients([leaf.grad], gradients_of(lambda x: sum(fn(x, x)), x))
    del a, b
    assert_released(ours, pool)


@pytest.mark.every_action("swap", "encode")
def test_double_backward(device, new_pool, _action):
    pool = new_pool()
    ours = checkpointing(pool, LEAVE[_action])
    raw = random(device, 8, 8), random(device, 8, 8, seed=1)

    def run(call):
        x, w = (one.clone().requires_grad_() for one in raw)
        out = call(lambda x, w: ((x @ w).sin() @ w).sin(), x, w).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        gradient.square().sum().backward()
        return [x.grad, w.grad]

    assert_same_gradients(run(ours.checkpoint), run(lambda fn, *args: fn(*args)))
    collect()
    assert_released(ours, pool)


@pytest.mark.parametrize("order", ["first in first out", "last in first out", "one ahead"])
def test_several_microbatches_in_flight(device, new_pool, order):
    model, pool = new_stack(device), new_pool()
    inputs = [new_input(device, seed=seed) for seed in range(3)]

    def accumulate():
        for x in inputs:
            model(x).backward()
        return gradients(model)

    model.zero_grad(set_to_none=True)
    if order == "last in first out":
        inputs.reverse()
    expected = [gradient.clone() for gradient in accumulate()]
    if order == "last in first out":
        inputs.reverse()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, swap_inputs=True)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        if order == "one ahead":
            losses = [forward(model, ours.checkpoint, inputs[0])]
            for x in inputs[1:]:
                losses.append(forward(model, ours.checkpoint, x))
                losses.pop(0).backward()
            losses.pop().backward()
        else:
            losses = [forward(model, ours.checkpoint, x) for x in inputs]
            while losses:
                losses.pop(0 if order.startswith("first") else -1).backward()
        assert_same_gradients(gradients(model), expected)
    assert_released(ours, pool)


# --- composition ------------------------------------------------------------------------------


@pytest.mark.every_action("swap", "encode")
@pytest.mark.parametrize("outer", [None, "MUST_SAVE", "leaves"])
def test_regions_in_regions(device, new_pool, outer, _action):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    around = {None: None, "MUST_SAVE": CheckpointPolicy.MUST_SAVE, "leaves": LEAVE[_action]}[outer]
    ours = checkpointing(pool, around, swap_inputs=True)
    policy = policy_of(LEAVE[_action])

    def inner(layer, h):
        return memswap.checkpoint(layer, h, policy_fn=policy)

    def both(first, second, h):
        return inner(second, inner(first, h))

    def loss():
        h = model.enter(x)
        h = ours.checkpoint(both, model.layers[0], model.layers[1], h)
        return ours.checkpoint(inner, model.layers[2], h).square().mean()

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    # An engine of the inner regions' own would not have this pool, nor this object's statistics.
    inner_saves = 3 * 4
    assert ours.stats().offered_tensors > inner_saves
    assert_released(ours, pool)


def test_torchs_checkpoint_inside_and_around(device, new_pool):
    model, x, pool = new_stack(device), new_input(device), new_pool()
    expected = train_step(model, lambda: model(x))
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP)

    def theirs(fn, *args):
        context_fn = lambda: torch_checkpoint.create_selective_checkpoint_contexts(list(MATMULS))  # noqa: E731
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, context_fn=context_fn)

    def loss():
        h = theirs(ours.checkpoint, model.layers[0], model.enter(x))
        h = ours.checkpoint(theirs, model.layers[1], h)
        return theirs(model.layers[2], h).square().mean()

    for _ in range(2):
        assert_same_gradients(train_step(model, loss), expected)
    assert_released(ours, pool)


def test_inside_a_managed_layer_it_is_the_managers_engine(device, new_pool, way, new_training):
    plain = new_stack(device)
    x = new_input(device)
    expected = train_step(plain, lambda: plain(x))
    training = new_training(policy=EVERYTHING)
    ours = memswap.checkpoint_module(
        training.model.layers, policy_of(CheckpointPolicy.MUST_SWAP), swap_inputs=True
    )
    for _ in range(3):
        found = train_step(training.model, lambda: training.loss(x))
        assert_same_gradients(found, expected)
    assert ours.stats().offered_tensors == 0, "an engine of its own inside a managed layer"
    assert training.stats().moved_storages >= 3 * 3 * 4
    training.assert_released()


def test_a_pool_that_is_given_is_used_inside_a_block(device, new_pool):
    block_pool, pool = new_pool(), new_pool()
    saver = memswap.saved_tensors(memswap.Policy(action=memswap.Action.KEEP), pool=block_pool)
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP)
    x = random(device, 16, 16).requires_grad_()
    with saver:
        out = ours.checkpoint(lambda x: (x @ x).sin(), x)
    assert ours.stats().moved_storages == 1 and pool.statistics().blocks == 1
    out.sum().backward()
    del out
    assert_released(ours, pool)


def test_block_inside_a_region_steps_aside(device, new_pool):
    pool = new_pool()
    saver = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 16, 16).requires_grad_()

    def fn(x):
        with saver:
            return (x @ x).sin().exp()

    memswap.checkpoint(fn, x).sum().backward()
    assert_same_gradients([x.grad], gradients_of(lambda x: (x @ x).sin().exp(), x))
    assert saver.stats().offered_tensors == 0


def test_prefetch_follows_the_regions_from_the_first_backward_on(device, new_pool):
    """Regions come back last to first, each in the order of its forward: one stall to begin with.

    With the order of ordinary saved tensors, each region's first demand would find nothing.
    """
    pool = new_pool()
    ours = checkpointing(pool, CheckpointPolicy.MUST_SWAP, prefetch_bytes="1MiB")
    x, w = random(device, 16, 16).requires_grad_(), random(device, 16, 16, seed=1)

    def fn(x):
        return (((x @ w).sin() @ w).sin() @ w).sin()

    h = x
    for _ in range(4):
        h = ours.checkpoint(fn, h)
    out = h.sum()
    del h
    let_sends_end(ours, device)
    out.backward()
    assert ours.stats().returned_storages == 12
    assert ours.stats().stalls == 1
    del out
    assert_released(ours, pool)


@pytest.mark.cpu_only
def test_the_first_guess_goes_back_by_regions():
    from memswap.engine.timeline import first_guess

    assert first_guess([None, None, None]) == [2, 1, 0], "saved tensors: last saved first"
    assert first_guess([0, 0, 2, 2, 2, None, 6]) == [6, 5, 2, 3, 4, 0, 1]
    assert first_guess([]) == []
