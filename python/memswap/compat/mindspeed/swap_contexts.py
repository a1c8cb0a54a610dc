"""MindSpeed's tensor swap: contexts around the forwards of layers, on memswap's groups.

Contexts are made once, one for each layer, with the layers' common tag; nothing else is needed::

    contexts = [TensorSwapContext("model.layers.*") for _ in model.layers]
    ...
    with contexts[index]:
        hidden = layer(hidden)

Those without ``handler=`` share the process's :class:`AsyncSwapHandler`. Bytes go to a pool that is
used again and again, nothing is resized, and the caller's tensors keep their memory for as long as
the caller holds them. docs/migration.md shows before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from memswap._warn import UsersLine
from memswap.compat.mindspeed.swap_handler import AsyncSwapHandler
from memswap.engine.action import Action
from memswap.engine.autograd import in_backward
from memswap.planning.policy import Policy
from memswap.schedules.towers import swap_modules

if TYPE_CHECKING:
    from memswap._C import Batch
    from memswap.compat.mindspeed.swap_keys import CheckFn
    from memswap.engine.transfers import Pool
    from memswap.schedules.scheduled import ScheduledModules


class _LastIndices(MutableMapping[str, int]):
    """The place of the last context of each tag, in the process's handler; -1: there is none.

    Setting a tag to -1, or removing it, ends its tower: contexts that are made later are another.
    """

    def __getitem__(self, tag: str) -> int:
        return AsyncSwapHandler().last_index(tag)

    def __setitem__(self, tag: str, index: int) -> None:
        if index == self[tag]:
            return
        if index != -1:
            raise ValueError(
                f"TensorSwapContext.context_map[{tag!r}] = {index!r}: found {self[tag]} as its "
                "last layer; expected -1, which lets contexts that are made later begin anew"
            )
        del self[tag]

    def __delitem__(self, tag: str) -> None:
        AsyncSwapHandler().end_tower(tag)

    def __iter__(self) -> Iterator[str]:
        return iter(AsyncSwapHandler().tags())

    def __len__(self) -> int:
        return len(AsyncSwapHandler().tags())


class _Entered(threading.local):
    """The forwards of one context that a thread is in: what each saves for; None: not of interest.

    An inner one saves for the batch of the outer one, which moves it.
    """

    def __init__(self) -> None:
        self.stack: list[Batch | None] = []


class TensorSwapContext:
    """Swaps what one layer's forward saves: a context manager around it. Make it once and keep it.

    A copied or pickled context is the next layer of the tag.

    Args:
        module_tag: contexts with the same tag are the layers of one tower. The last layer that
            runs stays on the device; a tower has at least two.
        custom_check_fn: whether a tensor may be swapped; for this context alone.
        prefetch: whether backward brings the layer before back in advance.
        handler: the engine; None: the process's, which all contexts without a handler share.

    Attributes:
        layer_idx: the place among the contexts with this tag, in the order in which they are made.
        swap_handler: the engine.
    """

    #: The place of the last context of each tag in the process's handler; -1: there is none.
    context_map: ClassVar[MutableMapping[str, int]] = _LastIndices()

    def __init__(
        self,
        module_tag: str = "default",
        custom_check_fn: CheckFn | None = None,
        prefetch: bool = True,
        *,
        handler: AsyncSwapHandler | None = None,
    ) -> None:
        self.module_tag = module_tag
        self.prefetch = prefetch
        self.swap_handler: AsyncSwapHandler = AsyncSwapHandler() if handler is None else handler
        self.line = UsersLine.here()
        #: Whether backward begins with this layer, so that it stays; None: not known yet.
        self.turns: bool | None = None
        self._entered = _Entered()
        self._tower, self.layer_idx, self._group = self.swap_handler.join(self, module_tag)
        self.set_custom_check_fn(custom_check_fn)

    def __deepcopy__(self, memo: dict[int, object]) -> TensorSwapContext:
        return TensorSwapContext(
            self.module_tag, self._check, self.prefetch, handler=self.swap_handler
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorSwapContext, (self.module_tag, self._check, self.prefetch)

    def __repr__(self) -> str:
        return f"<TensorSwapContext {self.module_tag!r}, layer {self.layer_idx}>"

    def __enter__(self) -> TensorSwapContext:
        stack = self._entered.stack
        if not torch.is_grad_enabled() or in_backward():
            stack.append(None)  # an evaluation, or a layer that is computed again
            return self
        outermost = not any(stack)
        batch = self._group.__enter__()
        stack.append(batch)
        if outermost:
            self._tower.enter(self, batch)
        return self

    def __exit__(self, *raised: object) -> None:
        stack = self._entered.stack
        batch = stack.pop()
        if batch is None:
            return
        self._group.__exit__(*raised)
        if not any(stack):
            self._tower.leave(self, batch)

    def set_custom_check_fn(self, fn: CheckFn | None) -> None:
        """This context's check from now on; None: the handler's."""
        self._check = fn
        self.swap_handler.check_for(self._group, fn)

    @property
    def layer_nums(self) -> int:
        """How many layers the tag has so far."""
        return self._tower.last_index + 1


def swap_activation_modules(
    model: nn.Module | Mapping[str, nn.Module],
    plan: str | Sequence[str],
    *,
    pool: Pool | None = None,
) -> ScheduledModules:
    """Swap the input of each module that matches the plan, whatever its size.

    Args:
        model: the model, or several by name.
        plan: patterns on modules' names.
        pool: where inputs go. All three are those of :func:`memswap.swap_modules`.
    """
    policy = Policy(Action.SWAP, min_bytes=1)
    return swap_modules(model, plan, only_input=True, policy=policy, pool=pool)
