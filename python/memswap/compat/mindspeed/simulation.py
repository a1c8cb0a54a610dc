"""MindSpeed's simulations: what functions and the codec take, by data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memswap.compat.mindspeed.async_functions import checked_name
from memswap.planning.cost_model import A2, A3, GIB, TERA, Hardware, matmul_shape


class SimulationHyperParams:
    """The constants of both machines. Rates are in GiB/s, and TFLOP/s."""

    encode_bandwidth = A2.encode_bytes_per_s / GIB
    decode_bandwidth = A2.decode_bytes_per_s / GIB
    cube_tflops = A2.matmul_flops[torch.bfloat16] / TERA


class SimulationBase:
    """What functions take on some hardware.

    Args:
        hardware: a table of :mod:`memswap.planning.cost_model`; None: the class's own.
    """

    hardware: Hardware = A2

    def __init__(self, hardware: Hardware | None = None) -> None:
        if hardware is not None:
            self.hardware = hardware

    def time_cost(self, name: str, *args: Any, **kwargs: Any) -> float:
        """Seconds of a call, whether arguments are given by position or by keyword.

        Args:
            name: ``"matmul"``, ``"allgather"`` or ``"all2all"``.
            *args: of ``matmul(input, other)``, ``_all_gather_base(output, input, group)`` or
                ``all_to_all_single(output, input, ..., group)``. Without a group it is the default
                one.
            **kwargs: the same by name.

        Raises:
            ValueError: an unknown name, fewer than two tensors, shapes that cannot be multiplied,
                or a collective whose rates are not known.
        """
        checked_name(name)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if len(tensors) < 2:
            raise ValueError(
                f"estimate_time({name!r}): found {len(tensors)} tensor(s) among the arguments, "
                "expected the function's two"
            )
        if name == "matmul":
            left, right = (kwargs.get("input", tensors[0]), kwargs.get("other", tensors[-1]))
            return self.hardware.matmul_s(left.shape, right.shape, left.dtype)
        ranks = group_size(*args, *kwargs.values())
        if name == "allgather":
            return self.hardware.all_gather_s(max(tensor.nbytes for tensor in tensors), ranks)
        return self.hardware.all_to_all_s(kwargs.get("input", tensors[-1]).nbytes, ranks)

    def encode_max_numel(self, time: float) -> int:
        """Elements of 2 bytes that can be encoded in so many seconds."""
        return int(self.hardware.encode_bytes_per_s * time / 2)

    def decode_max_numel(self, time: float) -> int:
        """Elements of 2 bytes that can be decoded in so many seconds."""
        return int(self.hardware.decode_bytes_per_s * time / 2)


class SimulationA2(SimulationBase):
    """An Atlas A2."""

    hardware = A2


class SimulationA3(SimulationBase):
    """An Atlas A3."""

    hardware = A3


def infer_matmul_shape(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    """Shape of ``torch.matmul`` of two shapes, batches broadcast.

    Raises:
        ValueError: the shapes cannot be multiplied.
    """
    return matmul_shape(left, right)


def group_size(*arguments: object) -> int:
    """Ranks of the process group among some arguments; without one, of the default group."""
    if not torch.distributed.is_available():
        return 1
    for argument in arguments:
        if isinstance(argument, torch.distributed.ProcessGroup):
            return int(argument.size())
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
