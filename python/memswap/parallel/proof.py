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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from memswap.engine.autograd import tensors_in
from memswap.parallel.attention import Lengths, PlacedQueries
from memswap.parallel.attention_exchanges import AttentionExchanges
from memswap.parallel.context_style import Arguments, Role

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


class PositionTrial:
    """The trial of one attention module, with the arguments of a call that is about to be made.

    Args:
        module: its ``forward`` is called, without its own hooks.
        exchanges: those that it makes.
        arguments: of its forward.
        given: this rank's tensors, before they are exchanged.
        real: lengths of the call.
        args: all arguments of the call.
        kwargs: the same by name.
    """

    def __init__(
        self,
        module: nn.Module,
        exchanges: AttentionExchanges,
        arguments: Arguments,
        given: Mapping[Role, torch.Tensor],
        real: Lengths,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.module = module
        self.real = real
        self._exchanges = exchanges
        self._arguments = arguments
        self._args, self._kwargs = args, kwargs
        self._rows = exchanges.mesh.rows
        self._seq_dim = exchanges.style.dims.seq_dim
        first = given[exchanges.roles[0]]
        self._device = first.device
        self._local = first.size(exchanges.layout(exchanges.roles[0]).seq_dim)
        self._inputs: dict[Role, torch.Tensor] = {}
        """What attention gets, as meta tensors: only their lengths are tried out."""
        for role, tensor in given.items():
            for part, one in exchanges.apart(role, tensor):
                shape, head_dim = list(one.shape), exchanges.layout(part).head_dim
                shape[head_dim] = exchanges.own_heads(role, shape[head_dim])
                self._inputs[part] = torch.empty(shape, dtype=one.dtype, device="meta")

    def difference(self, *, cut_keys: bool = False) -> float:
        """By how much results differ, values being of the order of one; 0 if only by rounding.

        Args:
            cut_keys: queries that are one range get the keys up to their last one only.

        Raises:
            NotTriedError: the module ran in no trial; from what it raised.
        """
        failure: Exception | None = None
        own, rows = len(self.real.positions), {0, self._rows // 2, self._rows - 1}
        for dtype, tokens in ((torch.float64, TRIAL_TOKENS), (None, TRIAL_TOKENS), (None, own)):
            try:
                with _untouched(self.module, dtype, self._device):
                    return self._difference(_Trial(tokens * self._rows, dtype), rows, cut_keys)
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
        few, tokens = TRIAL_TOKENS * self._rows, self.real.queries
        own = {one.dtype for one in self._inputs.values()}
        wide = None if torch.float64 in own else torch.float32
        kinds = dict.fromkeys([(wide, True), (None, True), (None, False)])
        while tokens > few or (tokens == self.real.queries and self.real.keys > few):
            fits, failure = 0, None
            for dtype, alone in kinds:
                trial = _Trial(tokens, dtype, alone, TRIAL_BYTES)
                try:
                    with _untouched(self.module, dtype, self._device):
                        return self._difference(trial, range(self._rows), cut_keys), tokens
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

    def _keys(self, queries: int) -> int:
        """Keys of a trial of so many queries: in the call's proportion, where it is that long."""
        real = self.real
        if real.keys == real.queries:
            return queries
        if queries <= TRIAL_TOKENS * self._rows:
            return queries + 3
        return -(-real.keys * queries // real.queries)

    def _whole(self, trial: _Trial, keys: int) -> dict[Role, torch.Tensor]:
        """Random query, key and value of the whole sequence."""
        generator = torch.Generator().manual_seed(20)
        drawn = torch.float32 if trial.limit_bytes else torch.float64
        whole = {}
        for role, one in self._inputs.items():
            shape, dims = list(one.shape), self._exchanges.layout(role)
            shape[dims.seq_dim] = trial.queries if _has_queries(role) else keys
            if trial.alone and dims.batch_dim is not None:
                shape[dims.batch_dim] = 1
            dtype = trial.dtype or one.dtype
            trial.check(math.prod(shape) * dtype.itemsize)
            values = torch.randn(shape, generator=generator, dtype=drawn)
            whole[role] = values.to(self._device, dtype)
        return whole

    def _difference(self, trial: _Trial, rows: Iterable[int], cut_keys: bool) -> float:
        queries, keys = trial.queries, self._keys(trial.queries)
        whole = self._whole(trial, keys)
        shards = self._exchanges.mesh.query_shards(queries)
        worst, compared = 0.0, False
        for fill in (True, False):  # of boolean masks, whichever means that a key is seen
            found = []
            for row in sorted(rows):
                part = Lengths(shards.ranges[row], queries, keys)
                places = part.positions.to(self._device)
                if not len(places):
                    continue
                mine = dict(whole)
                for role, one in whole.items():
                    dim = self._exchanges.layout(role).seq_dim
                    if _has_queries(role):
                        mine[role] = one.index_select(dim, places)
                    elif cut_keys:
                        mine[role] = one.narrow(dim, 0, part.stop)
                outputs, largest_bytes, _ = self._run(mine, part, fill, trial.dtype)
                trial.check(largest_bytes * queries // len(places))
                found.append((places, outputs))
            all_queries = Lengths(((0, queries),), queries, keys)
            expected, _, has_masks = self._run(whole, all_queries, fill, trial.dtype)
            for places, outputs in found:
                for theirs, ours in zip(expected, outputs, strict=True):
                    shape = list(theirs.shape)
                    if len(shape) <= self._seq_dim or shape[self._seq_dim] != queries:
                        continue
                    shape[self._seq_dim] = len(places)
                    if list(ours.shape) != shape:
                        continue
                    theirs = theirs.index_select(self._seq_dim, places)
                    each = self._seq_dim if trial.limit_bytes else None
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
            self._local: len(places),
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

        args, kwargs = [*self._args], {**self._kwargs}
        own = {key for _, key in self._arguments.places(args, kwargs).values()}
        arguments: list[tuple[Any, Any]] = [(args, place) for place in range(len(args))]
        for where, key in [*arguments, *((kwargs, name) for name in kwargs)]:
            if key not in own:
                where[key] = tree_map_only(torch.Tensor, resized, where[key])
        self._arguments.hand_out(values, args, kwargs)
        with (
            torch.no_grad(),
            _disable_current_modes(),
            _MeasuredQueries(lengths, dropout=False) as mode,
        ):
            output = self.module.forward(*args, **kwargs)
        return list(tensors_in(output)), mode.largest_bytes, has_masks


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


def _has_queries(role: Role) -> bool:
    """Whether the tokens of an input are queries; of a tensor that holds both, they are as many."""
    return role in ("q", "qkv")


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
