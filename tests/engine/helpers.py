"""What engine tests share: bitwise comparison, small models, and a training step."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from eventually import eventually
from torch import nn

import memswap
from memswap._native import native

#: Small enough for hundreds of runs, large enough to move: every storage counts.
EVERYTHING = memswap.Policy(min_bytes=1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes on the CPU, NaN payloads and signed zeros included."""
    raw = tensor.detach()
    conjugate, negative = raw.is_conj(), raw.is_neg()
    raw = raw.conj() if conjugate else raw  # a view without the bit: its bytes as they are
    raw = torch._neg_view(raw) if negative else raw
    dense = raw.cpu()
    dense = dense.conj() if conjugate else dense
    dense = (-dense if negative else dense).resolve_conj().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense).contiguous()
    flat = dense.reshape(-1).clone(
        memory_format=torch.contiguous_format
    )  # one element may have stride 0
    return flat.view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_same_gradients(
    found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]
) -> None:
    """Every gradient is bit for bit what it is without memswap."""
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        if plain is None or ours is None:
            assert ours is plain, f"gradient {number}: only one of the two runs has one"
        else:
            assert same_bits(ours, plain), f"gradient {number} of shape {list(plain.shape)} differs"


class Block(nn.Module):
    """A pre-norm transformer block without frills."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Blocks between an input projection and a mean."""

    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def new_stack(device: torch.device, depth: int = 3, width: int = 16, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(depth, width).to(device)


def new_input(device: torch.device, seed: int = 1, batch: int = 2, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 8, width, generator=generator).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


#: What `plain_gradients` found, on the CPU: it outlives a laboratory.
_PLAIN: dict[tuple[Any, ...], list[torch.Tensor | None]] = {}


def plain_gradients(device, *inputs, depth=3):
    """Gradients of the untouched model, accumulated over the inputs in order.

    Trained once for all schedules and away forms: it has one stream, so they change no bit of it.
    """
    key = (device, depth, *((x.dtype, x.shape, bits(x).numpy().tobytes()) for x in inputs))
    if key not in _PLAIN:
        model = new_stack(device, depth)
        for x in inputs:
            model(x).backward()
        _PLAIN[key] = [None if one is None else one.cpu() for one in gradients(model)]
    return _PLAIN[key]


def train_step(
    model: nn.Module, loss: Callable[[], torch.Tensor], *, keep: bool = False
) -> list[torch.Tensor | None]:
    """Zero, forward, backward; the gradients."""
    if not keep:
        model.zero_grad(set_to_none=True)
    loss().backward()
    return gradients(model)


def assert_nothing_left(stats: memswap.types.Stats) -> None:
    """No graph is alive, so nothing is away and nothing is counted as resident."""
    assert stats.away_bytes == 0, f"{stats.away_bytes} bytes are still away without a graph"
    assert stats.resident_bytes == 0, f"{stats.resident_bytes} saved bytes are still counted"


# --- what autograd gives back -------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """Everything that can be told of a strided tensor, its bits on the CPU."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conj: bool
    neg: bool
    content: bytes

    def __repr__(self) -> str:
        return (
            f"Look(size={self.size}, stride={self.stride}, offset={self.offset}, "
            f"dtype={self.dtype}, conj={self.conj}, neg={self.neg}, "
            f"{len(self.content)} bytes, hash {hash(self.content) & 0xFFFF:04x})"
        )


def look(tensor: torch.Tensor) -> Look:
    return Look(
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
        bits(tensor).numpy().tobytes() if tensor.numel() else b"",
    )


class Remember(torch.autograd.Function):
    """The identity; saves `tensors`, and appends in backward how they look to `seen`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Look], *tensors: torch.Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        ctx.seen.extend(look(tensor) for tensor in saved)
        return gradient, None, *(None for _ in saved)


def round_trip(
    engine: memswap.saved_tensors,
    make: Callable[[], Iterable[torch.Tensor]],
    device: torch.device,
    *,
    settle: bool = True,
) -> tuple[list[Look], list[Look]]:
    """How the tensors that `make` makes look in backward, and how they should.

    With `settle` every storage really goes away in between; without, backward may still find it on
    its way. Nobody but the graph holds them in between. What is expected comes from making them
    again: looking at the very tensors would order the host after them and hide a missing order.
    """
    seen: list[Look] = []
    anchor = torch.zeros(4, device=device, requires_grad=True)
    with engine:
        out = Remember.apply(anchor, seen, *make())
    if settle:
        engine._engine.settle()  # orders streams; does not synchronise the host with the device
    out.backward(torch.ones_like(out))
    return seen, [look(tensor) for tensor in make()]


def random(device: torch.device, *size: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Random numbers that do not depend on the device."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(size, generator=generator, dtype=torch.float64)
        if dtype.is_complex:
            made = torch.complex(made, torch.randn(size, generator=generator, dtype=torch.float64))
    else:
        made = torch.randint(0, 2 if dtype is torch.bool else 100, size, generator=generator)
    return made.to(dtype).to(device)


# --- a model under either door -------------------------------------------------------------------


class Training:
    """A stack trained with memswap in one of two ways, beside its plain gradients."""

    def __init__(
        self, way: str, model: nn.Module, pool: Any, policy: memswap.Policy = EVERYTHING, **options
    ) -> None:
        self.model = model
        self.pool = pool
        self.swap: memswap.saved_tensors | memswap.types.Manager
        if way == "manage":
            self.swap = memswap.manage(model.layers, policy, pool=pool, **options)
        else:
            self.swap = memswap.saved_tensors(policy, pool=pool, **options)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """The model's loss, saved under memswap."""
        if isinstance(self.swap, memswap.types.Manager):
            return self.model(x)
        with self.swap:
            return self.model(x)

    def stats(self) -> memswap.types.Stats:
        return self.swap.stats()

    def assert_released(self, *, moved: bool = True) -> None:
        assert_released(self.swap, self.pool, moved=moved)


def assert_released(
    swap: memswap.saved_tensors | memswap.types.Manager, pool: Any, *, moved: bool = True
) -> None:
    """No graph is alive: nothing is counted, and no block of the pool is taken.

    Args:
        moved: whether something had left since the statistics were last reset. Without this, a test
            under which nothing ever leaves would pass for one in which all came back.
    """
    flush_autograd(getattr(pool, "device", torch.device("cpu")))
    stats = swap.stats()
    assert stats.moved_storages > 0 or not moved, "nothing had left: the test shows nothing"
    assert stats.moved_storages == 0 or moved, "something had left that was to stay"
    assert_nothing_left(stats)
    assert_pool_empty(pool)


def assert_the_same_within(
    engine: Any,
    pool: Any,
    leaf: torch.Tensor,
    loss: Callable[[], torch.Tensor],
    *,
    steps: int = 1,
    device: torch.device | None = None,
) -> None:
    """Gradients of ``loss()`` are those of a plain run in each block, and then nothing is left.

    Args:
        engine: a ``saved_tensors``; each step is a block of its own.
        pool: of the engine.
        leaf: whose gradient is compared. It is None afterwards.
        loss: the forward.
        steps: how many.
        device: whose sends have ended before each backward; None: nobody waits for them.
    """
    loss().backward()
    expected, leaf.grad = leaf.grad, None
    for _ in range(steps):
        with engine:
            out = loss()
        if device is not None:
            let_sends_end(engine, device)
        out.backward()
        assert_same_gradients([leaf.grad], [expected])
        leaf.grad = None
    del out
    assert_released(engine, pool)


def flush_autograd(device: torch.device) -> None:
    """Wait until autograd has let go of the last backward's graph.

    `backward()` may return a moment earlier than an accelerator's thread ends its last task. That
    takes one task after another, so another backward comes after everything it still does. After an
    error, what was ready for the calling thread stays in its queue until its next backward.
    """
    torch.zeros((), requires_grad=True).mul(1).backward()
    if device.type != "cpu":
        torch.zeros((), device=device, requires_grad=True).mul(1).backward()


def assert_pool_empty(pool: Any) -> None:
    """Every block came back. A block whose transfer still runs comes back when that ends."""
    eventually(lambda: not pool.statistics().blocks)
    now = pool.statistics()
    assert now.blocks == 0, f"{now.blocks} blocks of the pool are still taken without a graph"
    assert now.in_use_bytes == 0, f"{now.in_use_bytes} bytes of the pool are still in use"


def let_sends_end(
    swap: memswap.saved_tensors | memswap.types.Manager, device: torch.device
) -> memswap.types.Stats:
    """Wait until everything that leaves has left, on the host's clock too; the statistics then."""
    swap._engine.settle()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return swap.stats()


def collect() -> None:
    """Collect what an exception's traceback, or another cycle, still holds."""
    gc.collect()


# --- a disk that fails ----------------------------------------------------------------------------


@contextlib.contextmanager
def files_no_longer_than(nbytes):
    """As on a full disk, every write beyond this length fails."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def descriptor_under(path):
    """The file descriptor of the pool's nameless file."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(path)):
                return int(name)
    raise AssertionError(f"no open file under {path}")


@contextlib.contextmanager
def frames_expected(**limits: float) -> Iterator[None]:
    """What is sent from devices that are first seen meanwhile goes by other `ExpectationLimits`."""
    opened = native.Expectations

    def with_limits(device: torch.device, given: native.ExpectationLimits | None = None) -> Any:
        given = given or native.ExpectationLimits()
        for name, value in limits.items():
            setattr(given, name, value)
        return opened(device, given)

    with mock.patch.object(native, "Expectations", with_limits):
        yield


@contextlib.contextmanager
def nothing_measured() -> Iterator[None]:
    """No operator takes any time for windows but what somebody says of it."""
    with mock.patch.object(native.Durations, "seconds", lambda durations, key, amount: None):
        yield
