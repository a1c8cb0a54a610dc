"""ArrivingTensor: a tensor that is still on its way, and waits where it is first used.

[Note: Arriving tensors] What :meth:`Pending.arriving` returns has the shape of what will arrive and
no data. Rearranging it (``flatten``, ``transpose``, ...) gives another arriving tensor; every other
function first waits, and is given the plain tensor, so nobody can read what is in flight. Two ways
lead to the data. Functions of torch arrive at ``__torch_function__``, above autograd: there a node
Arrive is made, at the first use, so that backward comes to it before it comes to whatever was
computed while the exchange was on its way, and the gradient travels beside all that. Custom
autograd Functions and C++ do not ask; autograd takes the arriving tensor for an ordinary one and
its data is handed out below autograd. Their gradients come to Handoff, the node that made the
arriving tensor. Arrive is a consumer of it like any other; it launches its gradient itself, and
hands on zeros that take no memory and that Handoff recognizes: usually they are all that it gets.

    Start -> token -> Handoff -> arriving tensor -> Arrive -> plain tensor -> most consumers
                                                 -> custom Functions, C++

[Note: The input's gradient first] The backward of F.linear gives the gradients of input and weight
at once, so an exchange of the first waits for the second to be computed. Here they are two nodes.
WeightSide is made before the input, InputSide after it. Autograd runs later nodes first: backward
comes to InputSide, then to what made the input, which launches the exchange, and then to
WeightSide, which computes beside it. The formulas are those of F.linear's own backward, and so are
the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from memswap.parallel.in_flight import Box

#: Called with the name of the function that made an arriving tensor wait.
FirstUse = Callable[[str], None]

_REARRANGEMENTS = frozenset(
    [getattr(torch.Tensor, name) for name in ("contiguous", "unflatten", "view")]
    + [
        getattr(where, name)
        for name in (
            *("flatten", "movedim", "permute", "reshape"),
            *("squeeze", "transpose", "unflatten", "unsqueeze"),
        )
        for where in (torch.Tensor, torch)
    ]
)
_QUESTIONS = frozenset(
    [
        getattr(torch.Tensor, name)
        for name in (
            *("__len__", "dim", "element_size", "is_complex", "is_contiguous"),
            *("is_floating_point", "ndimension", "nelement", "numel", "size", "stride"),
        )
    ]
    + [
        getattr(torch.Tensor, name).__get__
        for name in (
            *("device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta"),
            *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
        )
    ]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)


class Arrival:
    """What an arriving tensor and its rearrangements have in common.

    Args:
        box: the exchange.
        first_use: is called with the name of the function that makes it wait; None: nobody is told.
        orphans: gets a function that waits, if all of these tensors die unused; None: nobody waits.
    """

    def __init__(
        self, box: Box, first_use: FirstUse | None, orphans: list[Callable[[], object]] | None
    ) -> None:
        self.box = box
        self.expected = False
        """Whether the module that is meant to use it first has been called with it."""
        self._first_use = first_use
        self._orphans = orphans
        self._data: torch.Tensor | None = None
        self._members: list[ref[ArrivingTensor]] = []

    def data(self) -> torch.Tensor:
        """What arrived. No autograd."""
        if self._data is None:
            self._data = self.box.arrive()
        return self._data

    def used_by(self, name: str) -> None:
        """Report that the function ``name`` waits, unless the intended module was reached."""
        if self._data is None and self._first_use is not None and not self.expected:
            self._first_use(name)

    def add(self, tensor: ArrivingTensor) -> None:
        """Note a tensor whose data is that of this exchange."""
        self._members.append(ref(tensor))

    def arrive(self) -> None:
        """Wait, and make the plain tensors of all that are alive, before anybody edits one."""
        members, self._members = self._members, []
        for one in members:
            tensor = one()
            if tensor is not None:
                tensor.plain()

    def __del__(self) -> None:
        if self._data is None and self.box.in_flight and self._orphans is not None:
            self._orphans.append(self.box.finish)


class ArrivingTensor(torch.Tensor):  # type: ignore[misc]
    """See [Note: Arriving tensors]."""

    _arrival: Arrival
    _parent: ArrivingTensor | None
    _rearrange: Callable[[torch.Tensor], torch.Tensor]
    _like: torch.Tensor
    _connected: bool
    _plain: torch.Tensor | None

    @staticmethod
    def make(
        arrival: Arrival,
        like: torch.Tensor,
        device: torch.device,
        parent: ArrivingTensor | None = None,
        rearrange: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        *,
        connected: bool = False,
    ) -> ArrivingTensor:
        """A tensor without data.

        Args:
            arrival: where its data comes from.
            like: a meta tensor of its shape, strides and dtype.
            device: where the data will be.
            parent: the arriving tensor that it is a rearrangement of; None: it is none.
            rearrange: makes its data of that of ``parent``.
            connected: whether a node of this file made it, so that its gradients come there.
        """
        tensor: ArrivingTensor = torch.Tensor._make_wrapper_subclass(
            ArrivingTensor, like.shape, like.stride(), dtype=like.dtype, device=device
        )
        tensor._arrival, tensor._like, tensor._parent = arrival, like, parent
        tensor._rearrange, tensor._connected = rearrange, connected
        tensor._plain = None
        return tensor

    # Dynamo must not trace what decides whether to wait: it would lose the node that Arrive is.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        name = getattr(func, "__name__", str(func))
        # Also once it has arrived: a checkpoint's recompute has to do what its forward did.
        if isinstance(first, ArrivingTensor):
            if func in _REARRANGEMENTS:
                return first._rearranged_by(func, args[1:], kwargs)
            if func is F.linear:
                weight, bias = _linear_arguments(*args[1:], **kwargs)
                if can_split(first, weight, bias):
                    return split_linear(lambda: first.arrived(name), weight, bias)
        args, kwargs = tree_map_only(
            ArrivingTensor, lambda tensor: tensor.arrived(name), (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} would write to a tensor that is still arriving, from code that torch "
                "functions do not see; use a clone of it"
            )
        args, kwargs = tree_map_only(
            ArrivingTensor,
            lambda tensor: tensor._below_autograd(func.__name__),
            (args, kwargs or {}),
        )
        return func(*args, **kwargs)

    def arrived(self, name: str = "wait") -> torch.Tensor:
        """Wait, then the plain tensor, differentiable."""
        self._arrival.used_by(name)
        self._arrival.arrive()
        return self.plain()

    def plain(self) -> torch.Tensor:
        """The plain tensor; all callers get the same one, in whatever mode they are."""
        if self._plain is None or (self.requires_grad and not self._plain.requires_grad):
            with torch.inference_mode(False), torch.set_grad_enabled(self.requires_grad):
                self._plain = self._make_plain()
        return self._plain

    def _make_plain(self) -> torch.Tensor:
        plain: torch.Tensor
        if self.requires_grad and not self._connected:
            data = self._raw() if self._plain is None else self._plain
            plain = _Arrive.apply(self, data, None)
        elif self._parent is not None:
            plain = self._rearrange(self._parent.plain())
        elif self.requires_grad:
            plain = _Arrive.apply(self, self._arrival.data(), self._arrival.box)
        else:
            plain = self._arrival.data()
        return plain

    def expect(self) -> None:
        """The intended module has been called with this tensor: its use is no surprise."""
        self._arrival.expected = True

    def _raw(self) -> torch.Tensor:
        """The data, without autograd."""
        if self._parent is None:
            return self._arrival.data()
        with torch.no_grad():
            return self._rearrange(self._parent._raw())

    def _below_autograd(self, name: str) -> torch.Tensor:
        self._arrival.used_by(name)
        return self._raw()

    def _rearranged_by(self, func: Any, args: Any, kwargs: dict[str, Any]) -> ArrivingTensor:
        def rearrange(tensor: torch.Tensor) -> torch.Tensor:
            rearranged: torch.Tensor = func(tensor, *args, **kwargs)
            return rearranged

        like = rearrange(self._like)
        connected = self.requires_grad and torch.is_grad_enabled()
        tensor: ArrivingTensor = _Rearrange.apply(self, like, rearrange, connected)
        if self._plain is None:
            self._arrival.add(tensor)
        else:
            tensor.plain()
        return tensor


def _linear_arguments(weight: Any, bias: Any = None) -> tuple[Any, Any]:
    return weight, bias


def arriving(token: torch.Tensor, shape: torch.Size, arrival: Arrival) -> ArrivingTensor:
    """The arriving tensor of an exchange.

    Args:
        token: what Start returned; it has the dtype and the device of what will arrive.
        shape: of what will arrive.
        arrival: of the same exchange, and of no tensor yet.
    """
    like = torch.empty(shape, dtype=token.dtype, device="meta")
    tensor: ArrivingTensor = _Handoff.apply(token, like, arrival, torch.is_grad_enabled())
    arrival.add(tensor)
    return tensor


class _Handoff(torch.autograd.Function):  # type: ignore[misc]
    """Makes the arriving tensor; in backward it launches the gradients that came to that."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, like: torch.Tensor, arrival: Arrival, grad: bool
    ) -> torch.Tensor:
        ctx.box = arrival.box
        connected = grad and token.requires_grad
        return ArrivingTensor.make(arrival, like, token.device, connected=connected)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.box.launch_rest(gradient)
        return gradient.new_empty(0), None, None, None


class _Arrive(torch.autograd.Function):  # type: ignore[misc]
    """Makes the plain tensor; in backward it launches the gradient of its consumers."""

    @staticmethod
    def forward(
        ctx: Any, tensor: ArrivingTensor, data: torch.Tensor, box: Box | None
    ) -> torch.Tensor:
        # Without a box, somebody else's node made the tensor: a reentrant checkpoint's.
        ctx.box = box
        return data.detach()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.box is not None:
            gradient = ctx.box.launch_gradient(gradient)
        return gradient, None, None


class _Rearrange(torch.autograd.Function):  # type: ignore[misc]
    """Rearranges what has not arrived; for the gradients of consumers that torch does not see."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: ArrivingTensor,
        like: torch.Tensor,
        rearrange: Callable[[torch.Tensor], torch.Tensor],
        connected: bool,
    ) -> torch.Tensor:
        ctx.rearrange, ctx.like = rearrange, tensor._like
        return ArrivingTensor.make(
            tensor._arrival, like, tensor.device, tensor, rearrange, connected=connected
        )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            whole = torch.empty_like(ctx.like, device=gradient.device).requires_grad_()
            (back,) = torch.autograd.grad(ctx.rearrange(whole), whole, gradient)
        return back, None, None, None


# --- linear layers that use what arrives ----------------------------------------------------------


def can_split(input: torch.Tensor, weight: Any, bias: Any) -> bool:
    """Whether a linear layer has two gradients to compute, of plain tensors, without casts.

    Args:
        input: ``[..., in features]``.
        weight: ``[out features, in features]``, or whatever ``F.linear`` was called with.
        bias: ``[out features]``, None, or whatever ``F.linear`` was called with.
    """
    return bool(
        torch.is_grad_enabled()
        and input.requires_grad
        and _is_plain(weight)
        and weight.ndim == 2
        and weight.requires_grad
        and (bias is None or (_is_plain(bias) and bias.ndim == 1))
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
    )


def split_linear(
    input: Callable[[], torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``F.linear(input(), weight, bias)``: see [Note: The input's gradient first].

    Args:
        input: returns ``[..., in features]``; called once WeightSide has its place in the graph.
        weight: ``[out features, in features]``.
        bias: ``[out features]``, or None.

    Returns:
        ``[..., out features]``.
    """
    held = _Held()
    token = _WeightSide.apply(weight, bias, held)
    output: torch.Tensor = _InputSide.apply(input(), token, (weight, bias), held)
    return output


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


class _Held:
    """What InputSide hands to WeightSide in backward: the input ``[rows, in features]`` and the
    output's gradient ``[rows, out features]``."""

    matrices: tuple[torch.Tensor, torch.Tensor] | None = None


class _WeightSide(torch.autograd.Function):  # type: ignore[misc]
    """In backward, the gradients of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, held: _Held
    ) -> torch.Tensor:
        ctx.held = held
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        matrices, ctx.held.matrices = ctx.held.matrices, None
        assert matrices is not None
        input, gradient = matrices
        weights, biases, _ = ctx.needs_input_grad
        return (
            gradient.t().mm(input) if weights else None,
            gradient.sum(0) if biases else None,
            None,
        )


class _InputSide(torch.autograd.Function):  # type: ignore[misc]
    """The linear layer; in backward, the gradient of its input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        token: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor | None],
        held: _Held,
    ) -> torch.Tensor:
        # In a tuple: no edges, and the kernel is chosen as for a weight that requires grad.
        weight, bias = weights
        ctx.save_for_backward(input, weight)
        ctx.held = held
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.size(-1))
        ctx.held.matrices = input.reshape(-1, input.size(-1)), rows
        return rows.mm(weight).view(input.shape), gradient.new_empty(0), None, None
