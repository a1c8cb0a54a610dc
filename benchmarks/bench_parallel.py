"""Sharded weights on two gloo processes: memory, and what really runs beside a collective.

Each mode trains the same Llama-style stack in two fresh processes. Overlap is counted by the order
of events, never by time: a collective overlaps if a layer's forward or backward ended between its
launch and its wait. In one more step rank 1 is late: it joins the next layer's all-gather, or the
last layer's reduce-scatter, only when rank 0 has said that the compute beside it is over. Rank 0
could never say so if it waited first.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from commit import ROOT
from common import PeakMemory, make_parser, write_result
from llama import Llama, LlamaConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memswap.cli.table import render_table
from memswap.parallel import ShardContext, pool_all_gathers, shard
from memswap.parallel.comm import Comm, ProcessGroupComm, ReduceOp, Ticket, all_gather_tensor

sys.path.insert(0, str(ROOT / "tests" / "parallel"))
from comms import EventLog, LateComm, Recording

# torch 2.13 renamed it; the old name warns.
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

RANKS = 2
BASELINE = "fully_shard"
MIB = 2**20

#: Allocations from here on are the kernel's and go back when they are freed: 64 KiB.
MMAP_THRESHOLD = 64 << 10
M_MMAP_THRESHOLD = -3  # <malloc.h>

#: How long the late rank waits to hear that the other one has got on.
PATIENCE = timedelta(seconds=2)


class LatePeer(ProcessGroupComm):
    """Joins a collective when the other rank has passed the compute beside it, or gives up."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, layers: int) -> None:
        super().__init__(group)
        self.store = store
        self.beside = {f"all_gather layers.{i}": f"F{i - 1}" for i in range(1, layers)}
        self.beside |= {f"reduce_scatter layers.{i}": f"B{i - 1}" for i in range(1, layers)}
        self.late = False
        self.passed: dict[str, bool] = {}

    def _meet(self, collective: str) -> None:
        event = self.beside.get(collective)
        if not self.late or event is None or self.rank == 0 or collective in self.passed:
            return
        try:
            self.store.wait([event], PATIENCE)
            self.passed[collective] = True
        except RuntimeError:  # nobody said so
            self.passed[collective] = False

    def all_gather(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, label: str = ""
    ) -> Ticket:
        self._meet(f"all_gather {label}")
        return super().all_gather(outputs, inputs, label=label)

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = "avg",
        label: str = "",
    ) -> Ticket:
        self._meet(f"reduce_scatter {label}")
        return super().reduce_scatter(outputs, inputs, op=op, label=label)


class RecordedCollective:
    """FSDP2's own collective (set_custom_all_gather, set_custom_reduce_scatter), written down."""

    def __init__(self, name: str, log: EventLog) -> None:
        self.name = name
        self.log = log
        self.count = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = None,
        async_op: bool = False,
    ) -> Any:
        event = f"{self.name} {self.count}"
        self.count += 1
        self.log(event)
        options = {"group": group, "async_op": async_op}
        if self.name == "all_gather":
            work = all_gather_tensor(output_tensor, input_tensor, **options)
        else:
            work = reduce_scatter_tensor(output_tensor, input_tensor, op=op, **options)
        if not async_op:
            self.log(f"wait {event}")
            return work
        log = self.log

        class Waited:
            def wait(self, *arguments: Any) -> Any:
                log(f"wait {event}")
                return work.wait(*arguments)

        return Waited()


def overlaps(events: list[str], collective: str) -> dict[str, int]:
    """How many there were, and how many had a layer's compute end between launch and wait."""
    total = overlapped = 0
    compute = [i for i, event in enumerate(events) if event[0] in "FB"]
    waits: dict[str, list[int]] = {}
    for i, event in enumerate(events):
        if event.startswith(f"wait {collective} "):
            waits.setdefault(event.removeprefix("wait "), []).append(i)
    for i, event in enumerate(events):
        if event.startswith(f"{collective} "):
            end = next((wait for wait in waits.get(event, []) if wait > i), len(events))
            total += 1
            overlapped += any(i < one < end for one in compute)
    return {"count": total, "overlapped": overlapped}


def mark_compute(layers: nn.ModuleList, log: Callable[[str], None]) -> None:
    """Events where a layer's forward and backward end; hooks that change no result."""
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, i=i: log(f"F{i}"))
        layer.register_full_backward_hook(lambda *_, i=i: log(f"B{i}"))


#: For each mode, what makes the model parallel; returns the model to call and its ShardContext.
Made = tuple[nn.Module, ShardContext | None]


def make(
    mode: str, model: Llama, mesh: DeviceMesh, log: EventLog, open_comm: Callable[..., Comm]
) -> Made:
    """The model in one of the MODES."""
    if mode == "DistributedDataParallel":
        return DistributedDataParallel(model), None
    if mode.startswith("fully_shard"):
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
        for module in (*model.layers, model):
            module.set_custom_reduce_scatter(RecordedCollective("reduce_scatter", log))
            module.set_custom_all_gather(RecordedCollective("all_gather", log))
        if "pool" in mode:
            pool_all_gathers(model, slots=2)
        return model, None
    slots = {"1 slot": 1, "2 slots": 2}.get(mode.removeprefix("shard, ").partition(" at")[0])
    reduces = 1 if slots == 1 else 2
    context = ShardContext(slots=slots, max_reduces=reduces, open_comm=open_comm)
    for module in (*model.layers, model):
        shard(module, mesh, context=context)
    return model, context


MODES = (
    "DistributedDataParallel",
    BASELINE,
    "fully_shard, pooled",
    "shard, 1 slot",
    "shard, 2 slots",
    "shard, 2 slots at a late network",
    "shard",
)


def train(
    mode: str, rank: int, file: str, config: LlamaConfig, batch: int, steps: int
) -> dict[str, Any]:
    """What one rank finds in one mode."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    torch.set_num_threads(1)
    store = dist.FileStore(file, RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    mesh, log, cpu = init_device_mesh("cpu", (RANKS,)), EventLog(), torch.device("cpu")
    peers: list[LatePeer] = []

    def open_comm(group: dist.ProcessGroup) -> Comm:
        peer = LatePeer(group, dist.PrefixStore("late", store), config.layers)
        peers.append(peer)
        return Recording(LateComm(peer) if "late" in mode else peer, log)

    torch.manual_seed(0)
    memory = PeakMemory(cpu)
    memory.start()
    before = memory.read()["resident_bytes"]
    plain = Llama(config)
    model, context = make(mode, plain, mesh, log, open_comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mark_compute(plain.layers, log)
    seconds: list[float] = []
    data = torch.Generator().manual_seed(rank)

    def step() -> None:
        text = torch.randint(config.vocabulary, (batch, config.sequence + 1), generator=data)
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for index in range(steps):
        log.events.clear()
        if index == 1:  # the first one makes what the others use again
            memory.start()
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    found: dict[str, Any] = {
        "peak_bytes": memory.read()["resident_bytes"] - before,
        "step_ms": statistics.median(seconds[1:]) * 1e3,
        "all_gather": overlaps(log.events, "all_gather"),
        "reduce_scatter": overlaps(log.events, "reduce_scatter"),
        "pool": None if context is None else asdict(context.stats()),
    }
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().numpy().tobytes())
    found["parameters"] = digest.hexdigest()
    if peers and "late" not in mode:
        peer = peers[0]
        peer.late = True
        mark_compute(plain.layers, lambda event: peer.store.set(event, "") if rank == 0 else None)
        step()
        found["late_peer"] = {"count": len(peer.passed), "passed": sum(peer.passed.values())}
    dist.barrier()
    dist.destroy_process_group()
    return found


def _serve(connection: Connection, *arguments: Any) -> None:
    connection.send(train(*arguments))


def run(mode: str, config: LlamaConfig, batch: int, steps: int) -> list[dict[str, Any]]:
    """A mode in processes of its own; what each rank found."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            arguments = (theirs, mode, rank, f"{folder}/store", config, batch, steps)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, mine))
        try:
            return [connection.recv() for _, connection in ranks]
        except EOFError:
            raise SystemExit(f"{mode}: a rank failed; its error is above") from None
        finally:
            for process, _ in ranks:
                process.join(10)
                process.kill()


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    arguments = parser.parse_args()
    if torch.device(arguments.device).type != "cpu":
        print("bench_parallel: two processes need two devices; it runs on a CPU only")
        return
    hidden = arguments.hidden
    config = LlamaConfig(arguments.layers, hidden, 3 * hidden, 8, 4, 1024, arguments.sequence)
    results: dict[str, Any] = {}
    for mode in MODES:
        first, second = run(mode, config, arguments.batch, arguments.steps)
        both = max(first["peak_bytes"], second["peak_bytes"])
        late = second.get("late_peer")
        results[mode] = first | {"peak_bytes": both, "late_peer": late}
    expected = results[BASELINE]["parameters"]
    rows = []
    for mode, one in results.items():
        one["parameters_equal"] = one.pop("parameters") == expected
        gathers, reduces, late = one["all_gather"], one["reduce_scatter"], one["late_peer"]
        rows.append(
            [
                mode,
                f"{one['peak_bytes'] / MIB:.0f}",
                f"{gathers['overlapped']} of {gathers['count']}" if gathers["count"] else "",
                f"{reduces['overlapped']} of {reduces['count']}" if reduces["count"] else "",
                f"{late['passed']} of {late['count']}" if late else "",
                "yes" if one["parameters_equal"] else "NO",
                f"{one['step_ms']:.0f}",
            ]
        )
    weights = sum(p.nbytes for p in Llama(config).parameters())
    layer = sum(p.nbytes for p in Llama(config).layers[0].parameters())
    print(
        f"{RANKS} gloo processes, one thread each; weights {weights / MIB:.0f} MiB in float32, "
        f"{layer / MIB:.1f} of them in each of {config.layers} layers; AdamW"
    )
    print(
        render_table(
            [
                "",
                "peak MiB",
                "all-gathers overlapped",
                "reduce-scatters",
                "late peer passed",
                f"bits of {BASELINE}",
                "step ms",
            ],
            rows,
        )
    )
    options = asdict(config) | {"batch": arguments.batch, "steps": arguments.steps, "ranks": RANKS}
    options |= {"weight_bytes": weights, "layer_bytes": layer}
    write_result(
        arguments.json,
        torch.device("cpu"),
        {"baseline": BASELINE, "options": options, "modes": results},
    )


if __name__ == "__main__":
    main()
