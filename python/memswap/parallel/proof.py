"""Whether attention on a part of the queries is that part of attention on all of them, by trying.

Where keys are gathered, a module that masks by the place of a query in its tensor would be wrong
without a word. :class:`PlacedQueries` mends what it can see; a mask that is a buffer, a custom
kernel's own ``causal=True`` or a position bias it cannot. So before the first exchange the module
is run on random tokens: once with all queries, then with the queries of some ranks alone. No rank
needs another one for that, and all come to the same verdict. What the module keeps, its parameters,
buffers and the random number generators are afterwards as they were.

[Note: Trials] The first trial has a few tokens, in double precision. A mask that begins to differ
at a distance, such as a sliding window by ``torch.arange``, differs there only if it is shorter
than those tokens. So the second has sequences as long as the call's own, and every rank's part of
the queries: a mask that differs for no query of such a sequence makes no difference in the call.
It takes one sequence of the batch. Its largest tensor is known before all queries are run, from
what their parts took; where that is too much, shorter sequences are tried, and a warning says so.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


#: Bytes of the largest tensor of a trial with sequences as long as those of the call. Attention
#: that keeps its scores has four such tensors at a time.
TRIAL_BYTES = 1 << 30


class NotTriedError(RuntimeError):
    """The module could not be run on other lengths than its own."""


class _TooLargeError(RuntimeError):
    """A trial would take too much memory.

    Args:
        fits: tokens of a sequence that may do.
    """

    def __init__(self, fits: int) -> None:
        super().__init__(f"its largest tensor would take more than {TRIAL_BYTES} bytes")
        self.fits = fits


@dataclass(frozen=True)
class TrialInput:
    """One of query, key and value as attention gets it: of which only the length is tried out."""

    shape: tuple[int, ...]
    seq_dim: int
    batch_dim: int | None
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
        own, rows = len(self.real.positions), {0, self.rows // 2, self.rows - 1}
        for dtype, tokens in ((torch.float64, TRIAL_TOKENS), (None, TRIAL_TOKENS), (None, own)):
            try:
                with _untouched(self.module, dtype, self._device):
                    return self._difference(_Trial(tokens * self.rows, dtype), rows, cut_keys)
            except Exception as error:
                failure = error.with_traceback(None)  # which holds tensors
        raise NotTriedError(f"{type(failure).__name__}: {failure}") from failure

    def difference_at_length(self, *, cut_keys: bool = False) -> tuple[float, int]:
        """By how much results differ where sequences are as long as in the call: [Note: Trials].

        Args:
            cut_keys: as `difference` takes it.

        Returns:
            The difference, as a share of a query's result, 0 if only by rounding; and the tokens of
            the whole sequence of queries with which it was tried: fewer than the call's where these
            would take too much memory.

        Raises:
            NotTriedError: the module did not run; from what it raised.
        """
        few, tokens = TRIAL_TOKENS * self.rows, self.real.queries
        own = {one.dtype for one in self.inputs.values()}
        wide = None if torch.float64 in own else torch.float32
        kinds = dict.fromkeys([(wide, True), (None, True), (None, False)])
        while tokens > few or (tokens == self.real.queries and self.real.keys > few):
            fits, failure = 0, None
            for dtype, alone in kinds:
                trial = _Trial(tokens, dtype, alone, TRIAL_BYTES)
                try:
                    with _untouched(self.module, dtype, self._device):
                        return self._difference(trial, range(self.rows), cut_keys), tokens
                except _TooLargeError as error:
                    fits = max(fits, error.fits)
                except torch.OutOfMemoryError:
                    fits = max(fits, tokens // 2)
                except Exception as error:
                    failure = error.with_traceback(None)  # which holds tensors
            if not fits and failure is not None:
                raise NotTriedError(f"{type(failure).__name__}: {failure}") from failure
            tokens = fits
        return 0.0, min(few, self.real.queries)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.inputs.values())).device

    def _keys(self, queries: int) -> int:
        """Keys of a trial of so many queries: in the call's proportion, where it is that long."""
        real = self.real
        if real.keys == real.queries:
            return queries
        if queries <= TRIAL_TOKENS * self.rows:
            return queries + 3
        return -(-real.keys * queries // real.queries)

    def _whole(self, trial: _Trial, keys: int) -> dict[Role, torch.Tensor]:
        """Random query, key and value of the whole sequence."""
        generator = torch.Generator().manual_seed(20)
        drawn = torch.float32 if trial.limit_bytes else torch.float64
        whole = {}
        for name, one in self.inputs.items():
            shape = list(one.shape)
            shape[one.seq_dim] = trial.queries if one.queries else keys
            if trial.alone and one.batch_dim is not None:
                shape[one.batch_dim] = 1
            dtype = trial.dtype or one.dtype
            trial.check(math.prod(shape) * dtype.itemsize)
            values = torch.randn(shape, generator=generator, dtype=drawn)
            whole[name] = values.to(one.device, dtype)
        return whole

    def _difference(self, trial: _Trial, rows: Iterable[int], cut_keys: bool) -> float:
        queries, keys = trial.queries, self._keys(trial.queries)
        whole = self._whole(trial, keys)
        worst, compared = 0.0, False
        for fill in (True, False):  # of boolean masks, whichever means that a key is seen
            found = []
            for row in sorted(rows):
                part = Lengths(self.cut(queries).ranges[row], queries, keys)
                places = part.positions.to(self._device)
                if not len(places):
                    continue
                mine = dict(whole)
                for name, one in self.inputs.items():
                    if one.queries:
                        mine[name] = whole[name].index_select(one.seq_dim, places)
                    elif cut_keys:
                        mine[name] = whole[name].narrow(one.seq_dim, 0, part.stop)
                outputs, largest_bytes, _ = self._run(mine, part, fill, trial.dtype)
                trial.check(largest_bytes * queries // len(places))
                found.append((places, outputs))
            all_queries = Lengths(((0, queries),), queries, keys)
            expected, _, has_masks = self._run(whole, all_queries, fill, trial.dtype)
            for places, outputs in found:
                for theirs, ours in zip(expected, outputs, strict=True):
                    shape = list(theirs.shape)
                    if len(shape) <= self.seq_dim or shape[self.seq_dim] != queries:
                        continue
                    shape[self.seq_dim] = len(places)
                    if list(ours.shape) != shape:
                        continue
                    theirs = theirs.index_select(self.seq_dim, places)
                    each = self.seq_dim if trial.limit_bytes else None
                    by = _difference(theirs, ours, trial.dtype == torch.float64, each)
                    if by is not None:
                        worst, compared = max(worst, by), True
            if not has_masks:
                break
        if not compared:
            raise NotTriedError("it returned no tensor with the dimensions of the queries")
        return worst

    def _run(
        self,
        values: Mapping[Role, torch.Tensor],
        lengths: Lengths,
        fill: bool,
        wide: torch.dtype | None,
    ) -> tuple[list[torch.Tensor], int, bool]:
        """One call of the module.

        Args:
            values: query, key and value.
            lengths: of these.
            fill: what boolean masks are filled with.
            wide: dtype of floating-point arguments; None: as they are.

        Returns:
            What it returned, the bytes of the largest tensor on the way there, and whether among
            its arguments were masks.
        """
        places, real = lengths.positions, self.real
        sizes = {
            real.queries: lengths.queries,
            real.keys: lengths.keys,
            self.local: len(places),
            len(real.positions): len(places),
        }
        has_masks = False

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            """An argument of these lengths: integers are taken for positions, others for masks."""
            nonlocal has_masks
            dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and size in sizes]
            floating = tensor.is_floating_point()
            dtype = wide if wide and floating else tensor.dtype
            if not dims:
                return tensor.detach().to(dtype)
            shape = [sizes[n] if dim in dims else n for dim, n in enumerate(tensor.shape)]
            if floating or tensor.dtype == torch.bool:
                has_masks = True
                return torch.full(shape, fill and not floating, dtype=dtype, device=tensor.device)
            last = dims[-1]
            along = places if shape[last] == len(places) else torch.arange(shape[last])
            view = [-1 if dim == last else 1 for dim in range(len(shape))]
            return along.to(tensor.device, dtype).view(view).expand(shape).contiguous()

        args, kwargs = self.call(values, resized)
        with (
            torch.no_grad(),
            _disable_current_modes(),
            _MeasuredQueries(lengths, dropout=False) as mode,
        ):
            output = self.module.forward(*args, **kwargs)
        tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
        return tensors, mode.largest_bytes, has_masks


@dataclass(frozen=True)
class _Trial:
    """The size of one trial."""

    queries: int
    """Of the whole sequence."""
    dtype: torch.dtype | None
    """Of floating-point inputs, parameters and buffers; None: as they are."""
    alone: bool = False
    """Whether a batch is one sequence."""
    limit_bytes: int | None = None
    """Of its largest tensor; None: it has few tokens."""

    def check(self, nbytes: int) -> None:
        """Raises _TooLargeError if a tensor of the whole sequence takes more than it may."""
        if self.limit_bytes is not None and nbytes > self.limit_bytes:
            # Scores grow with the square of the tokens.
            raise _TooLargeError(int(0.9 * self.queries * math.sqrt(self.limit_bytes / nbytes)))


class _MeasuredQueries(PlacedQueries):
    """Keeps the bytes of the largest tensor that a function returns."""

    largest_bytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        for one in tree_leaves(result):
            if type(one) is torch.Tensor and one.layout == torch.strided:
                nbytes = min(one.nbytes, one.untyped_storage().nbytes())  # less if it is expanded
                self.largest_bytes = max(self.largest_bytes, nbytes)
        return result


def _difference(
    expected: torch.Tensor, found: torch.Tensor, wide: bool, each: int | None = None
) -> float | None:
    """The largest difference, if it is no rounding; None if nothing is finite.

    Args:
        wide: whether it was computed in double precision.
        each: a dimension: as a share of the largest value at each place of it, since the results of
            queries that see many keys are small. None: of all values, which are about 1.
    """
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
    expected, found = (one.masked_fill(~finite, 0.0) for one in (expected, found))
    largest = expected.abs().max()
    if each is None:
        scale = largest.clamp(min=1.0)
    else:
        others = [dim for dim in range(expected.ndim) if dim != each]
        scale = expected.abs().amax(others, keepdim=True).clamp(min=1e-6 * float(largest) or 1.0)
    difference = (expected - found).abs()
    if bool((difference <= tolerance * scale).all()):
        return 0.0
    return float((difference / (scale if each is not None else 1.0)).max())


@contextlib.contextmanager
def _untouched(module: nn.Module, wide: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Random parameters, copies of buffers, no dropout; afterwards everything is as it was.

    Args:
        wide: dtype of all that is floating-point; None: as it is.
    """
    generator = torch.Generator().manual_seed(21)
    kept = [(one, dict(vars(one)), _copied(one)) for one in module.modules()]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
        try:
            for one, *_ in kept:
                one.training = False
                for name, value in one._parameters.items():
                    if value is not None:  # those that begin as zeros would hide what they do
                        other = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                        dtype = wide or value.dtype
                        one._parameters[name] = nn.Parameter(
                            other.mul_(0.5).to(value.device, dtype), requires_grad=False
                        )
                for own in (one._buffers, one.__dict__):
                    for name, value in own.items():
                        if isinstance(value, torch.Tensor):
                            value = value.detach()
                            converts = wide is not None and value.is_floating_point()
                            own[name] = value.to(wide, copy=True) if converts else value.clone()
            yield
        finally:
            for one, attributes, contents in kept:
                vars(one).clear()
                vars(one).update(attributes)
                for name, content in contents.items():
                    holder = attributes[name]
                    holder.clear()
                    holder.extend(content) if isinstance(holder, list) else holder.update(content)


def _copied(module: nn.Module) -> dict[str, Any]:
    """Copies of the attributes of a module that hold others."""
    holders = (list, dict, set)
    return {name: copy.copy(one) for name, one in vars(module).items() if type(one) in holders}
