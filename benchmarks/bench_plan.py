"""A Llama-style stack under memory budgets: what each way to save memory gives and costs.

All modes run in one process, in alternating blocks of steps on the same weights and the same batch.
"Exposed" is what a step takes beyond the plain one; of memswap's modes the plan's own prediction
stands beside it. Gradients are compared bit for bit with the plain ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from bench_step import BASELINE, Bench, around_layers, recompute
from common import make_parser, pinned_bytes, summarize, write_result
from llama import Llama, LlamaConfig

import memswap
from memswap.cli.table import format_ratio, render_table
from memswap.engine.units import format_bytes

#: Per device type; the accelerator's are Llama-3-8B's layer, at three lengths.
SIZES = {
    "cpu": [
        LlamaConfig(
            layers=4,
            hidden=256,
            feed_forward=704,
            heads=8,
            kv_heads=2,
            vocabulary=512,
            sequence=256,
        )
    ],
    "accelerator": [
        LlamaConfig(
            layers=8,
            hidden=4096,
            feed_forward=14336,
            heads=32,
            kv_heads=8,
            vocabulary=32000,
            sequence=sequence,
        )
        for sequence in (2048, 8192, 32768)
    ],
}
SHARES = (0.8, 0.67, 0.5)
RECOMPUTE_SHARES = (0.67, 0.5)
PLAN_STEPS = 7  # until there is a plan, and one of its steps has been timed

Attach = Callable[[Llama], AbstractContextManager[Any]]


@contextmanager
def boundary_only(pool: Any, model: Llama) -> Iterator[memswap.saved_tensors]:
    """Checkpoint each layer, and swap what its region keeps: its input."""
    inputs = memswap.saved_tensors(memswap.Policy(memswap.Action.SWAP), pool=pool)
    with recompute(model), around_layers(lambda: inputs, model):
        yield inputs


@contextmanager
def planned(
    bench: Bench, budget: int | str, regions: bool, model: Llama
) -> Iterator[memswap.Manager]:
    """Manage the layers under a budget, from the step on in which there is a plan.

    `regions`: whether the plan may recompute layers as well.
    """
    checkpointed = memswap.checkpoint_module(model.layers) if regions else None
    try:
        with memswap.manage(model.layers, pool=bench.pool, budget=budget) as manager:
            for _ in range(PLAN_STEPS):
                bench.step()
            yield manager
    finally:
        if checkpointed is not None:
            checkpointed.remove()


def kept_bytes(bench: Bench) -> int:
    """Saved activations of the layers at their peak, if nothing moves."""
    keep = memswap.Policy(memswap.Action.KEEP)
    with memswap.manage(bench.model.layers, keep) as manager:
        bench.step()
        return manager.stats().peak_resident_bytes


def modes_of(bench: Bench) -> dict[str, Attach]:
    """Every mode by name."""
    pin = bench.device.type != "cpu"
    swap = memswap.Policy(memswap.Action.SWAP)
    save_on_cpu = partial(torch.autograd.graph.save_on_cpu, pin_memory=pin)
    modes: dict[str, Attach] = {BASELINE: lambda model: nullcontext(), "checkpoint": recompute}
    if pin:  # on a CPU it copies nothing
        modes["save_on_cpu"] = partial(around_layers, save_on_cpu)
    modes |= {
        "boundary only": partial(boundary_only, bench.pool),
        "all swapped": lambda model: memswap.manage(model.layers, swap, pool=bench.pool),
        "memswap auto": partial(planned, bench, "auto", False),
    }
    kept = kept_bytes(bench)
    for share in SHARES:
        modes[f"memswap {share:.0%}"] = partial(planned, bench, int(share * kept), False)
    for share in RECOMPUTE_SHARES:
        name = f"memswap {share:.0%}, may recompute"
        modes[name] = partial(planned, bench, int(share * kept), True)
    return modes


def measure(config: LlamaConfig, batch: int, device: torch.device, steps: int, rounds: int) -> Any:
    """All modes on one size: rows of a table, and the record."""
    bench = Bench(config, batch, device)
    modes = modes_of(bench)
    records: dict[str, dict[str, Any]] = {name: {} for name in modes}
    skipped: dict[str, str] = {}
    for _ in range(rounds):
        for name, attach in list(modes.items()):
            before = pinned_bytes(device)
            try:
                kept: list[Any] = []
                bench.block(remembering(attach, kept), steps, records[name])
            except (memswap.BudgetError, torch.OutOfMemoryError) as error:
                skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                del modes[name], records[name]
                bench.model.zero_grad(set_to_none=True)
                continue
            after = pinned_bytes(device)
            if before is not None and after is not None:
                records[name].setdefault("pinned_bytes", after - before)
            plan = getattr(kept[0], "plan", None) if kept else None
            if plan is not None:
                records[name]["plan"] = {
                    "peak_bytes": plan.peak_bytes,
                    "kept_peak_bytes": plan.kept_peak_bytes,
                    "exposed_s": plan.exposed_s,
                    "compute_s": plan.compute_s,
                    "moved_bytes": plan.moved_bytes,
                    "measured_peak_bytes": plan.measured_peak_bytes,
                    "table": str(plan),
                }
    return records, skipped


def remembering(attach: Attach, kept: list[Any]) -> Attach:
    """The same, and what it yields is kept."""

    @contextmanager
    def attached(model: Llama) -> Iterator[Any]:
        with attach(model) as one:
            kept.append(one)
            yield one

    return attached


def table(records: dict[str, dict[str, Any]]) -> str:
    """A line per mode."""
    plain_s = summarize(records[BASELINE]["seconds"])["median"]
    memory_keys = [k for k in records[BASELINE] if k.endswith("_bytes") and "pinned" not in k]
    rows = []
    for name, record in records.items():
        record["step_s"] = summarize(record.pop("seconds"))
        record["exposed_s"] = record["step_s"]["median"] - plain_s
        plan, stats = record.get("plan"), record.get("stats")
        first = memory_keys[0]
        rows.append(
            [
                name,
                f"{record['step_s']['median'] * 1e3:.1f}",
                format_ratio(record["step_s"]["median"], plain_s),
                f"{record['exposed_s'] * 1e3:+.1f}",
                "-" if plan is None else f"{plan['exposed_s'] * 1e3:+.1f}",
                *(format_bytes(record[key]) for key in memory_keys),
                format_ratio(record[first], records[BASELINE][first]),
                "-" if stats is None else format_bytes(stats["peak_resident_bytes"]),
                "-" if plan is None else format_bytes(plan["peak_bytes"]),
                format_bytes(record.get("pinned_bytes", 0)),
                "yes" if record["gradients_equal"] else "NO",
            ]
        )
    header = ["", "step ms", "ratio", "exposed ms", "predicted"]
    header += [f"peak {key.removesuffix('_bytes')}" for key in memory_keys]
    header += ["ratio", "saved, peak", "predicted", "pinned", "gradients equal"]
    return render_table(header, rows)


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=None, help="default: 2 on a CPU, else 1")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a block")
    parser.add_argument("--rounds", type=int, default=2, help="blocks of each mode")
    parser.add_argument("--sequence", type=int, nargs="+", help="default: by device")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batch = arguments.batch or (2 if device.type == "cpu" else 1)
    results, failed = [], False
    configs = SIZES["cpu" if device.type == "cpu" else "accelerator"]
    if arguments.sequence:
        configs = [replace(configs[0], sequence=sequence) for sequence in arguments.sequence]
    for config in configs:
        records, skipped = measure(config, batch, device, arguments.steps, arguments.rounds)
        print(f"\n{device}: batch {batch}, bf16, {asdict(config)}")
        print(table(records))
        for name, reason in skipped.items():
            print(f"skipped: {name}: {reason}")
        results.append({"options": {**asdict(config), "batch": batch}, "modes": records,
                        "skipped": skipped})  # fmt: skip
        failed |= any(
            not record["gradients_equal"]
            for name, record in records.items()
            if name not in ("checkpoint", "save_on_cpu")
        )
        write_result(arguments.json, device, {"baseline": BASELINE, "sizes": results})
    if failed:
        raise SystemExit("memswap's gradients are not those of the plain run.")


if __name__ == "__main__":
    main()
