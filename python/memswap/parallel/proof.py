"""Whether attention on a part of the queries is that part of attention on all of them, by trying.

Where keys are gathered, a module that masks by the place of a query in its tensor would be wrong
without a word. :class:`PlacedQueries` mends what it can see; a mask that is a buffer, a custom
kernel's own ``causal=True`` or a position bias it cannot. So before the first exchange the module
is run on a few random tokens: once with all queries, then with the queries of some ranks alone. No
rank needs another one for that, and all come to the same verdict. A mask that differs only at
distances beyond those tokens (a wide window by ``torch.arange``) is not found out. What the module
keeps, its parameters, buffers and the random number generators are afterwards as they were.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from memswap.parallel.attention import Lengths, PlacedQueries
from memswap.parallel.context_style import Role
from memswap.parallel.layouts import SequenceShards

#: Tokens of a rank in a trial: few, and more than the diagonals that masks begin at.
TRIAL_TOKENS = 4

#: What rounding may make of values of the order of one, by the precision that results have.
TOLERANCE = 1e-4
REDUCED_TOLERANCE = 5e-3
HALF_TOLERANCE = 3e-2


class NotTriedError(RuntimeError):
    """The module could not be run on other lengths than its own."""


@dataclass(frozen=True)
class TrialInput:
    """One of query, key and value as attention gets it: of which only the length is tried out."""

    shape: tuple[int, ...]
    seq_dim: int
    queries: bool
    """Whether its tokens are queries; of a tensor that holds both, they are as many."""
    dtype: torch.dtype
    device: torch.device


#: Builds a call from the tensors by name, and what becomes of every other tensor argument.
Call = Callable[
    [Mapping[Role, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]],
    tuple[Sequence[Any], dict[str, Any]],
]


@dataclass(frozen=True)
class PositionTrial:
    """The trial of one attention module.

    Args:
        module: its ``forward`` is called, without its own hooks.
        inputs: query, key and value, by the names that ``call`` knows.
        call: builds the arguments.
        cut: the queries of each rank that gathers, of a sequence of that length.
        rows: number of ranks that gather.
        seq_dim: dimension of the tokens in the output.
        real: lengths of the call that is about to be made.
        local: tokens of this rank outside attention.
    """

    module: nn.Module
    inputs: Mapping[Role, TrialInput]
    call: Call
    cut: Callable[[int], SequenceShards]
    rows: int
    seq_dim: int
    real: Lengths
    local: int

    def difference(self, *, cut_keys: bool = False) -> float:
        """By how much results differ, values being of the order of one; 0 if only by rounding.

        Args:
            cut_keys: queries that are one range get the keys up to their last one only.

        Raises:
            NotTriedError: the module ran in no trial; from what it raised.
        """
        failure: Exception | None = None
        own = len(self.real.positions)
        for wide, tokens in ((True, TRIAL_TOKENS), (False, TRIAL_TOKENS), (False, own)):
            try:
                with _untouched(self.module, wide, self._device):
                    return self._difference(wide, tokens, cut_keys)
            except Exception as error:
                failure = error
        raise NotTriedError(f"{type(failure).__name__}: {failure}") from failure

    @property
    def _device(self) -> torch.device:
        return next(iter(self.inputs.values())).device

    def _difference(self, wide: bool, tokens: int, cut_keys: bool) -> float:
        queries = tokens * self.rows
        keys = queries if self.real.keys == self.real.queries else queries + 3
        generator = torch.Generator().manual_seed(20)
        whole = {}
        for name, one in self.inputs.items():
            shape = list(one.shape)
            shape[one.seq_dim] = queries if one.queries else keys
            dtype = torch.float64 if wide else one.dtype
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            whole[name] = values.to(one.device, dtype)
        worst, compared = 0.0, False
        for fill in (True, False):  # of boolean masks, whichever means that a key is seen
            all_queries = Lengths(((0, queries),), queries, keys)
            expected = self._run(whole, all_queries, fill, wide)
            for row in sorted({0, self.rows // 2, self.rows - 1}):
                part = Lengths(self.cut(queries).ranges[row], queries, keys)
                places = part.positions.to(self._device)
                mine = dict(whole)
                for name, one in self.inputs.items():
                    if one.queries:
                        mine[name] = whole[name].index_select(one.seq_dim, places)
                    elif cut_keys:
                        mine[name] = whole[name].narrow(one.seq_dim, 0, part.stop)
                found = self._run(mine, part, fill, wide)
                for theirs, ours in zip(expected, found, strict=True):
                    if not self._is_cut(theirs, ours, queries, len(places)):
                        continue
                    theirs = theirs.index_select(self.seq_dim, places)
                    by = _difference(theirs, ours, wide)
                    if by is not None:
                        worst, compared = max(worst, by), True
        if not compared:
            raise NotTriedError("it returned no tensor with the dimensions of the queries")
        return worst

    def _is_cut(self, whole: torch.Tensor, part: torch.Tensor, queries: int, count: int) -> bool:
        sizes = list(whole.shape)
        if len(sizes) <= self.seq_dim or sizes[self.seq_dim] != queries:
            return False
        sizes[self.seq_dim] = count
        return list(part.shape) == sizes

    def _run(
        self, values: Mapping[Role, torch.Tensor], lengths: Lengths, fill: bool, wide: bool
    ) -> list[torch.Tensor]:
        def other(tensor: torch.Tensor) -> torch.Tensor:
            return self._resized(tensor, lengths, fill, wide)

        args, kwargs = self.call(values, other)
        with (
            torch.no_grad(),
            _disable_current_modes(),
            PlacedQueries(lengths, dropout=False),
        ):
            output = self.module.forward(*args, **kwargs)
        return [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]

    def _resized(
        self, tensor: torch.Tensor, lengths: Lengths, fill: bool, wide: bool
    ) -> torch.Tensor:
        """A tensor argument for a call of these lengths, which says nothing of its own.

        Integers are taken for positions, booleans and numbers for masks.
        """
        places, real = lengths.positions, self.real
        sizes = {
            real.queries: lengths.queries,
            real.keys: lengths.keys,
            self.local: len(places),
            len(real.positions): len(places),
        }
        dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and size in sizes]
        floating = tensor.is_floating_point()
        if not dims:
            return tensor.detach().double() if wide and floating else tensor.detach()
        shape = [sizes[n] if dim in dims else n for dim, n in enumerate(tensor.shape)]
        dtype = torch.float64 if wide and floating else tensor.dtype
        device = tensor.device
        if floating or tensor.dtype == torch.bool:
            return torch.full(shape, fill and not floating, dtype=dtype, device=device)
        along = places if shape[dims[-1]] == len(places) else torch.arange(shape[dims[-1]])
        view = [-1 if dim == dims[-1] else 1 for dim in range(len(shape))]
        return along.to(device, dtype).view(view).expand(shape).contiguous()


def _difference(expected: torch.Tensor, found: torch.Tensor, wide: bool) -> float | None:
    """The largest, if it is no rounding; None if nothing is finite."""
    tolerance = TOLERANCE if wide or expected.device.type == "cpu" else REDUCED_TOLERANCE
    for half in (torch.bfloat16, torch.float16):  # whatever they were converted to afterwards
        if torch.equal(expected.to(half).to(expected.dtype).nan_to_num(), expected.nan_to_num()):
            tolerance = HALF_TOLERANCE
    expected, found = expected.double(), found.double()
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    if not bool(finite.any()):
        return None
    expected, found = expected[finite], found[finite]
    worst = float((expected - found).abs().max())
    return worst if worst > tolerance * max(1.0, float(expected.abs().max())) else 0.0


@contextlib.contextmanager
def _untouched(module: nn.Module, wide: bool, device: torch.device) -> Iterator[None]:
    """Random parameters, copies of buffers, no dropout; afterwards everything is as it was."""
    generator = torch.Generator().manual_seed(21)
    kept = [(one, _contents(one)) for one in module.modules()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
        try:
            for one, _ in kept:
                one.training = False
                for name, value in one._parameters.items():
                    if value is not None:  # those that begin as zeros would hide what they do
                        other = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                        dtype = torch.float64 if wide else value.dtype
                        one._parameters[name] = nn.Parameter(
                            other.mul_(0.5).to(value.device, dtype), requires_grad=False
                        )
                for own in (one._buffers, one.__dict__):
                    for name, value in own.items():
                        if isinstance(value, torch.Tensor):
                            double = wide and value.is_floating_point()
                            value = value.detach()
                            own[name] = value.double() if double else value.clone()
            yield
        finally:
            for one, contents in kept:
                _restore(one, contents)


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, and copies of those that hold others."""
    return {
        name: (value, copy.copy(value) if type(value) in (list, dict, set) else None)
        for name, value in module.__dict__.items()
    }


def _restore(module: nn.Module, contents: dict[str, tuple[Any, Any]]) -> None:
    module.__dict__.clear()
    for name, (value, own) in contents.items():
        module.__dict__[name] = value
        if own is not None:
            value.clear()
            value.extend(own) if isinstance(value, list) else value.update(own)
