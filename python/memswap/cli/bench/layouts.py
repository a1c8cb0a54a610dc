"""Tensors of the kinds that training saves, for every dtype, and the layouts their frames may have.

Made from random numbers, unlike those of ``kinds``: what :func:`memswap.encode` chooses is to be
right for each of them, whatever a model has learnt. Seeds are fixed; all tensors are on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from memswap import codec
from memswap._native import native

ELEMENTS = 1 << 20
"""Of most tensors here."""

FLOATS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = (
    *(torch.int8, torch.uint8, torch.int16, torch.uint16),
    *(torch.int32, torch.uint32, torch.int64, torch.uint64),
)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)


def layouts_of(dtype: torch.dtype) -> list[codec.LayoutName]:
    """Every layout that frames of a dtype may have (docs/format.md section 3)."""
    names: list[codec.LayoutName] = ["ints", "raw"]
    names += ["dense", "sparse"] if dtype in FLOATS else []
    names += ["bits"] if dtype.itemsize == 1 else []
    names += ["upcast"] if dtype == torch.float32 else []
    return names


def _normal(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _uniform(*size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(1))


def _causal_scores() -> torch.Tensor:
    """Masked with 0 behind the softmax, as a backward's gradient of scores is."""
    return _normal(4, 512, 512).tril()


def _causal_softmax() -> torch.Tensor:
    above = torch.ones(512, 512, dtype=torch.bool).triu(1)
    return _normal(4, 512, 512).masked_fill(above, -torch.inf).softmax(-1)


def _embedding_gradient(rows_in_100: int) -> torch.Tensor:
    return _normal(2048, 768) * 1e-3 * (_uniform(2048, 1) * 100 < rows_in_100)


#: Numbers that float dtypes hold, by kind.
_OF_FLOATS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: _normal(ELEMENTS),
    "half zeros": lambda: _normal(ELEMENTS) * (_uniform(ELEMENTS) < 0.5),
    "residual dropout": lambda: torch.nn.functional.dropout(_normal(ELEMENTS), 0.1),
    "one zero in 50": lambda: _normal(ELEMENTS) * (_uniform(ELEMENTS) < 0.98),
    "squared ReLU": lambda: _normal(ELEMENTS).relu().square(),
    "causal softmax": _causal_softmax,
    "causal scores": _causal_scores,
    "embedding gradient, 3 rows in 100": lambda: _embedding_gradient(3),
    "embedding gradient, 30 rows in 100": lambda: _embedding_gradient(30),
    "embedding gradient, 85 rows in 100": lambda: _embedding_gradient(85),
    "bfloat16 cast up": lambda: _normal(ELEMENTS).bfloat16(),
    "float16 cast up": lambda: _normal(ELEMENTS).half(),
    "additive mask": lambda: torch.zeros(1024, 1024).masked_fill(
        torch.ones(1024, 1024, dtype=torch.bool).triu(1), -torch.inf
    ),
}
#: Numbers that every dtype holds.
_OF_ALL: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(ELEMENTS),
    "ones": lambda: torch.ones(ELEMENTS),
    "dropout mask": lambda: _uniform(ELEMENTS) < 0.9,
    "mask, half": lambda: _uniform(ELEMENTS) < 0.5,
    "causal mask": lambda: torch.ones(1024, 1024, dtype=torch.bool).tril(),
}
#: Whole numbers, which integers hold modulo what they can.
_OF_INTEGERS: dict[str, Callable[[], torch.Tensor]] = {
    "tokens": lambda: torch.floor(_uniform(ELEMENTS) * 50257),
    "permutation": lambda: _uniform(1 << 18).argsort(),
    "indices of maxima": lambda: _normal(64, 1 << 12).max(1).indices.repeat(4096),
    "positions": lambda: torch.arange(ELEMENTS),
}


def _random_bits(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    nbytes = ELEMENTS * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype)


def _cast(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers keep as many low bits as are positive in their dtype."""
    if dtype in INTEGERS:
        numbers = numbers.long() & ((1 << 8 * dtype.itemsize - 1) - 1)
    return numbers.to(dtype)


def kinds_of(dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """By name, what makes a tensor of each kind that there is of a dtype."""
    makers = {**_OF_ALL}
    if dtype in FLOATS:
        makers = {**_OF_FLOATS, **makers}
    elif dtype in INTEGERS:
        makers = {**makers, **_OF_INTEGERS}
    made: dict[str, Callable[[], torch.Tensor]] = {
        name: lambda make=make: _cast(make(), dtype)  # type: ignore[misc]
        for name, make in makers.items()
    }
    if dtype != torch.bool:  # whose bytes are 0 and 1
        made["random bits"] = lambda: _random_bits(dtype)
    return made


def sizes_of(tensor: torch.Tensor) -> dict[codec.LayoutName, int]:
    """By layout, the bytes of the tensor's frame."""
    return {name: codec.encode(tensor, layout=name).nbytes for name in layouts_of(tensor.dtype)}


def chosen_for(tensor: torch.Tensor) -> codec.LayoutName:
    """The layout that :func:`memswap.encode` gives a tensor's frame."""
    code = native.dtype_code(tensor.dtype)
    chosen = codec.Layout(native.choose_layout(tensor.flatten(), code)).name.lower()
    return next(name for name in layouts_of(tensor.dtype) if name == chosen)


def cost_of_choosing(tensor: torch.Tensor, layout: codec.LayoutName, rounds: int) -> float:
    """Choosing a tensor's layout over encoding it in ``layout``, in one thread's own time.

    Args:
        tensor: best of many MiB, on the CPU.
        layout: that of the encodes.
        rounds: that alternate; their median is returned.
    """
    code = native.dtype_code(tensor.dtype)

    def seconds(work: Callable[[], object]) -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return statistics.median(
            seconds(lambda: native.choose_layout(tensor, code))
            / seconds(lambda: codec.encode(tensor, layout=layout))
            for _ in range(rounds)
        )
    finally:
        torch.set_num_threads(threads)
