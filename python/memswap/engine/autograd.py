"""Questions about a tensor that autograd saves, and about the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

#: The number of the backward pass that this thread runs; NO_TASK: none.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
NO_TASK = -1

#: The innermost pair of saved-tensor hooks of this thread: `top_hooks(True)`, also in a backward.
top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

#: Classes whose tensors are no wrappers. A parameter that is one has its wrapper's class.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_parameter(tensor: torch.Tensor) -> bool:
    """A parameter, frozen or not, another leaf that requires grad, or a view of one of them.

    For tensors without a native view, which knows leaves by itself (`SavedView.of_leaf`).
    """
    base = tensor._base
    owner = tensor if base is None else base
    return (owner.requires_grad and owner.is_leaf) or is_frozen_parameter(tensor)


def as_kept(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a class of its own as it waits where it stays: frozen parameters are kept
    themselves, others share storage and version counter, not the graph.

    Leaves that require grad are not asked about: they are kept themselves (csrc/bind/hooks.cpp).
    """
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()


def is_frozen_parameter(tensor: torch.Tensor) -> bool:
    """A parameter or a view of one, known by its type: a frozen one is like any other leaf."""
    base = tensor._base
    owner = tensor if base is None else base
    # The type is asked first because isinstance on Parameter runs a metaclass.
    return type(owner) is not torch.Tensor and isinstance(owner, torch.nn.Parameter)


def in_backward() -> bool:
    """Whether this thread runs a backward pass now."""
    return graph_task() != NO_TASK


#: The number that this thread's next autograd node will get; nodes are numbered as they are made.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def computed_from(tensors: Iterable[torch.Tensor], first: int, end: int) -> bool:
    """Whether a backward pass from these tensors runs a node numbered `first` to `end` - 1.

    The nodes are this thread's. A node is younger than what it was computed from, so only nodes
    that were made since are looked at, and their parents.

    Args:
        tensors: that a backward pass begins with.
        first: number of the first node.
        end: number behind the last one.
    """
    waiting: list[Any] = [one.grad_fn for one in tensors if one.grad_fn is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if first <= number < end:
            return True
        if number >= end and node not in seen:
            seen.add(node)
            waiting.extend(parent for parent, _ in node.next_functions if parent is not None)
    return False


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there; any other tensor as it is.

    The AsyncCollectiveTensor of torch.distributed (a DTensor may have one inside) waits when an
    operator uses it. Autograd saves it before the operator runs, and its memory would be sent while
    the collective still fills it. The operator that saves it waits next. What has no such tensor
    around it: [Note: Collectives under way].
    """
    wait: Callable[[], torch.Tensor] | None = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of those that are there."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return int(tensor.numel()) * int(tensor.element_size())


def differentiable(tree: object) -> list[torch.Tensor]:
    """Those of them whose gradients a backward will compute."""
    grad = torch.is_grad_enabled()
    return [one for one in tensors_in(tree) if one.requires_grad] if grad else []


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have the bytes: a wrapper subclass's parts, or the tensor itself."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):
            yield from plain_parts(part)
