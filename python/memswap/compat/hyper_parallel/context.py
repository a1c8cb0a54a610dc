"""HyperParallel's context parallelism: its arguments on memswap.parallel.ContextParallel.

Where keys are gathered and attention is causal, the module has to know which queries it has;
HyperParallel tells attention through a process-wide override. Here a keyword argument does:
``ranges`` or ``mask``, as in :class:`memswap.parallel.ContextParallel`.
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
        seq_dim, head_dim: (1, 2), (2, 1), (0, 2), or (0, 1) for packed sequences.
        ulysses_degree: ranks that share heads; None: all; 1: none, keys are gathered; another
            divisor of a 1-D mesh's size: both, over neighbouring ranks, of a mesh of all ranks.
        qkv_indices: places of query, key and value among the arguments of ``forward``.
        qkv_kwarg_names: their names instead.
        load_balance: equal work in causal attention where keys are gathered. Each rank still holds
            a contiguous part; halves of queries and outputs are exchanged around attention. Needs
            ``ranges`` or ``mask``.
        use_local_output: False returns a DTensor.
        ranges, mask, comm: see :class:`memswap.parallel.ContextParallel`.

    Raises:
        ValueError: no such layout; a degree below 1; load_balance without ``ulysses_degree=1``,
            ``ranges`` or ``mask``.
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
        if load_balance and ranges is None and mask is None:
            raise ValueError(
                "load_balance=True: attention has to know which queries it gets; name the argument "
                "of forward that says so: ranges=... or mask=..."
            )
        self.ulysses_degree = ulysses_degree
        self.style = parallel.ContextParallel(
            ulysses=ulysses_degree,
            layout=_LAYOUTS[seq_dim, head_dim],
            balance="queries" if load_balance else "contiguous",
            qkv=tuple(qkv_kwarg_names) or tuple(qkv_indices),
            ranges=ranges,
            mask=mask,
            use_local_output=use_local_output,
            comm=comm,
        )
        self._mesh: tuple[DeviceMesh, DeviceMesh] | None = None

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Apply to an attention module, which is returned. ``style`` has the handles."""
        self.style.apply(module, self._two_dimensional(device_mesh))
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)

    def _two_dimensional(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh, or its (gather, ulysses) form. Made once: all ranks make its groups."""
        degree = self.ulysses_degree
        if mesh.ndim != 1 or degree in (None, 1, mesh.size()):
            return mesh
        if mesh.size() % degree or mesh.size() != dist.get_world_size():
            raise ValueError(
                f"ulysses_degree={degree} on a 1-D mesh of {mesh.size()} of "
                f"{dist.get_world_size()} ranks: expected a divisor and a mesh of all ranks; or "
                f"pass a 2-D mesh (co, ds) whose second dimension has {degree} ranks"
            )
        if self._mesh is None or self._mesh[0] != mesh:
            grid = mesh.mesh.view(-1, degree)
            names = ("co", "ds")
            self._mesh = mesh, DeviceMesh(mesh.device_type, grid, mesh_dim_names=names)
        return self._mesh[1]


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
        layout; otherwise there is one warning and the ordinary path. With ``o_proj`` the output is
        waited for where that projection uses it.
        """
        self.style.apply(
            module,
            self._two_dimensional(device_mesh),
            q=q_proj,
            k=k_proj,
            v=v_proj,
            o=o_proj,
        )
        return module
