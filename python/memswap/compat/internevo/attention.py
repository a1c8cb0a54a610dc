"""InternEvo's DistributedAttention: its call pattern on memswap.parallel.ContextParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, TypeAlias
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memswap.compat.internevo.raw import group_of
from memswap.parallel import ContextParallel
from memswap.parallel.comm import Comm, ProcessGroupComm
from memswap.parallel.context_style import ROLES, Packing

#: A group, or what gives one when attention is built; None: one rank has the whole sequence.
Group: TypeAlias = dist.ProcessGroup | Callable[[], dist.ProcessGroup | None] | None


class DistributedAttention(nn.Module):  # type: ignore[misc]
    """Attention whose sequence is cut over a group: ``(qkv)``, ``(q, kv)`` or ``(q, k, v)``.

    Tensors are ``[batch, tokens, (3 or 2,) heads, size]``, by place or by name; everything else is
    passed on, ``cu_seqlens`` of the whole sequence too. Any number of key/value heads that divides
    that of queries: the local attention gets those that its queries need.

    Args:
        local_attention: computes attention of the whole sequence with a part of the heads.
        sequence_process_group: the ranks.
        device_type: of the tensors; default: the accelerator's, or "cpu".
        sequence_length: of the whole sequence, where the ranks do not divide it.
        comm: makes the Comm of the group.
    """

    def __init__(
        self,
        local_attention: nn.Module | Callable[..., torch.Tensor],
        sequence_process_group: dist.ProcessGroup,
        *,
        device_type: str | None = None,
        sequence_length: int | None = None,
        comm: Callable[[dist.ProcessGroup], Comm] = ProcessGroupComm,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        if device_type is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device_type = "cpu" if accelerator is None else accelerator.type
        self._device_type = device_type
        self._sequence_length = sequence_length
        self._open_comm = comm
        self.spg = sequence_process_group
        self.sp_size: int = sequence_process_group.size()
        self._by_packing: dict[Packing, _Local] = {}

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See :class:`DistributedAttention`.

        Raises:
            TypeError: neither of the three packings.
        """
        packing, named = self._packing(args, kwargs)
        if packing not in self._by_packing:
            self._by_packing[packing] = self._local(packing, named)
        output: torch.Tensor = self._by_packing[packing](*args, **kwargs)
        return output

    def _packing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Packing, bool]:
        """Which, and whether the tensors come by name."""
        for packing, roles in ROLES.items():
            if all(kwargs.get(role) is not None for role in roles):
                return packing, True
        tensors = 0
        while tensors < len(args) and isinstance(args[tensors], torch.Tensor):
            tensors += 1
        if tensors and args[0].ndim == 5:
            return "qkv", False
        if tensors >= 3 and args[1].ndim == 4:
            return "separate", False
        if tensors >= 2 and args[1].ndim == 5:
            return "kv", False
        shapes = [list(one.shape) for one in args[:tensors]]
        raise TypeError(
            f"DistributedAttention: found tensors of shapes {shapes} and arguments "
            f"{sorted(kwargs)}; expected (qkv), (q, kv) or (q, k, v) of [batch, tokens, (3 or 2,) "
            "heads, size]"
        )

    def _local(self, packing: Packing, named: bool) -> _Local:
        local = _Local(self)
        style = ContextParallel(
            packing=packing,
            qkv=ROLES[packing] if named else None,
            sequence_length=self._sequence_length,
            comm=self._open_comm,
        )
        style.apply(local, DeviceMesh.from_group(self.spg, self._device_type))
        return local


class _Local(nn.Module):  # type: ignore[misc]
    """The local attention as one of the packings sees it; it adds no name to the state."""

    def __init__(self, owner: DistributedAttention) -> None:
        super().__init__()
        self._owner = ref(owner)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        owner = self._owner()
        assert owner is not None
        output: torch.Tensor = owner.local_attn(*args, **kwargs)
        return output


def auto_wrap_distributed_attention(
    attention: Callable[..., nn.Module], *, group: Group | Literal["ask"] = "ask"
) -> Callable[..., nn.Module]:
    """A constructor of ``attention`` that distributes it where there is a group to do so.

    Args:
        attention: the class.
        group: the ranks that share a sequence. A function is asked when attention is built. If it
            is left out, InternEvo's own process-wide context is asked then.

    Raises:
        TypeError: ``group`` was left out and InternEvo is not loaded; when attention is built.
    """

    def construct(*args: Any, **kwargs: Any) -> nn.Module:
        return _distributed(attention(*args, **kwargs), group)

    return construct


def auto_wrap_func_distributed_attention(
    attention: Callable[..., torch.Tensor], *, group: Group | Literal["ask"] = "ask"
) -> Callable[..., torch.Tensor]:
    """The same for a function, which is distributed at its first call."""
    built: list[Callable[..., torch.Tensor]] = []

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not built:
            built.append(_distributed(attention, group))
        return built[0](*args, **kwargs)

    return call


def _distributed(attention: Any, group: Group | Literal["ask"]) -> Any:
    if group == "ask":
        group = _group_of_context()
    ranks = group() if callable(group) and not isinstance(group, dist.ProcessGroup) else group
    if ranks is None or ranks.size() == 1:
        return attention
    return DistributedAttention(attention, ranks)


def _group_of_context() -> dist.ProcessGroup | None:
    """What InternEvo's context says; None: it does not cut sequences for attention."""
    module = sys.modules.get("internlm.core.context")
    if module is None:
        raise TypeError(
            "auto_wrap_distributed_attention(): found neither group= nor InternEvo's context, "
            "expected to know which ranks share a sequence; pass group=process_group"
        )
    context, modes = module.global_context, module.ParallelMode
    if context.config.parallel["tensor"].get("mode", "mtp") != "isp":
        return None
    two_dimensional = context.config.parallel.get("sequence_2D", {}).get("enable", False)
    return group_of(modes.HEAD if two_dimensional else modes.TENSOR)
