"""An optimizer's state as a whole: its state_dict, one that is loaded, a pickle, a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memswap.optimizers.state import copy_on_host, with_tensors
from memswap.optimizers.step import parameters_of

if TYPE_CHECKING:
    from weakref import ref

    import torch
    from torch.optim import Optimizer

    from memswap.optimizers.state import StateMover


def on_host(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same with each tensor of the state in host memory, away or not.

    Args:
        state_dict: an optimizer's own.
    """
    return {**state_dict, "state": with_tensors(state_dict["state"], copy_on_host)}


def loaded(optimizer: Optimizer, state_dict: dict[str, Any], mover: StateMover) -> dict[str, Any]:
    """What `load_state_dict` is to load: each tensor went through the device alone, and is away.

    Torch finds all of them where they belong.

    Args:
        optimizer: which loads.
        state_dict: what the user gave it. One that does not fit is returned as it is: torch says
            what is wrong.
        mover: by which state leaves.
    """
    saved = [one for group in state_dict["param_groups"] for one in group["params"]]
    own = list(parameters_of(optimizer))
    if len(saved) != len(own):
        return state_dict
    parameters = dict(zip(saved, own, strict=True))
    state = {}
    mover.begin_step()
    for key, value in state_dict["state"].items():
        parameter = parameters.get(key)
        state[key] = value if parameter is None else _sent(mover, parameter, key, value)
    return {**state_dict, "state": state}


def _sent(mover: StateMover, parameter: torch.Tensor, key: Any, value: Any) -> Any:
    number = 0

    def send(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        if tensor.numel() <= 1 or not tensor.is_floating_point():
            return tensor  # counters; what torch does not cast, it moves
        dtype = parameter.dtype if parameter.is_floating_point() else tensor.dtype
        moved = tensor.to(dtype=dtype, device=parameter.device)
        moved = moved.clone() if moved is tensor else moved
        mover.send(moved, f"load.{key}.{number}", frozenset())
        while mover.wait_oldest():
            pass
        return moved

    return with_tensors(value, send)


def plain_getstate(weak: ref[Optimizer]) -> Callable[[], dict[str, Any]]:
    """An optimizer's `__getstate__`: as its class's, with each state on its own device.

    Args:
        weak: the optimizer.
    """

    def state() -> dict[str, Any]:
        optimizer = weak()
        assert optimizer is not None  # its own attribute is called
        found: dict[str, Any] = type(optimizer).__getstate__(optimizer)
        if "state" in found:
            kept = found["state"]
            copied = type(kept)(kept.default_factory) if hasattr(kept, "default_factory") else {}
            for key, value in kept.items():
                copied[key] = with_tensors(value, _on_its_device)
            found = {**found, "state": copied}
        return found

    return state


def _on_its_device(tensor: torch.Tensor) -> Any:
    """A copy in host memory which, once it is unpickled or copied, is a tensor of its device."""
    copy = copy_on_host(tensor)
    if copy is tensor or copy.device == tensor.device:
        return copy
    return _Elsewhere(copy, tensor.device)


@dataclass(frozen=True)
class _Elsewhere:
    tensor: torch.Tensor
    device: torch.device

    def __reduce__(self) -> tuple[Any, ...]:
        return _to_device, (self.tensor, self.device)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device)
