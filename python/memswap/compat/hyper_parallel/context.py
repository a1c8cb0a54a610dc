"""HyperParallel's context parallelism: its arguments on memswap.parallel.ContextParallel.

Where keys are gathered and attention is causal, a mask depends on which queries a rank has;
HyperParallel hands the module DTensors, and a process-wide override says where they are. Here
attention gets plain tensors, and what masks by a query's place is done for its place in the
sequence, or refused: see :class:`memswap.parallel.ContextParallel`, ``verify``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from memswap import parallel
from memswap.parallel.comm import Comm, ProcessGroupComm
from memswap.parallel.layouts import LAYOUTS

_LAYOUTS = {
    (LAYOUTS[name].seq_dim, LAYOUTS[name].head_dim): name
    for name in ("bshd", "bnsd", "sbhd", "thd")
}


class ContextParallel(ParallelStyle):  # type: ignore[misc]
    """Attention over a cut sequence, with HyperParallel's arguments.

    Args:
        seq_dim: dimension of the sequence.
        head_dim: dimension of the heads. Both are (1, 2), (2, 1), (0, 2), or (0, 1) for packed
            sequences.
        ulysses_degree: ranks that share heads, of all ranks of the mesh, whatever its dimensions;
            None: all; 1: none, keys are gathered; another divisor: both, over neighbouring ranks. A
            2-D mesh for that is (co, ds), and its second dimension has ``ulysses_degree`` ranks.
        qkv_indices: places of query, key and value among the arguments of ``forward``.
        qkv_kwarg_names: their names instead.
        load_balance: equal work in causal attention where keys are gathered. Each rank still holds
            a contiguous part; halves of queries and outputs are exchanged around attention.
        use_local_output: False returns a DTensor.
        ranges: name of a keyword argument of ``forward`` that gets the ``(start, stop)`` ranges of
            its queries in the sequence; see :class:`memswap.parallel.ContextParallel`.
        mask: name of a keyword argument that gets the causal mask, bool ``[queries, keys]``.
        verify: whether it is tried, where keys are gathered, that a part of the queries gets its
            part of the result.
        comm: makes the Comm of a process group.

    Raises:
        ValueError: no such layout; a degree below 1; load_balance without ``ulysses_degree=1``.
    """

    def __init__(
        self,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int | None = None,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        load_balance: bool = False,
        use_local_output: bool = True,
        *,
        ranges: str | None = None,
        mask: str | None = None,
        verify: bool = True,
        comm: Callable[[dist.ProcessGroup], Comm] = ProcessGroupComm,
    ) -> None:
        super().__init__()
        if (seq_dim, head_dim) not in _LAYOUTS:
            raise ValueError(
                f"seq_dim={seq_dim}, head_dim={head_dim}: expected one of {sorted(_LAYOUTS)}"
            )
        if ulysses_degree is not None and ulysses_degree < 1:
            raise ValueError(
                f"ulysses_degree={ulysses_degree}: expected None (all ranks) or a number from 1 on"
            )
        if load_balance and ulysses_degree != 1:
            raise ValueError(
                f"load_balance=True with ulysses_degree={ulysses_degree}: expected "
                "ulysses_degree=1; memswap.parallel.ContextParallel(balance='headtail') balances "
                "in every mode"
            )
        self.ulysses_degree = ulysses_degree
        self.style = parallel.ContextParallel(
            ulysses=ulysses_degree,
            layout=_LAYOUTS[seq_dim, head_dim],
            balance="queries" if load_balance else "contiguous",
            qkv=tuple(qkv_kwarg_names) or tuple(qkv_indices),
            ranges=ranges,
            mask=mask,
            verify=verify,
            use_local_output=use_local_output,
            comm=comm,
        )

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply to an attention module, which is returned. ``style`` has the handles.

        Raises:
            TypeError: the mesh is none.
            ValueError: ``ulysses_degree`` does not divide it, or is not the size of its second
                dimension.
        """
        self._apply_style(module, device_mesh)
        return module

    def _apply_style(
        self, module: nn.Module, mesh: DeviceMesh, **projections: nn.Module | None
    ) -> None:
        degree = self.ulysses_degree
        if isinstance(mesh, DeviceMesh):
            size = mesh.size()
            if degree is not None and size % degree:
                raise ValueError(
                    f"ulysses_degree={degree} on a mesh of {size} ranks: expected a divisor"
                )
            if degree not in (None, 1, size) and mesh.ndim > 1 and mesh.size(-1) != degree:
                raise ValueError(
                    f"ulysses_degree={degree} on a mesh of shape {tuple(mesh.shape)}: expected a "
                    f"1-D mesh, or (co, ds) of ({size // degree}, {degree})"
                )
            self.style.ulysses = size if degree is None else degree
        self.style.apply(module, mesh, **projections)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)


class AsyncContextParallel(ContextParallel):
    """The same, with exchanges launched by the projections."""

    def apply(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        q_proj: nn.Module | None = None,
        k_proj: nn.Module | None = None,
        v_proj: nn.Module | None = None,
        o_proj: nn.Module | None = None,
    ) -> nn.Module:
        """Apply to an attention module, which is returned.

        A projection counts only where attention gets its very output, with the dimensions of the
        layout; otherwise there is one warning and the ordinary path.

        Args:
            module: computes attention.
            device_mesh: the ranks.
            q_proj: a module whose output is the query as it is.
            k_proj: one whose output is the key.
            v_proj: one whose output is the value.
            o_proj: where attention's output is waited for, since it uses that first.
        """
        self._apply_style(module, device_mesh, q=q_proj, k=k_proj, v=v_proj, o=o_proj)
        return module
