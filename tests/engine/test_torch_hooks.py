"""What PyTorch promises of saved-tensor hooks holds with memswap's as the hooks.

The subjects are those of the saved-tensor tests in PyTorch's test/test_autograd.py.
"""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from helpers import (
    EVERYTHING,
    assert_released,
    assert_same_gradients,
    let_sends_end,
    random,
    same_bits,
)

import memswap


@pytest.fixture
def pool(new_pool):
    return new_pool()


@pytest.fixture
def engine(pool):
    return memswap.saved_tensors(EVERYTHING, pool=pool)


def both(engine, device, function, *sizes):
    """Gradients of `function(*leaves)` with and without the hooks, bit for bit the same."""

    def run(context):
        leaves = [random(device, *size, seed=n).requires_grad_() for n, size in enumerate(sizes)]
        with context:
            out = function(*leaves)
        if isinstance(context, memswap.saved_tensors):
            let_sends_end(context, device)
        out.sum().backward()
        return [leaf.grad for leaf in leaves]

    plain = run(contextlib.nullcontext())
    assert_same_gradients(run(engine), plain)


FUNCTIONS = {
    "leaf squared": (lambda a: a * a, (5, 5)),
    "same leaf in two operators": (lambda a: a.sin() * a.cos(), (5, 5)),
    "power": (lambda a: (a * a) ** 3, (5,)),
    "output saved": (lambda a: a.exp(), (5,)),
    "output saved and used again": (lambda a: a.exp() * a.exp().tanh(), (5,)),
    "input and output saved": (lambda a, b: torch.linalg.vector_norm(a * b), (5,), (5,)),
    "several outputs": (lambda a: sum(part.exp().sum() for part in (a * 2).unbind()), (3, 4)),
    "list of saved tensors": (lambda a, b: torch.cat([a * 2, b.sin()]).prod(), (3,), (2,)),
    "stack of views": (lambda a: torch.stack([a[0], a[1], a[0]]).exp().prod(0), (2, 3)),
    "in place, output saved": (lambda a: (a * 2).sigmoid_(), (4,)),
    "in place on a view": (lambda a: (lambda b: (b[1:].mul_(3), b)[1])(a * 2).sin(), (4,)),
    "in place chain": (lambda a: ((a * 1).relu_() + 1).mul_(2).tanh_(), (4,)),
    "index put": (
        lambda a: (a * 1).index_put((torch.tensor([0, 2], device=a.device),), a[:2]),
        (4,),
    ),
    "where with a mask": (lambda a: torch.where(a > 0, a.exp(), a.sin()), (6,)),
    "gather": (lambda a: a.gather(0, (a > 0).long()), (4, 4)),
    "max pool indices": (lambda a: torch.nn.functional.max_pool1d(a[None], 2).sin(), (2, 8)),
    "sort": (lambda a: a.sort().values * a, (7,)),
    "scalar": (lambda a: (a * 2).sin(), ()),
    "broadcast": (lambda a, b: (a * 2) * (b * 2), (3, 1), (1, 4)),
    "matmul chain": (lambda a, b: a @ b @ a.t() @ b.t(), (3, 3), (3, 3)),
    "complex": (lambda a: torch.view_as_complex(a * 1).square().abs(), (4, 2)),
    "cumulative product": (lambda a: a.cumprod(0), (5,)),
    "layer norm": (lambda a: torch.nn.functional.layer_norm(a, (6,)).sin(), (3, 6)),
    "log softmax": (lambda a: a.log_softmax(-1)[:, 0], (3, 6)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_saving_and_unpacking_of_operators(engine, pool, device, name):
    function, *sizes = FUNCTIONS[name]
    both(engine, device, function, *sizes)
    assert_released(engine, pool, moved=name != "leaf squared")


def test_hooks_are_the_default_only_within_the_block(engine, device):
    x = random(device, 5).requires_grad_()
    before = (x * 2).sin()
    with engine:
        assert engine.stats().offered_tensors == 0, "a tensor saved before was packed again"
        inside = (x * 2).sin()
    after = (x * 2).sin()
    assert engine.stats().offered_tensors == 1, "tensors saved outside the block were offered"
    for out in (before, inside, after):
        x.grad = None
        out.sum().backward()
        assert same_bits(x.grad, (x * 2).detach().cos() * 2)


def test_block_left_by_an_exception_removes_its_hooks(engine, device):
    x = random(device, 5).requires_grad_()
    with pytest.raises(ZeroDivisionError), engine:
        raise ZeroDivisionError
    (x * 2).sin()
    assert engine.stats().offered_tensors == 0, "hooks stayed after an exception"


def test_backward_inside_the_block_saves_nothing_of_its_own(engine, pool, device):
    x = random(device, 5).requires_grad_()
    with engine:
        loss = (x * 2).sin().sum()
        offered = engine.stats().offered_tensors
        loss.backward()
        assert engine.stats().offered_tensors == offered
    del loss
    assert_released(engine, pool)


def test_nothing_is_saved_where_no_gradient_is_needed(engine, device):
    x = random(device, 5)
    with engine:
        (x * 2).sin().exp()
        with torch.no_grad():
            (x.clone().requires_grad_() * 2).sin()
    assert engine.stats().offered_tensors == 0


def test_entering_under_no_grad_and_enabling_inside(engine, device):
    """`no_grad` around the block: whatever enable_grad saves inside is right, moved or not."""
    x = random(device, 5).requires_grad_()
    with torch.no_grad(), engine, torch.enable_grad():
        out = (x * 2).sin().sum()
    out.backward()
    assert same_bits(x.grad, (x * 2).detach().cos() * 2)


def test_unpacked_tensor_has_requires_grad_and_graph_of_the_original(engine, device):
    x = random(device, 5).requires_grad_()
    with engine:
        y = x.exp()  # saves its own output
    saved = y.grad_fn._saved_result
    assert saved.grad_fn is y.grad_fn, "a saved output is not its own operator's output again"
    assert saved.requires_grad and not saved.is_leaf
    assert same_bits(saved, x.exp())
    with engine:
        z = (x * 2).sin()
    saved = z.grad_fn._saved_self
    assert saved.requires_grad and type(saved.grad_fn).__name__ == "MulBackward0"
    with engine:
        w = x.sin()
    leaf = w.grad_fn._saved_self
    assert leaf.is_leaf and leaf.requires_grad and same_bits(leaf, x)


def test_looking_at_saved_tensors_does_not_consume_them(engine, pool, device):
    x = random(device, 5).requires_grad_()
    with engine:
        y = (x * 2).sin()
    let_sends_end(engine, device)
    for _ in range(3):
        assert same_bits(y.grad_fn._saved_self, x * 2), "looking twice gives two different tensors"
    y.sum().backward()
    assert same_bits(x.grad, (x * 2).detach().cos() * 2)
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        y.grad_fn._saved_self  # noqa: B018
    del y
    assert_released(engine, pool)


def test_raw_saved_tensor_refuses_a_second_pair_of_hooks(engine, device):
    x = random(device, 5).requires_grad_()
    with engine:
        y = (x * 2).sin()
    with pytest.raises(RuntimeError, match="already"):
        y.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: t)
    y.sum().backward()


def test_hooks_registered_on_one_saved_tensor_leave_others_to_us(engine, device):
    x = random(device, 5).requires_grad_()
    h = x * 2
    y = h.sin()
    seen = []
    y.grad_fn._raw_saved_self.register_hooks(lambda t: seen.append(1) or t.clone(), lambda t: t)
    with engine:
        z = y.exp().sum()
    z.backward()
    assert seen == [1] and engine.stats().offered_tensors == 1


def test_inner_pair_replaces_outer_and_outer_returns(engine, new_pool, device):
    other = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x = random(device, 5).requires_grad_()
    with engine:
        a = (x * 2).sin()
        with other:
            b = (x * 3).sin()
        c = (x * 4).sin()
    assert (engine.stats().moved_storages, other.stats().moved_storages) == (2, 1)
    (a + b + c).sum().backward()


def test_disabled_hooks_mean_that_tensors_stay(engine, device):
    """Entering where hooks are disabled does not raise, it keeps (torch.func does this)."""
    x = random(device, 5).requires_grad_()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with engine:
            loss = (x * 2).sin().sum()
    assert engine.stats().moved_storages == 0
    loss.backward()
    assert same_bits(x.grad, (x * 2).detach().cos() * 2)


def test_disabling_hooks_inside_the_block_is_torchs_error(engine, device):
    with engine:
        with pytest.raises(RuntimeError, match="not here"):
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                pass  # PyTorch refuses while hooks are active
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_saving_for_a_custom_function_goes_through_the_hooks_and_back(engine, pool, device):
    class Swapped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(b, a, a * b)
            return a * b

        @staticmethod
        def backward(ctx, gradient):
            b, a, product = ctx.saved_tensors
            return gradient * b + 0 * product, gradient * a

    both(engine, device, lambda a, b: Swapped.apply(a * 2, b.sin()), (5,), (5,))
    assert_released(engine, pool)


def test_custom_function_that_returns_its_input(engine, pool, device):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a

        @staticmethod
        def backward(ctx, gradient):
            (a,) = ctx.saved_tensors
            return gradient * a

    both(engine, device, lambda a: Same.apply(a * 2).exp(), (5,))
    assert_released(engine, pool)


def test_custom_function_saving_the_same_tensor_twice(engine, pool, device):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a, a)
            return a * a

        @staticmethod
        def backward(ctx, gradient):
            one, two = ctx.saved_tensors
            return gradient * (one + two)

    both(engine, device, lambda a: Twice.apply(a * 2), (5,))
    assert engine.stats().moved_storages == 1
    assert_released(engine, pool)


def test_no_cycle_keeps_a_graph_alive(engine, pool, device):
    """What saves its own output would hold itself; the last reference frees it without gc."""
    import gc

    class Marker:
        pass

    gc.collect()
    gc.disable()
    try:
        x = random(device, 5).requires_grad_()
        with engine:
            y = x.exp()
        marker = Marker()
        y.grad_fn.metadata["marker"] = marker
        alive = weakref.ref(marker)
        del marker, y
        assert alive() is None, "a graph that saves its own output is kept alive by a cycle"
        assert_released(engine, pool)
    finally:
        gc.enable()


def test_saved_outputs_are_freed_while_the_graph_lives_on(engine, pool, device):
    x = random(device, 5).requires_grad_()
    with engine:
        first = (x * 2).exp()
        second = first.sin().sum()
    (gradient,) = torch.autograd.grad(second, [first])
    del first
    assert same_bits(gradient, (x * 2).detach().exp().cos())
    del second
    assert_released(engine, pool)


def test_detach_and_inplace_on_the_detached_are_noticed(engine, device):
    x = random(device, 5).requires_grad_()
    with engine:
        y = x.exp()
    engine._engine.settle()
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_leaf_edited_under_no_grad_after_saving_is_noticed(engine, device):
    x = random(device, 5).requires_grad_()
    with engine:
        y = x.sin()
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_requires_grad_switched_on_after_saving(engine, device):
    a, b = random(device, 5), random(device, 5, seed=1).requires_grad_()
    with engine:
        y = (a * b).sum()
    a.requires_grad_()
    y.backward()
    assert a.grad is None and same_bits(b.grad, a)


def test_multiple_dtypes_and_scalars(engine, pool, device):
    both(
        engine,
        device,
        lambda a: (a.double() * 2).sin().float() * a.half().exp().float() * (a > 0) * 3,
        (6,),
    )
    assert_released(engine, pool)


def test_views_share_their_saved_storage_in_backward(engine, pool, device):
    """save_on_cpu copies each; here both come back on one storage."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, a, b):
            ctx.save_for_backward(a, b)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            seen.append((a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()))
            return gradient, None, None

    x = random(device, 3).requires_grad_()
    with engine:
        base = random(device, 4, 4)
        out = Look.apply(x, base, base.t()[1:])
    del base
    let_sends_end(engine, device)
    out.sum().backward()
    assert seen[0][0] == seen[0][1]
    del out
    assert_released(engine, pool)


def test_reads_of_stats_and_hooks_from_a_tensor_hook(engine, device):
    """User code that runs in the middle of backward may call back into memswap."""
    seen = []

    def doubled(gradient):
        seen.append(engine.stats())
        return gradient * 2

    def run(context):
        x = random(device, 5).requires_grad_()
        with context:
            h = (x * 2).sin()
            h.register_hook(doubled)
            loss = h.exp().sum()
        loss.backward()
        return x.grad

    found = run(engine)
    assert seen[0].moved_storages == 2, "the statistics of that moment do not say what moved"
    assert same_bits(found, run(contextlib.nullcontext()))


def test_save_on_cpu_and_engine_agree_on_everything(engine, device):
    def run(context):
        x = random(device, 6, 6).requires_grad_()
        w = random(device, 6, 6, seed=1).requires_grad_()
        with context:
            loss = ((x @ w).tanh() @ w.t()).exp().sum()
        first = torch.autograd.grad(loss, [x, w], create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])]

    expected = run(torch.autograd.graph.save_on_cpu())
    assert_same_gradients(run(engine), expected)
