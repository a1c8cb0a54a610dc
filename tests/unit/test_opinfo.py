"""Every differentiable operator that PyTorch lists, with its saved tensors swapped.

Gradients must be bit for bit what they are without hooks, and the numerical derivatives of first
and second order must agree. The operators named in QUICK run always, the whole list with --slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memswap

common = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="torch's operator list needs its test dependencies (numpy, expecttest)",
)

pytestmark = pytest.mark.filterwarnings("ignore")

#: Operators whose gradients differ from run to run without any hooks.
NOT_DETERMINISTIC = ("empty", "new_empty", "bernoulli", "normal", "rrelu", "dropout", "multinomial")

OPERATORS = [
    op
    for op in common.op_db
    if op.supports_autograd
    and torch.float64 in op.supported_backward_dtypes("cpu")
    and not any(word in op.name for word in NOT_DETERMINISTIC)
]

#: Operators that take longer than about a quarter of a second to check, and the reference
#: functions and linear algebra variants that save nothing which others do not.
SLOW_PREFIXES = ("_refs.", "linalg.", "fft.", "nn.functional.conv", "special.", "sparse.")


def name_of(op: Any) -> str:
    return op.name + (f"-{op.variant_test_name}" if op.variant_test_name else "")


def samples_of(op: Any, most: int) -> Iterator[tuple[Any, tuple[torch.Tensor, ...]]]:
    """The first samples with a differentiable float input: a function of those, and the inputs."""
    found = 0
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        arguments = (sample.input, *sample.args)
        leaves, spec = torch.utils._pytree.tree_flatten((arguments, dict(sample.kwargs)))
        places = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
        ]
        if not places or sum(leaves[i].numel() for i in places) > 100:
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


def gradients(call: Any, inputs: tuple[torch.Tensor, ...], saver: Any) -> list[Any] | None:
    """First derivatives, and those of their squares, with the operator under `saver`."""
    torch.manual_seed(0)
    with saver if saver is not None else contextlib.nullcontext():
        outputs = call(*(x.clone() for x in inputs))  # leaves would stay, as parameters do
    if not outputs:
        return None
    if saver is not None:
        saver._saver.settle()
    seeds = [torch.ones_like(out) for out in outputs]
    return list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    dense = dense.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def check_bits(op: Any, saver: memswap.saved_tensors, most: int) -> None:
    for call, inputs in samples_of(op, most):
        expected = gradients(call, inputs, None)
        again = gradients(call, inputs, None)
        if expected is None or again is None:
            continue
        for found_one, again_one in zip(expected, again, strict=True):
            if found_one is not None and bits(found_one) != bits(again_one):
                pytest.skip("gradients differ from run to run without hooks")
        found = gradients(call, inputs, saver)
        assert found is not None
        for ours, plain in zip(found, expected, strict=True):
            assert (ours is None) == (plain is None), f"{name_of(op)}: a gradient is missing"
            if plain is not None:
                assert ours.shape == plain.shape and ours.stride() == plain.stride()
                assert bits(ours) == bits(plain), f"{name_of(op)}: swapping changed its gradient"


def check_numerically(op: Any, saver: memswap.saved_tensors, second: bool) -> None:
    options = {
        "nondet_tol": op.gradcheck_nondet_tol,
        "fast_mode": True,
        "check_grad_dtypes": True,
        "check_undefined_grad": False,
    }
    for call, inputs in samples_of(op, 1):

        def swapped(*arguments, call=call):
            with saver:
                return call(*(x.clone() for x in arguments))

        check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
        try:
            check(lambda *arguments, call=call: call(*(x.clone() for x in arguments)), inputs, **options)
        except Exception as error:
            pytest.skip(f"fails without hooks as well: {str(error)[:80]}")
        assert check(swapped, inputs, **options), f"{name_of(op)}: derivatives are wrong"


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    return memswap.DiskPool(tmp_path_factory.mktemp("pool"), budget="64MiB", extent="1MiB")


@pytest.fixture
def saver(pool):
    yield (made := memswap.saved_tensors(memswap.Policy(min_bytes=1), pool=pool))
    stats = made.stats()
    assert stats.away_bytes == 0 and stats.resident_bytes == 0, "a graph left something behind"


def operators(slow: bool):
    return [
        pytest.param(op, id=name_of(op), marks=[pytest.mark.slow] if slow and is_slow(op) else [])
        for op in OPERATORS
    ]


def is_slow(op: Any) -> bool:
    return op.name.startswith(SLOW_PREFIXES) or op.name in SLOW


#: Found by measuring (--durations): the rest takes about 10 ms each.
SLOW: frozenset[str] = frozenset()


@pytest.mark.parametrize("op", operators(slow=False))
def test_gradients_are_bitwise_the_same(op, saver):
    check_bits(op, saver, most=2)


@pytest.mark.parametrize("op", operators(slow=True))
def test_first_derivatives_agree_with_numerical_ones(op, saver):
    check_numerically(op, saver, second=False)


@pytest.mark.parametrize("op", [p for p in operators(slow=True) if p.values[0].supports_gradgrad])
def test_second_derivatives_agree_with_numerical_ones(op, saver):
    check_numerically(op, saver, second=True)


def test_swapping_really_happened(saver):
    """The checks above mean nothing if nothing moved."""
    moved = 0
    for op in OPERATORS:
        if op.name in ("mul", "exp", "nn.functional.gelu", "softmax"):
            check_bits(op, saver, most=1)
            assert saver.stats().moved_storages > moved, f"{name_of(op)}: nothing was moved"
            moved = saver.stats().moved_storages
    assert moved > 0, "no operator's saved tensor was moved"


def test_the_list_is_broad():
    assert len(OPERATORS) > 300, f"only {len(OPERATORS)} operators were found in op_db"
