"""GatheredAttention: a module that gets a part of the queries and all keys, and was not told which.

See [Note: Placed queries] for what is done about it, and memswap.parallel.proof for how it is known
that this is enough.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from memswap._warn import warn
from memswap.parallel.attention import Lengths
from memswap.parallel.attention_exchanges import AttentionExchanges
from memswap.parallel.context_style import Arguments, Role
from memswap.parallel.proof import NotTriedError, PositionTrial

_ADVICE = (
    "Use causal_attention with ContextParallel(ranges=...), ContextParallel(mask=...), or ulysses "
    "on the whole mesh; verify=False if its result is right all the same"
)

#: Combinations of arguments and attributes that are tried; beyond them, numbers count for nothing.
MOST_KINDS = 32

#: Of a module and those inside: path, name and value of attributes that may say what its mask is.
Attributes = dict[tuple[str, str], bool | int | float | str]


@dataclass(frozen=True, slots=True)
class Tried:
    """The verdict on one kind of calls, and the lengths up to which it holds."""

    keys_are_cut: bool
    """Whether the module is to get the keys up to its last query only."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Of queries and keys, those with which it was tried, without shorter ones."""

    def covers(self, lengths: Lengths) -> bool:
        """Whether it was tried with sequences that are as long or longer."""
        return any(
            lengths.queries <= queries and lengths.keys <= keys for queries, keys in self.lengths
        )

    def tried_with(self, lengths: Lengths) -> Tried:
        """The same after one more trial."""
        queries, keys = lengths.queries, lengths.keys
        others = [one for one in self.lengths if one[0] > queries or one[1] > keys]
        return Tried(self.keys_are_cut, (*others, (queries, keys)))


def _told(value: Any, lengths: Lengths) -> Any:
    """What is left of an argument without its tensors and lengths: the same on all ranks.

    A number that is a length of the call counts as the name of that length.
    """
    if isinstance(value, (list, tuple)):
        return (type(value), *(_told(one, lengths) for one in value))
    if type(value) is int:
        named = {lengths.keys: "keys", lengths.queries: "queries"}
        if value and not lengths.queries % value and value == lengths.count:
            named[value] = "own"  # of all ranks
        return int, named.get(value, value)
    return (type(value), value) if type(value) in (bool, str, float) else type(value)


def _attributes(module: nn.Module) -> Attributes:
    return {
        (path, name): value
        for path, one in module.named_modules()
        for name, value in vars(one).items()
        if type(value) in (bool, int, float, str)
    }


class CallKind(NamedTuple):
    """What calls of a module have in common that differ only in their tensors and lengths.

    One call of each kind is tried.
    """

    told: tuple[Any, ...]
    """The arguments, without tensors and lengths (`_told`)."""
    attributes: frozenset[tuple[tuple[str, str], Any]]
    """The module's attributes, without those that its calls change themselves."""


class GatheredAttention:
    """Around one attention module where keys are gathered, unless ``ranges`` or ``mask`` tell it.

    Args:
        module: the attention module.
        exchanges: that it makes.
        arguments: of its forward.
    """

    def __init__(
        self, module: nn.Module, exchanges: AttentionExchanges, arguments: Arguments
    ) -> None:
        self._module = module
        self._style = exchanges.style
        self._exchanges = exchanges
        self._arguments = arguments
        self._tried: dict[CallKind, Tried] = {}
        self._found: Attributes = {}  # when the latest call began
        self._own_state: set[tuple[str, str]] = set()  # attributes that calls have changed
        self._warned = False

    def verify(
        self,
        given: Mapping[Role, torch.Tensor],
        lengths: Lengths,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Whether a part of the queries gets its part of the result.

        That is tried at the first call of its kind, and where sequences are longer than before.

        Args:
            given: this rank's tensors, before they are exchanged.
            lengths: those with which the module is about to be called.
            args: all arguments.
            kwargs: the same by name.

        Returns:
            Whether it is to get the keys up to its last query only: see [Note: Placed queries].

        Raises:
            ValueError: it does not, or this could not be tried.
        """
        if not self._style.verify:
            return False
        kind = self._kind(lengths, args, kwargs)
        known = self._tried.get(kind)
        if known is not None and known.covers(lengths):
            return known.keys_are_cut
        queries = given[self._exchanges.roles[0]]
        if queries.is_meta or is_fake(queries):
            return known is not None and known.keys_are_cut
        trial = PositionTrial(
            self._module, self._exchanges, self._arguments, given, lengths, args, kwargs
        )
        if known is None:
            like = (one for was, one in self._tried.items() if was.told == kind.told)
            known = Tried(self._cuts_keys(trial, next(like, None)))
        self._try_at_length(trial, known.keys_are_cut)
        self._tried[kind] = known.tried_with(lengths)
        return known.keys_are_cut

    def ended(self) -> None:
        """A call has ended: attributes that it has changed say nothing of its mask."""
        if not self._style.verify:
            return
        now = _attributes(self._module)
        changed = {key for key in {*now, *self._found} if now.get(key) != self._found.get(key)}
        if not changed <= self._own_state:
            self._own_state |= changed
            self._tried = {
                CallKind(kind.told, self._without_own(dict(kind.attributes))): tried
                for kind, tried in self._tried.items()
            }

    def _without_own(self, found: Attributes) -> frozenset[tuple[tuple[str, str], Any]]:
        return frozenset(one for one in found.items() if one[0] not in self._own_state)

    def _kind(self, lengths: Lengths, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind:
        self._found = _attributes(self._module)
        named = [*enumerate(args), *kwargs.items()]
        told = tuple((key, _told(value, lengths)) for key, value in named)
        kind = CallKind(told, self._without_own(self._found))
        if kind in self._tried or len(self._tried) < MOST_KINDS:
            return kind
        self._warn(
            f"it was called with more than {MOST_KINDS} combinations of arguments and attributes, "
            f"and what others mean for its mask is not tried any more. {_ADVICE}"
        )
        return CallKind(tuple((key, type(value)) for key, value in named), frozenset())

    def _cuts_keys(self, trial: PositionTrial, like: Tried | None) -> bool:
        """The trial of a few tokens: whether the module is right with keys up to its last query.

        Args:
            trial: of this module.
            like: the verdict on a kind that differs in attributes alone, which stands where this
                one cannot be tried; None: there is none.

        Raises:
            ValueError: it is right neither with them nor with all, or could not be tried.
        """
        name = type(self._module).__name__
        try:
            difference = trial.difference()
        except NotTriedError as error:
            if like is not None:
                self._warn(
                    "attributes of it have changed since it was tried, and whether it depends on "
                    f"where its queries are could not be tried again: {error}. {_ADVICE}"
                )
                return like.keys_are_cut
            raise ValueError(
                f"ContextParallel: keys are gathered, and whether {name} depends on where its "
                f"queries are could not be tried on a few tokens: {error}. {_ADVICE}"
            ) from error
        if not difference:
            return False
        if self._style.balance == "contiguous" and trial.real.queries == trial.real.keys:
            with contextlib.suppress(NotTriedError):
                if not trial.difference(cut_keys=True):
                    return True
        raise ValueError(
            f"ContextParallel: keys are gathered, and {name} gives a part of the queries "
            f"another result than they have among all (by {difference:.2g}, of values of "
            "about 1): its mask or bias goes by the place of a query in its tensor, which is "
            "another than that in the sequence. Expected scaled_dot_product_attention("
            f"is_causal=True), torch.tril or torch.triu of [queries, keys]. {_ADVICE}"
        )

    def _try_at_length(self, trial: PositionTrial, cut: bool) -> None:
        """The trial with the call's own lengths: see [Note: Trials].

        Raises:
            ValueError: the module is wrong there.
        """
        name, real = type(self._module).__name__, trial.real.queries
        try:
            difference, tokens = trial.difference_at_length(cut_keys=cut)
        except NotTriedError as error:
            self._warn(
                f"whether it depends on where its queries are was tried on a few tokens only, since"
                f" it did not run with all {real} queries: {error}. A mask that differs beyond "
                f"those, such as a sliding window by torch.arange, would be wrong. {_ADVICE}"
            )
            return
        if difference:
            raise ValueError(
                f"ContextParallel: keys are gathered, and {name} gives a part of {tokens} queries "
                f"another result than they have among all (by {difference:.2g} of its size), "
                "though not on a few tokens: its mask or bias goes by the place of a query in its "
                "tensor, as a sliding window by torch.arange does, which is another than that in "
                f"the sequence. {_ADVICE}"
            )
        if tokens < real:
            self._warn(
                f"whether it depends on where its queries are was tried with {tokens} of {real} "
                "tokens, since all take too much memory at a time. A mask that differs beyond "
                f"those, such as a longer sliding window by torch.arange, would be wrong. {_ADVICE}"
            )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            name = type(self._module).__name__
            warn(f"ContextParallel on {name}, where keys are gathered: {what}")
