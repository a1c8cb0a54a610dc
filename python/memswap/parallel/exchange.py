"""exchange: a differentiable redistribution that is launched now and waited later, both ways.

[Note: The token edge] An exchange is two autograd nodes. Start launches the collective and returns
an empty tensor, the token; Finish takes the token, waits, and returns what arrived. In backward
Finish launches the adjoint and Start waits for it, so whatever autograd runs between the two nodes
runs while the gradient travels; autograd runs the later nodes first, so the gradients of q, k and v
are all launched before the first is waited. What is in flight lies in a box that both nodes own and
never on the edge: a gradient has to look like its forward tensor there, and hooks or anomaly mode
would read it before it has arrived. Start's gradient is an ordinary gradient of the input: autograd
adds it to those of the input's other consumers.

Neither node saves a tensor, so there is nothing for saved-tensor hooks to move while a collective
reads or writes it; what is sent is always a copy. Nothing lives outside the graph: any number of
exchanges are in flight at once, and a checkpointed region launches and waits its own when it is
recomputed. Wait on the stream on which the exchange was launched, and use the result from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from memswap.parallel.arriving import Arrival, FirstUse, arriving
from memswap.parallel.in_flight import Box, Observer, Redistribution


class _Start(torch.autograd.Function):  # type: ignore[misc]
    """Launches; in backward it waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        ctx.box = box
        box.launch(tensor)
        return tensor.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        return ctx.box.finish_gradients(), None


class _Finish(torch.autograd.Function):  # type: ignore[misc]
    """Waits; in backward it launches the gradient."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, box: Box) -> torch.Tensor:
        ctx.box = box
        return box.arrive()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.box.launch_gradient(gradient)
        return gradient.new_empty(0), None


class Pending:
    """An exchange on its way; :func:`exchange` makes it."""

    def __init__(self, token: torch.Tensor, box: Box) -> None:
        self._token: torch.Tensor | None = token
        self._box = box
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """What arrived: contiguous, in the layout of the input. A second call gives it again."""
        if self._result is None:
            assert self._token is not None
            self._result = _Finish.apply(self._token, self._box)
            self._token = None
        assert self._result is not None
        return self._result

    def arriving(
        self,
        *,
        first_use: FirstUse | None = None,
        orphans: list[Callable[[], object]] | None = None,
    ) -> torch.Tensor:
        """A tensor that waits where it is first used: see [Note: Arriving tensors].

        ``flatten``, ``transpose`` and the like do not use it. A linear layer that is the first to
        use it computes its input's gradient before its weight's, which goes on beside the exchange
        of the former. In inference mode, and under ``torch.compile``, the plain tensor.

        Args:
            first_use: called with a function's name where that function makes it wait, unless
                :meth:`ArrivingTensor.expect` was called before.
            orphans: gets a function for what dies unused; it has to be called, and waits.
        """
        shape = self._box.shape
        if (
            self._token is None
            or shape is None
            or torch.is_inference_mode_enabled()
            or torch.compiler.is_compiling()
        ):
            return self.wait()
        self._result = arriving(self._token, shape, Arrival(self._box, first_use, orphans))
        self._token = None
        return self._result

    def discard(self) -> None:
        """Wait and forget: for an exchange that turned out not to be wanted."""
        if self._token is not None:
            self._token = None
            self._box.finish()


def exchange(
    tensor: torch.Tensor,
    spec: Redistribution,
    *,
    label: str = "exchange",
    observe: Observer | None = None,
) -> Pending:
    """Launch a redistribution of ``tensor`` among the ranks; ``wait()`` gives the result.

    Differentiable once, in the same manner: see [Note: The token edge]. Every rank of the group
    launches the same exchanges in the same order, and waits for (or discards) each of them.

    Args:
        tensor: this rank's part. It may be edited or freed as soon as this call returns.
        spec: where the parts go: :class:`SequenceToHeads`, :class:`HeadsToSequence`,
            :class:`GatherSequence`, :class:`ReduceScatterSequence`, :class:`MoveSequence`.
        label: names the collective in errors, logs and profiles; the adjoint's is
            ``"LABEL gradient"``.
        observe: called at each launch, also of the adjoint, with the map, its label and what this
            rank sends.

    Raises:
        ValueError: the tensor does not have the shape that the spec says this rank holds.
    """
    box = Box(spec, label, observe)
    return Pending(_Start.apply(tensor, box), box)
