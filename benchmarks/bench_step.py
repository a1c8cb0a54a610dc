"""Forward and backward of a Llama-style stack: time, memory and gradients of every way to save.

All modes run in one process, in alternating blocks of steps on the same weights and the same batch;
the optimizer is the same for all of them and is left out. Only what the layers save is treated.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    PeakMemory,
    chosen_device,
    make_parser,
    pinned_bytes,
    summarize,
    synchronize,
    write_result,
)
from llama import Llama, LlamaConfig
from peers import find_peers

import memswap
from memswap.cli.measure import same_bits, stats_as_dict
from memswap.cli.table import format_ratio, render_table
from memswap.engine.units import format_bytes

BASELINE = "plain"
OURS = "memswap, "  # what names of our modes begin with
# Per device type; the accelerator's are Llama-3-8B's layer. Any option on the command line wins.
SIZES = {
    "cpu": LlamaConfig(
        layers=4, hidden=256, feed_forward=704, heads=8, kv_heads=2, vocabulary=512, sequence=512
    ),
    "accelerator": LlamaConfig(
        layers=8, hidden=4096, feed_forward=14336, heads=32, kv_heads=8, vocabulary=32000,
        sequence=4096,
    ),
}  # fmt: skip
WARM_UP_STEPS = 4  # memswap learns its order in the first, and proves its recipes in the next

Attach = Callable[[Llama], AbstractContextManager[Any]]


@contextmanager
def around_layers(make: Callable[[], AbstractContextManager[Any]], model: Llama) -> Iterator[None]:
    """Enter a context around the layers of each forward."""
    model.around_layers = make
    try:
        yield
    finally:
        model.around_layers = nullcontext


@contextmanager
def recompute(model: Llama) -> Iterator[None]:
    """Checkpoint each layer, non-reentrant."""
    model.recompute = True
    try:
        yield
    finally:
        model.recompute = False


def count_synchronizations(step: Callable[[], None], device: torch.device) -> int | None:
    """Count the blocking calls torch warns of in one step; None where it cannot tell.

    It sees torch's own copies, item() and allocations, not an event that someone waits for.
    """
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask torch for deterministic kernels, without filling empty tensors."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of a tensor on an accelerator in pinned memory."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


class Bench:
    """One model, one batch, and the ways to train it.

    `host_memory`: budget of an accelerator's pool; None: as in :class:`memswap.HostPool`.
    """

    def __init__(
        self, config: LlamaConfig, batch: int, device: torch.device, host_memory: str | None = None
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Llama(config).bfloat16()
            shape = (batch, config.sequence)
            self.tokens = torch.randint(config.vocabulary, shape)
            self.targets = torch.randint(config.vocabulary, shape)
        self.device = device
        # One pool for all blocks of memswap's: after the first no memory is pinned any more.
        self.pool = memswap.DiskPool() if device.type == "cpu" else memswap.HostPool(host_memory)
        # On the host, so that it is not in anyone's device memory; pinned, for it is read often.
        self.reference = [
            None if one is None else on_host(one) for one in self.deterministic_gradients()
        ]

    def step(self) -> None:
        """Forward and backward; leaves the gradients."""
        self.model.zero_grad(set_to_none=True)
        self.model(self.tokens, self.targets).backward()

    def timed_step(self) -> float:
        """Return the seconds of one step, from an idle device to an idle device."""
        synchronize(self.device)
        began = time.perf_counter()
        self.step()
        synchronize(self.device)
        return time.perf_counter() - began

    def deterministic_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of one deterministic step."""
        with deterministic():
            self.step()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return gradients

    def has_right_gradients(self) -> bool:
        """Whether a deterministic step has the reference's gradients, bit for bit."""
        found = self.deterministic_gradients()
        return all(
            same_bits(one, None if right is None else right.to(self.device))
            for one, right in zip(found, self.reference, strict=True)
        )

    def block(self, attach: Attach, steps: int, record: dict[str, Any]) -> None:
        """Run one block of steps in one mode; the first of a mode also records what is not time."""
        with attach(self.model) as attached:
            for _ in range(WARM_UP_STEPS):
                self.step()
            if "seconds" not in record:
                # Without the gradients, so that every mode begins from the weights alone.
                self.model.zero_grad(set_to_none=True)
                peak = PeakMemory(self.device)
                peak.start()
                self.step()
                synchronize(self.device)
                record.update(peak.read())
                record["host_syncs"] = count_synchronizations(self.step, self.device)
                record["gradients_equal"] = self.has_right_gradients()
                record["seconds"] = []
            if attached is not None and hasattr(attached, "reset_stats"):
                attached.reset_stats()
            record["seconds"] += [self.timed_step() for _ in range(steps)]
            if attached is not None and hasattr(attached, "stats"):
                record["stats"] = stats_as_dict(attached.stats())
        self.model.zero_grad(set_to_none=True)


def collect_modes(bench: Bench, peer_paths: list[Path]) -> tuple[dict[str, Attach], dict[str, str]]:
    """Return every mode that runs here by name, and the reasons of those that do not."""
    pin = bench.device.type != "cpu"
    save_on_cpu = partial(torch.autograd.graph.save_on_cpu, pin_memory=pin)

    def managed(action: memswap.Action) -> Attach:
        policy = memswap.Policy(action=action)
        return lambda model: memswap.manage(model.layers, policy, pool=bench.pool)

    ours = (memswap.Action.SWAP, memswap.Action.RECOMPUTE, memswap.Action.ENCODE)
    if pin:  # without a link a DiskPool's frames are the same bytes on the way to the same disk
        ours = (*ours, memswap.Action.ENCODE_SWAP)
    modes: dict[str, Attach] = {
        BASELINE: lambda model: nullcontext(),
        **{f"{OURS}{action.name}": managed(action) for action in ours},
        "checkpoint": recompute,
    }
    found, reasons = find_peers(bench.device, peer_paths)
    if pin:
        found = {"save_on_cpu(pin_memory=True)": save_on_cpu, **found}
    else:
        reasons["save_on_cpu"] = "copies nothing when the tensors are on the CPU already"
    for name, make in found.items():
        modes[name] = partial(around_layers, make)
    return modes, reasons


def waited_ms(record: dict[str, Any], steps: int) -> str:
    """Milliseconds per step that memswap's host was blocked; others do not tell."""
    if "stats" not in record:
        return "-"
    return f"{record['stats']['exposed_wait_s'] / steps * 1e3:.1f}"


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    parser = make_parser(__doc__.splitlines()[0])
    for name in SIZES["cpu"].__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="default: by device")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a block")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each mode")
    parser.add_argument("--host-memory", help="budget for what is swapped, such as 64GiB")
    parser.add_argument(
        "--peer-path", type=Path, action="append", default=[], help="file with OffloadActivations"
    )
    arguments = parser.parse_args()
    device = chosen_device(arguments.device)
    sizes = asdict(SIZES["cpu" if device.type == "cpu" else "accelerator"])
    sizes.update({name: getattr(arguments, name) or size for name, size in sizes.items()})
    bench = Bench(LlamaConfig(**sizes), arguments.batch, device, arguments.host_memory)
    modes, reasons = collect_modes(bench, arguments.peer_path)

    records: dict[str, dict[str, Any]] = {name: {} for name in modes}
    before_pinned = pinned_bytes(device)
    for turn in range(arguments.rounds):
        for name, attach in list(modes.items()):
            try:
                bench.block(attach, arguments.steps, records[name])
            except Exception as error:
                # A peer that fails must not take the others' numbers with it; memswap must not
                # fail at all.
                if name in (BASELINE, "checkpoint") or name.startswith(OURS):
                    raise
                reasons[name] = f"failed: {type(error).__name__}: {error}"
                del modes[name], records[name]
                bench.model.zero_grad(set_to_none=True)
                continue
            if turn == 0:
                after = pinned_bytes(device)
                known = after is not None and before_pinned is not None
                # What this mode added: pinned memory is cached and never goes back by itself.
                records[name]["pinned_bytes"] = after - before_pinned if known else None
                before_pinned = after

    baseline = summarize(records[BASELINE]["seconds"])["median"]
    rows = []
    memory_keys = [
        key for key in records[BASELINE] if key.endswith("_bytes") and "pinned" not in key
    ]
    for name, record in records.items():
        record["step_s"] = summarize(record.pop("seconds"))
        record["over_plain_ms"] = (record["step_s"]["median"] - baseline) * 1e3
        syncs, pinned = record["host_syncs"], record["pinned_bytes"]
        rows.append(
            [
                name,
                f"{record['step_s']['median'] * 1e3:.1f}",
                f"{record['step_s']['p95'] * 1e3:.1f}",
                format_ratio(record["step_s"]["median"], baseline),
                f"{record['over_plain_ms']:+.1f}",
                waited_ms(record, arguments.steps),
                *(format_bytes(record[key]) for key in memory_keys),
                "-" if pinned is None else format_bytes(pinned),
                "-" if syncs is None else str(syncs),
                "yes" if record["gradients_equal"] else "NO",
            ]
        )
    header = ["", "step ms", "p95", f"against {BASELINE}", "over plain ms", "host waited ms"]
    header += [f"peak {key.removesuffix('_bytes')}" for key in memory_keys]
    header += ["pinned", "host syncs", "gradients equal"]
    print(f"{device}: batch {arguments.batch}, bf16, {sizes}")
    print(render_table(header, rows))
    for name, reason in reasons.items():
        print(f"skipped: {name}: {reason}")
    write_result(
        arguments.json,
        device,
        {
            "baseline": BASELINE,
            "options": {**sizes, "batch": arguments.batch, "dtype": "bfloat16"},
            "modes": records,
            "skipped": reasons,
        },
    )
    if not all(
        record["gradients_equal"] for name, record in records.items() if name.startswith(OURS)
    ):
        raise SystemExit("memswap's gradients are not those of the plain run.")


if __name__ == "__main__":
    main()
