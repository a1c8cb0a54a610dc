"""memswap beside what else frees the memory of saved activations: bytes and time, in one run.

The same Llama blocks are trained in each way, in turns with plain training of the same blocks, and
the gradients are compared bit by bit. Three numbers for each:

- "held": what the device has more when the forward ends than before it. It is what is saved.
- "peak": the most that it has more at any moment of the step, gradients included.
- "step": a step's time over that of a plain step beside it.

On a CPU bytes are those of the process, so each way has a process of its own, and what memswap's
pools keep from step to step counts as well; ways that copy to a CPU need an accelerator.
`--simulate` runs them on the simulated one of tests/simdev, whose bytes are exact and whose times
mean nothing. Torchtune and TRL run where they are installed. docs/alternatives.md has the tables
that `python benchmarks/peers_page.py` makes of the results.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import PeakMemory, chosen_device, make_parser, synchronize, write_result
from llama import Llama, LlamaConfig
from peers import PEERS, find_peers
from torch import nn
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.cli.table import render_table


class AbsentError(Exception):
    """A way cannot run here; says why."""


@dataclass
class Run:
    """A model that is trained in one way."""

    model: nn.Module
    device: torch.device
    tokens: torch.Tensor
    folder: Path
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    called: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    manager: memswap.types.Manager | None = None
    rest_bytes: int | None = None
    """What a CPU's process had before memswap; None: what it has before the measured step."""
    ends: ExitStack = field(default_factory=ExitStack)

    def loss(self) -> torch.Tensor:
        called = self.model if self.called is None else self.called
        with self.around():
            return called(self.tokens, self.tokens)

    def accelerator(self) -> None:
        if self.device.type == "cpu":
            raise AbsentError("copies to a CPU's memory: needs an accelerator")


def plain(run: Run) -> None:
    """Nothing."""


def checkpointed(run: Run) -> None:
    """Each layer is a checkpoint region."""
    for layer in run.model.layers:
        forward = layer.forward
        layer.forward = lambda *given, f=forward: checkpoint(f, *given, use_reentrant=False)


def checkpointed_offload(run: Run) -> None:
    """As transformers' `offload` and accelerate's flag: save_on_cpu around checkpoint regions."""
    run.accelerator()
    checkpointed(run)
    run.around = torch.autograd.graph.save_on_cpu


def save_on_cpu(run: Run) -> None:
    run.accelerator()
    run.around = torch.autograd.graph.save_on_cpu


def offload_activations(run: Run, name: str) -> None:
    """One of the two classes of this name, TRL's and torchtune's."""
    run.accelerator()
    found, reasons = find_peers(run.device, ())
    if name not in found:
        raise AbsentError(reasons[name])
    offloads: Any = found[name]
    run.around = lambda: offloads(use_pin_memory=run.device.type == "cuda")


def compiled(run: Run, share: float | None = None) -> None:
    """The model is compiled as a whole; a share of what it would save bounds what it saves."""
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    if share is not None:
        run.ends.enter_context(functorch.patch(activation_memory_budget=share))
    backend = "inductor" if run.device.type in ("cpu", "cuda") else "aot_eager"
    run.called = torch.compile(run.model, backend=backend)


def compiled_half(run: Run) -> None:
    compiled(run, 0.5)


def fsdp2(run: Run) -> None:
    """FSDP2 with CPUOffloadPolicy, one rank: weights and their gradients are on the CPU."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    if run.device.type not in ("cpu", "cuda"):
        raise AbsentError("FSDP2's collectives do not know this device")
    run.accelerator()
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    run.ends.callback(dist.destroy_process_group)
    for module in [*run.model.layers, run.model]:
        fully_shard(module, offload_policy=CPUOffloadPolicy())


def managed(run: Run, **options: Any) -> None:
    if run.device.type == "cpu":
        import_module("torch._dynamo")  # which memswap imports: as large as all saved activations
        run.model.zero_grad(set_to_none=True)
        PeakMemory(run.device).start()
        run.rest_bytes = held_bytes(run.device)
    run.manager = memswap.manage(run.model, **options)
    run.ends.callback(run.manager.remove)


def memswap_recompute(run: Run) -> None:
    managed(run, policy=memswap.Policy(action="recompute"))


def memswap_file(run: Run) -> None:
    managed(run, pool=memswap.DiskPool(run.folder, budget="4GiB"))


def memswap_budget(run: Run) -> None:
    if run.device.type == "cpu":
        managed(run, budget="70%", pool=memswap.DiskPool(run.folder, budget="4GiB"))
    else:
        managed(run, budget="50%")


def memswap_compiled(run: Run) -> None:
    """Each layer is compiled by itself, and managed."""
    torch._dynamo.reset()
    backend = "inductor" if run.device.type in ("cpu", "cuda") else "aot_eager"
    for layer in run.model.layers:
        layer.compile(backend=backend)
    step(run)  # what compiling takes of the process is not memswap's
    managed(run)


#: By name: what is set up, and whether the gradients are to be those of the plain step.
WAYS: dict[str, tuple[Callable[[Run], None], bool]] = {
    "plain": (plain, True),
    "torch.utils.checkpoint": (checkpointed, True),
    "save_on_cpu": (save_on_cpu, True),
    "checkpoint, inputs on the CPU": (checkpointed_offload, True),
    **{name: (partial(offload_activations, name=name), True) for name in PEERS},
    "FSDP2 CPUOffloadPolicy": (fsdp2, True),
    "torch.compile": (compiled, False),
    "torch.compile, activation_memory_budget 0.5": (compiled_half, False),
    "memswap.manage": (managed, True),
    "memswap, recompute": (memswap_recompute, True),
    "memswap, into a file": (memswap_file, True),
    "memswap, budget": (memswap_budget, True),
    "memswap, layers compiled": (memswap_compiled, False),
}


#: Sizes where nothing else is said: on a device, and simulated.
SIZES = {
    "layers": (4, 4),
    "hidden": (512, 256),
    "batch": (2, 2),
    "sequence": (512, 256),
    "rounds": (5, 1),
    "learn": (7, 5),
}
EXPLAINED = {"rounds": "steps that are timed", "learn": "memswap's steps before any is measured"}

#: Steps before anything is measured where nothing is learnt: compilers and allocators warm up.
WARM_UP = 2

#: Freed memory goes back to the system, as in the demo, and OpenMP's threads wait asleep.
OF_A_CPU = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "OMP_WAIT_POLICY": "PASSIVE"}


def new_run(arguments: Any, device: torch.device) -> Run:
    torch.manual_seed(0)
    hidden, heads = arguments.hidden, max(arguments.hidden // 64, 2)
    config = LlamaConfig(
        arguments.layers, hidden, 11 * hidden // 4, heads, heads // 2, 1000, arguments.sequence
    )
    dtype = torch.float32 if arguments.simulate else torch.bfloat16
    tokens = torch.randint(1000, (arguments.batch, arguments.sequence)).to(device)
    return Run(Llama(config).to(device, dtype), device, tokens, arguments.folder)


def held_bytes(device: torch.device) -> int:
    """What the device has now; of a CPU what the process has."""
    gc.collect()
    if device.type != "cpu":
        synchronize(device)
        return int(torch.get_device_module(device).memory_allocated())
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


def step(run: Run) -> float:
    """Seconds of one forward and backward."""
    run.model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    run.loss().backward()
    synchronize(run.device)
    return time.perf_counter() - began


def memory(run: Run) -> tuple[int, int]:
    """What is held when the forward ends, and the step's peak; both beside what was there."""
    run.model.zero_grad(set_to_none=True)
    peak = PeakMemory(run.device)
    peak.start()
    before = held_bytes(run.device) if run.rest_bytes is None else run.rest_bytes
    loss = run.loss()
    held = held_bytes(run.device) - before
    loss.backward()
    synchronize(run.device)
    if run.device.type == "cpu":
        return held, peak.read()["resident_bytes"] - before
    return held, int(torch.get_device_module(run.device).max_memory_allocated()) - before


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [one.grad for one in model.parameters() if one.grad is not None]
    return [getattr(one, "full_tensor", lambda one=one: one)().cpu().clone() for one in found]


def same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


def planned(run: Run) -> dict[str, int]:
    """Under a budget, bytes of saved activations at their peak: planned, and if nothing moved."""
    plan = None if run.manager is None else run.manager.plan
    if plan is None:
        return {}
    return {"planned_saved_bytes": plan.peak_bytes, "plain_saved_bytes": plan.kept_peak_bytes}


def measured(name: str, arguments: Any, device: torch.device) -> dict[str, Any]:
    """A row: one way, timed in turns with plain training."""
    set_up, comparable = WAYS[name]
    base, run = new_run(arguments, device), new_run(arguments, device)
    step(base)
    expected = gradients(base.model)
    base.model.zero_grad(set_to_none=True)
    with run.ends:
        try:
            set_up(run)
        except AbsentError as error:
            return {"way": name, "absent": str(error)}
        for _ in range(WARM_UP if run.manager is None else arguments.learn):
            step(run)
            if run.manager is not None:
                run.manager.wait_for_plan()
        equal = same_bits(gradients(run.model), expected)
        held, peak = map(median, zip(*(memory(run) for _ in range(3)), strict=True))
        plain_s, way_s = [], []
        for _ in range(arguments.rounds):
            plain_s.append(step(base))
            way_s.append(step(run))
        return {
            "way": name,
            "held_bytes": held,
            "peak_bytes": peak,
            "step_s": None if arguments.simulate else median(way_s),
            "plain_step_s": None if arguments.simulate else median(plain_s),
            "same_bits": equal if comparable else None,
            **planned(run),
        }


def measured_apart(name: str, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own, whose memory is its own; it may fail, or take too long."""
    command = [sys.executable, *sys.argv, "--row", name]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **OF_A_CPU},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"way": name, "absent": f"took more than {limit_s:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"way": name, "absent": f"failed: {last}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(arguments: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """All ways, each beside a plain model of its own."""
    for name in arguments.only or WAYS:
        print(name, file=sys.stderr, flush=True)
        if device.type == "cpu":
            yield measured_apart(name, arguments.limit_s)
        else:
            yield measured(name, arguments, device)
        gc.collect()


def shown(row: dict[str, Any], plain: dict[str, Any] | None, simulated: bool) -> tuple[str, ...]:
    if "absent" in row:
        return (row["way"], f"not here: {row['absent']}", "", "", "")
    share = f", {row['held_bytes'] / plain['held_bytes']:.2f}" if plain else ""
    bits = {None: "of other kernels", True: "the same", False: "DIFFER"}[row["same_bits"]]
    return (
        row["way"],
        f"{row['held_bytes'] / 2**20:.1f} MiB{share}",
        f"{row['peak_bytes'] / 2**20:.1f} MiB",
        "-" if simulated else f"{row['step_s'] / row['plain_step_s']:.2f}x",
        bits,
    )


def main() -> None:
    """Print a table."""
    parser = make_parser(__doc__)
    for name, (measured_here, simulated) in SIZES.items():
        said = f"default: {measured_here}, with --simulate {simulated}"
        parser.add_argument(f"--{name}", type=int, help=f"{EXPLAINED.get(name, name)}; {said}")
    parser.add_argument("--only", action="append", choices=list(WAYS), help="this way alone")
    parser.add_argument("--limit-s", type=float, default=180, help="seconds for a way, on a CPU")
    parser.add_argument("--row", choices=list(WAYS), help="this way, in this process, as JSON")
    parser.add_argument("--folder", type=Path, default=Path("build"), help="for swap files")
    parser.add_argument("--simulate", action="store_true", help="on the simulated accelerator")
    arguments = parser.parse_args()
    for name, defaults in SIZES.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, defaults[arguments.simulate])
    if arguments.simulate:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engine"))
        import_module("simulator").start("sim")
        arguments.device = "sim"
    device = chosen_device(arguments.device)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.row:
        print(json.dumps(measured(arguments.row, arguments, device)))
        return
    found = list(rows(arguments, device))
    plain_row = next((one for one in found if one["way"] == "plain"), None)
    print(
        render_table(
            ("way", "held after the forward", "peak", "step", "bits"),
            [shown(one, plain_row, arguments.simulate) for one in found],
        )
    )
    for row in found:
        if "planned_saved_bytes" in row:
            ours, plain_bytes = row["planned_saved_bytes"], row["plain_saved_bytes"]
            print(
                f"{row['way']}: of {plain_bytes / 2**20:.1f} MiB of saved activations "
                f"{ours / 2**20:.1f} MiB are planned"
            )
    sizes = {name: getattr(arguments, name) for name in SIZES}
    result = {"simulated": arguments.simulate, "sizes": sizes, "ways": found}
    write_result(arguments.json, device, result)
    if any(one.get("same_bits") is False for one in found):
        raise SystemExit("gradients differ from plain training")
    if any(one["way"].startswith("memswap") and "absent" in one for one in found):
        raise SystemExit("memswap does not run in one of its ways")


if __name__ == "__main__":
    main()
