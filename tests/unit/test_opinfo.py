"""Every differentiable operator that PyTorch lists, with its saved tensors swapped.

Gradients must be bit for bit what they are without hooks, and the numerical derivatives of first
and second order must agree. What fails or differs is tried without hooks as well.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memswap
from memswap.engine import recipes

common = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="torch's operator list needs its test dependencies (numpy, expecttest)",
)

utils = pytest.importorskip("torch.testing._internal.common_utils")

pytestmark = pytest.mark.filterwarnings("ignore")

#: Operators whose gradients differ from run to run without any hooks, and from the same seed.
NOT_DETERMINISTIC = ("empty",)

OPERATORS = [
    op
    for op in common.op_db
    if op.supports_autograd
    and torch.float64 in op.supported_backward_dtypes("cpu")
    and not any(word in op.name for word in NOT_DETERMINISTIC)
]


def name_of(op: Any) -> str:
    return op.name + (f"-{op.variant_test_name}" if op.variant_test_name else "")


def seeded(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """As `op.sample_inputs` does it, which looks through the stack for a unittest each time."""
    utils.set_rng_seed()
    samples = iter(op.sample_inputs_func(op, "cpu", dtype, True))
    while True:
        utils.set_rng_seed()
        if (sample := next(samples, None)) is None:
            return
        yield sample


def samples_of(
    op: Any, most: int, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Any, tuple[torch.Tensor, ...]]]:
    """The first samples with a differentiable float input: a function of those, and the inputs."""
    found = 0
    for sample in seeded(op, dtype):
        arguments = (sample.input, *sample.args)
        leaves, spec = torch.utils._pytree.tree_flatten((arguments, dict(sample.kwargs)))
        places = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
        ]
        if not places or sum(leaves[i].numel() for i in places) > 1000:
            continue

        def call(*inputs, leaves=leaves, spec=spec, places=places, sample=sample):
            filled = list(leaves)
            for place, value in zip(places, inputs, strict=True):
                filled[place] = value
            args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
            out = sample.output_process_fn_grad(op.gradcheck_wrapper(op.op, *args, **kwargs))
            parts = [
                part
                for part in torch.utils._pytree.tree_leaves(out)
                if isinstance(part, torch.Tensor) and part.requires_grad
            ]
            return tuple(parts)

        yield call, tuple(leaves[i] for i in places)
        found += 1
        if found == most:
            return


def gradients(call: Any, inputs: tuple[torch.Tensor, ...], context: Any) -> list[Any] | None:
    """Derivatives of the sum of all outputs, with the operator inside `context`."""
    torch.manual_seed(0)
    with context:
        outputs = call(*(x.clone() for x in inputs))  # leaves would stay, as parameters do
    if not outputs:
        return None
    if isinstance(context, memswap.saved_tensors):
        context._engine.settle()  # everything that nobody holds goes away
    seeds = [torch.ones_like(out) for out in outputs]
    return list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    dense = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def new_engine(pool: memswap.DiskPool, action: str | None = None) -> memswap.saved_tensors:
    return memswap.saved_tensors(memswap.Policy(action, min_bytes=1), pool=pool)


def same(ours: list[Any], plain: list[Any]) -> bool:
    """Whether the same gradients are there, with the same bits."""
    return all(
        one is other
        or (
            one is not None
            and other is not None
            and one.shape == other.shape
            and one.layout == other.layout
            and bits(one) == bits(other)
        )
        for one, other in zip(ours, plain, strict=True)
    )


def check_bits(
    op: Any,
    pool: memswap.DiskPool,
    most: int,
    action: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> int:
    """Compare gradients; how many storages came back for it."""
    returned = 0
    for call, inputs in samples_of(op, most, dtype):
        expected = gradients(call, inputs, contextlib.nullcontext())
        if expected is None:
            continue
        engine = new_engine(pool, action)  # a new one has learnt nothing, and moves everything
        found = gradients(call, inputs, engine)
        assert found is not None
        if not same(found, expected):
            again = gradients(call, inputs, contextlib.nullcontext())
            assert again is not None
            if not same(again, expected):
                pytest.skip("gradients differ from run to run without hooks")
            pytest.fail(f"{name_of(op)}: memswap changed its gradients")
        stats = engine.stats()
        assert stats.away_bytes == 0 and stats.resident_bytes == 0, "a graph left something behind"
        returned += stats.recipe_runs if action == "recompute" else stats.returned_storages
    return returned


def check_numerically(
    op: Any, pool: memswap.DiskPool, second: bool, action: str | None = None
) -> None:
    options = {
        "nondet_tol": op.gradcheck_nondet_tol,
        "fast_mode": True,
        "check_grad_dtypes": True,
        "check_undefined_grad": False,
    }
    engine = new_engine(pool, action)
    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    for call, inputs in samples_of(op, 1):

        def plain(*arguments, call=call):
            return call(*(x.clone() for x in arguments))

        def swapped(*arguments, call=call):
            with engine:
                return call(*(x.clone() for x in arguments))

        try:
            check(swapped, inputs, **options)
        except Exception as wrong:
            try:
                check(plain, inputs, **options)
            except Exception as error:
                pytest.skip(f"fails without hooks as well: {str(error)[:80]}")
            raise AssertionError(f"{name_of(op)}: derivatives are wrong") from wrong


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = memswap.DiskPool(tmp_path_factory.mktemp("pool"), budget="64MiB", extent="1MiB")
    yield made
    gc.collect()
    assert made.statistics().blocks == 0, "blocks of the pool are still taken at the end"


@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_gradients_are_bitwise_the_same(op, pool):
    check_bits(op, pool, most=2)


@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_gradients_are_the_same_with_recipes_that_nobody_has_proven(op, pool, monkeypatch):
    """What an operator saves of its inputs was made by a clone, and what it calls made the rest."""
    monkeypatch.setattr(recipes, "PROOFS", 0)
    check_bits(op, pool, most=2, action="recompute")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_recipes_give_the_same_gradients_in_other_dtypes(op, dtype, pool, monkeypatch):
    """Vector kernels and oneDNN's are other ones than for float64."""
    if dtype not in op.supported_backward_dtypes("cpu"):
        pytest.skip(f"has no gradient in {dtype}")
    monkeypatch.setattr(recipes, "PROOFS", 0)
    check_bits(op, pool, most=2, action="recompute", dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPERATORS if op.supports_gradgrad], ids=name_of)
def test_second_derivatives_agree_with_recipes(op, pool, monkeypatch):
    monkeypatch.setattr(recipes, "PROOFS", 0)
    check_numerically(op, pool, second=True, action="recompute")


@pytest.mark.slow  # their bits are those of autograd alone, which the test above has seen
@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_first_derivatives_agree_with_numerical_ones(op, pool):
    check_numerically(op, pool, second=False)


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.supports_gradgrad], ids=name_of)
def test_second_derivatives_agree_with_numerical_ones(op, pool):
    check_numerically(op, pool, second=True)


def test_swapping_really_happens(pool):
    """The checks above mean nothing if nothing moves."""
    names = ("mul", "sin", "nn.functional.gelu", "matmul", "nn.functional.layer_norm")
    for op in OPERATORS:
        if op.name in names:
            assert check_bits(op, pool, most=1) > 0, f"{name_of(op)}: nothing went away and back"


def test_running_again_really_happens(pool, monkeypatch):
    monkeypatch.setattr(recipes, "PROOFS", 0)
    names = ("mul", "sin", "nn.functional.gelu", "nn.functional.layer_norm")
    for op in OPERATORS:
        if op.name in names:
            runs = check_bits(op, pool, most=1, action="recompute")
            assert runs > 0, f"{name_of(op)}: nothing was run again"


def test_the_list_is_broad():
    assert len(OPERATORS) > 300, f"only {len(OPERATORS)} operators were found in op_db"
