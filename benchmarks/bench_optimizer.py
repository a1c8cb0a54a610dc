"""Full training of a GPT with AdamW, its state away between steps: bytes, step() time, ratio.

All modes train the same model on the same batches, in one process, in alternating blocks of steps.
`step()` is timed apart from forward and backward, beside which a file is still being written: both
are told over those of plain training. A block's first step is not counted, and a block is over when
its writes are, so no mode has another one's beside it. Beside the file's `step()` stands the disk's
own time: the same storages written, read, and both at once, by the same lane, with nothing else to
do.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import chosen_device, make_parser, summarize, synchronize, write_result

import memswap
from memswap._native import native
from memswap.cli.corpus import Batches, read_corpus
from memswap.cli.gpt import GPT
from memswap.cli.table import render_table
from memswap.engine.lane import open_lane
from memswap.engine.units import format_bytes
from memswap.optimizers import ManagedOptimizer
from memswap.optimizers.state import away_of, plain_tensors

#: Optimizer of a mode, managed or not.
Manage = Callable[[torch.optim.Optimizer], ManagedOptimizer | None]

#: torchao's optimizer, which keeps AdamW's state, and its step, on the host.
PEER = "torchao CPUOffloadOptimizer"


class Run:
    """One mode's training: its own model and optimizer."""

    def __init__(self, name: str, arguments: Any, device: torch.device, manage: Manage) -> None:
        make = offloaded if name == PEER else torch.optim.AdamW
        torch.manual_seed(0)
        self.name, self.device = name, device
        self.model = GPT(arguments.layers, arguments.hidden, arguments.heads, arguments.seq)
        self.model.to(device)
        self.optimizer = make(self.model.parameters(), lr=3e-4, fused=arguments.fused or None)
        self.manager = manage(self.optimizer)
        self.batches = Batches(read_corpus(), arguments.batch, arguments.seq, 0)
        self.step_s: list[float] = []
        self.backward_s: list[float] = []

    def block(self, steps: int) -> None:
        """So many steps that count, behind one that does not; nothing is under way afterwards."""
        self.train(1, counted=False)
        self.train(steps, counted=True)
        while self.manager is not None and self.manager._mover.wait_oldest():
            pass

    def train(self, steps: int, counted: bool) -> None:
        for _ in range(steps):
            tokens, targets = self.batches.draw(self.device)
            self.optimizer.zero_grad()
            began = time.perf_counter()
            self.model(tokens, targets).backward()
            synchronize(self.device)
            between = time.perf_counter()
            self.optimizer.step()
            synchronize(self.device)
            ended = time.perf_counter()
            if counted:
                self.backward_s.append(between - began)
                self.step_s.append(ended - between)


def offloaded(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """The peer's optimizer.

    Raises:
        ImportError: it is not installed.
        AssertionError: it does not serve this device.
    """
    from torchao.optim import CPUOffloadOptimizer

    made: torch.optim.Optimizer = CPUOffloadOptimizer(parameters, torch.optim.AdamW, **options)
    return made


def frame_share(optimizer: torch.optim.Optimizer, name: str) -> float | None:
    """Bytes of the frames of one kind of state, of their raw bytes."""
    raw = frames = 0
    for state in optimizer.state.values():
        for tensor in plain_tensors(state.get(name, ())):
            away = away_of(tensor)
            if away is not None:
                raw += away.nbytes
                frames += away.form.device_nbytes
    return frames / raw if raw else None


def disk_time(path: str, sizes: list[int], device: torch.device) -> dict[str, float]:
    """Seconds that a file takes for storages of these sizes, by the lane, with nothing beside."""
    pool = memswap.DiskPool(path)
    lane = open_lane(device)
    storages = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
    blocks = [pool.native.allocate(nbytes) for nbytes in sizes]
    found = {}
    for what in ("write", "read", "both"):
        began = time.perf_counter()
        tickets = []
        for storage, block in zip(storages, blocks, strict=True):
            if what != "write":
                tickets.append(lane.fetch_into(block, native.StorageRef(storage), 0))
            if what != "read":
                tickets.append(lane.send(native.StorageRef(storage), block))
        for ticket in tickets:
            ticket.wait()
        found[f"{what}_s"] = time.perf_counter() - began
    return found


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5, help="of steps, in alternation")
    parser.add_argument("--steps", type=int, default=4, help="in each block")
    parser.add_argument("--room", default="64MiB", help="what state may take in step()")
    parser.add_argument("--fused", action="store_true", help="AdamW's fused step")
    parser.add_argument(
        "--ratio-steps", type=int, default=200, help="of the training for the ratio"
    )
    parser.add_argument("--path", default=tempfile.gettempdir(), help="where the file is made")
    arguments = parser.parse_args()
    device = chosen_device(arguments.device)
    room = arguments.room

    def frames(optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
        return memswap.manage_optimizer(optimizer, memswap.Action.ENCODE, room=room)

    def swapped(optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
        return memswap.manage_optimizer(optimizer, memswap.Action.SWAP, room=room)

    def file(optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
        pool = memswap.DiskPool(arguments.path)
        return memswap.manage_optimizer(optimizer, memswap.Action.SWAP, pool, room=room)

    modes: dict[str, Manage] = {"plain": lambda optimizer: None, "frames": frames}
    if device.type != "cpu":
        modes["pinned memory"] = swapped
    modes["file"] = file
    runs = [Run(name, arguments, device, manage) for name, manage in modes.items()]
    absent = ""
    try:
        runs.insert(1, Run(PEER, arguments, device, lambda optimizer: None))
    except (ImportError, AssertionError) as error:
        absent = f"does not run here: {error}"
    for run in runs:
        run.train(2, counted=False)
    for _ in range(arguments.blocks):
        for run in runs:
            run.block(arguments.steps)
    reference = [parameter.detach() for parameter in runs[0].model.parameters()]
    result: dict[str, Any] = {"options": _options(arguments), "modes": {}}
    rows = []
    for run in runs:
        ours = [parameter.detach() for parameter in run.model.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))
        numbers = None if run.manager is None else run.manager.statistics()
        result["modes"][run.name] = {
            "step_s": summarize(run.step_s),
            "forward_backward_s": summarize(run.backward_s),
            "same_bits": same,
            "statistics": None if numbers is None else asdict(numbers),
        }
        if run.name == PEER:
            held = most = "on the host"
        elif numbers is None:
            total = sum(
                tensor.numel() * tensor.element_size()
                for state in run.optimizer.state.values()
                for tensor in plain_tensors(state)
            )
            held, most = format_bytes(total), format_bytes(total)
        else:
            held = format_bytes(numbers.state_bytes - numbers.away_bytes + numbers.frame_bytes)
            most = format_bytes(numbers.peak_bytes)
        one, plain = result["modes"][run.name], result["modes"]["plain"]
        cells = []
        for what in ("step_s", "forward_backward_s"):
            one[f"{what}_over_plain"] = one[what]["median"] / plain[what]["median"]
            over = f"{one[f'{what}_over_plain']:.2f}x"
            cells.append(f"{one[what]['median'] * 1e3:.0f}, {over}")
        rows.append(
            [
                run.name,
                *cells,
                held,
                most,
                "yes" if same else "NO",
            ]
        )
    if absent:
        result["modes"][PEER] = {"absent": absent}
        rows.insert(1, [PEER, *["-"] * 4, absent])
    sizes = [
        away.nbytes
        for state in runs[-1].optimizer.state.values()
        for tensor in plain_tensors(state)
        if (away := away_of(tensor)) is not None
    ]
    del runs
    result["disk"] = [disk_time(arguments.path, sizes, torch.device("cpu")) for _ in range(3)]
    head = [
        "state",
        "step() ms, over plain",
        "fwd + bwd ms, over plain",
        "held between steps",
        "most in step()",
        "same bits",
    ]
    print(render_table(head, rows))
    for one in result["disk"]:
        told = [
            f"{name.removesuffix('_s')} {seconds * 1e3:.0f} ms" for name, seconds in one.items()
        ]
        print("the disk alone:", ", ".join(told))
    both_s = median(one["both_s"] for one in result["disk"])
    file_s = result["modes"]["file"]["step_s"]["median"]
    result["file_step_over_disk"] = file_s / both_s
    print(
        f"step() with a file takes {file_s / both_s:.2f} of the disk's own time for these bytes; "
        "forward and backward beside it "
        f"{result['modes']['file']['forward_backward_s_over_plain']:.2f} of plain ones"
    )
    result["ratio"] = ratio_over_training(arguments, device, frames)
    write_result(arguments.json, device, result)


def ratio_over_training(arguments: Any, device: torch.device, frames: Manage) -> list[Any]:
    """Shares of frames of both moments, while a model learns."""
    run = Run("ratio", arguments, device, frames)
    found = []
    done = 0
    for step in (1, 10, 50, 100, 200, 500, 1000):
        if step > arguments.ratio_steps:
            break
        run.train(step - done, counted=False)
        done = step
        shares = {name: frame_share(run.optimizer, name) for name in ("exp_avg", "exp_avg_sq")}
        found.append({"step": step, **shares})
        told = ", ".join(f"{name} {share:.3f}" for name, share in shares.items() if share)
        print(f"frames of their raw bytes after {step} steps: {told}")
    return found


def _options(arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)}


if __name__ == "__main__":
    main()
