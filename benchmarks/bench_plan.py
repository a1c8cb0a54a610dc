"""A Llama-style stack under memory budgets: what each way to save memory gives and costs.

All modes run in one process, in alternating blocks of steps on the same weights and the same batch.
"Exposed" is what a step takes beyond the plain one; of memswap's modes the plan's own prediction
stands beside it. Gradients are compared bit for bit with the plain ones.

A mode that finds no memory is a row that says so. Where that is the plain one, gradients are
compared with those of checkpointed steps. The result file is written after each mode.
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
from common import chosen_device, make_parser, pinned_bytes, summarize, write_result
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
SHARES = ("80%", "67%", "50%")
RECOMPUTE_SHARES = ("67%", "50%")
CHECKPOINTED = "checkpoint"
PLAN_STEPS = 7  # until there is a plan, and one of its steps has been timed

Attach = Callable[[Llama], AbstractContextManager[Any]]
Records = dict[str, dict[str, Any]]


@contextmanager
def boundary_only(pool: Any, model: Llama) -> Iterator[memswap.saved_tensors]:
    """Checkpoint each layer, and swap what its region keeps: its input."""
    inputs = memswap.saved_tensors(memswap.Policy(memswap.Action.SWAP), pool=pool)
    with recompute(model), around_layers(lambda: inputs, model):
        yield inputs


@contextmanager
def planned(
    bench: Bench, budget: int | str, regions: bool, model: Llama
) -> Iterator[memswap.types.Manager]:
    """Manage the layers under a budget, from the step on in which there is a plan.

    `regions`: whether the plan may recompute layers as well.
    """
    checkpointed = memswap.checkpoint_module(model.layers) if regions else None
    try:
        with memswap.manage(model.layers, pool=bench.pool, budget=budget) as manager:
            for _ in range(PLAN_STEPS):
                bench.step()
                manager.wait_for_plan()
            yield manager
    finally:
        if checkpointed is not None:
            checkpointed.remove()


class LongBench(Bench):
    """A bench whose plain step may find no memory."""

    compared_with = BASELINE

    def deterministic_gradients(self) -> list[torch.Tensor | None]:
        if hasattr(self, "reference"):
            return super().deterministic_gradients()
        try:
            return super().deterministic_gradients()
        except torch.OutOfMemoryError:
            self.model.zero_grad(set_to_none=True)
        self.compared_with = CHECKPOINTED
        with recompute(self.model):
            return super().deterministic_gradients()


def modes_of(bench: Bench) -> dict[str, Attach]:
    """Every mode by name."""
    pin = bench.device.type != "cpu"
    swap = memswap.Policy(memswap.Action.SWAP)
    save_on_cpu = partial(torch.autograd.graph.save_on_cpu, pin_memory=pin)
    modes: dict[str, Attach] = {BASELINE: lambda model: nullcontext(), CHECKPOINTED: recompute}
    if pin:  # on a CPU it copies nothing
        modes["save_on_cpu"] = partial(giving_back, bench, partial(around_layers, save_on_cpu))
    modes |= {
        "boundary only": partial(boundary_only, bench.pool),
        "all swapped": lambda model: memswap.manage(model.layers, swap, pool=bench.pool),
        "memswap auto": partial(planned, bench, "auto", False),
    }
    for share in SHARES:
        modes[f"memswap {share}"] = partial(planned, bench, share, False)
    for share in RECOMPUTE_SHARES:
        modes[f"memswap {share}, may recompute"] = partial(planned, bench, share, True)
    return modes


@contextmanager
def giving_back(bench: Bench, attach: Attach, model: Llama) -> Iterator[Any]:
    """The same, and what torch pinned for it goes back: a host may not have room for all modes."""
    with attach(model) as one:
        yield one
    bench.pool.trim()


def measure(
    bench: LongBench, steps: int, rounds: int, note: Callable[[Records, dict[str, str]], None]
) -> tuple[Records, dict[str, str]]:
    """All modes on one size: what was found, and why the others were not run.

    Args:
        bench: the size.
        steps: timed ones of a block.
        rounds: blocks of each mode.
        note: called after each block.
    """
    device, modes = bench.device, modes_of(bench)
    records: Records = {}
    skipped: dict[str, str] = {}
    for _ in range(rounds):
        for name, attach in list(modes.items()):
            before = pinned_bytes(device)
            record = records.get(name, {})
            kept: list[Any] = []
            try:
                bench.block(remembering(attach, kept), steps, record)
            except (memswap.BudgetError, torch.OutOfMemoryError) as error:
                skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                del modes[name], error
                records.pop(name, None)
                kept.clear()
                bench.model.zero_grad(set_to_none=True)
                note(records, skipped)
                continue
            records[name] = record
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
            kept.clear()
            note(records, skipped)
    return records, skipped


def remembering(attach: Attach, kept: list[Any]) -> Attach:
    """The same, and what it yields is kept."""

    @contextmanager
    def attached(model: Llama) -> Iterator[Any]:
        with attach(model) as one:
            kept.append(one)
            yield one

    return attached


def summarized(records: Records) -> Records:
    """With medians in the place of single steps."""
    plain = records.get(BASELINE)
    plain_s = None if plain is None else summarize(plain["seconds"])["median"]
    found = {}
    for name, record in records.items():
        step_s = summarize(record["seconds"])
        found[name] = {key: value for key, value in record.items() if key != "seconds"}
        found[name]["step_s"] = step_s
        found[name]["exposed_s"] = None if plain_s is None else step_s["median"] - plain_s
    return found


def table(records: Records, skipped: dict[str, str]) -> str:
    """A line per mode, of what `summarized` returns."""
    some = next(iter(records.values()), {})
    plain = records.get(BASELINE)
    memory_keys = [k for k in some if k.endswith("_bytes") and "pinned" not in k]
    rows = []
    for name, record in records.items():
        plan, stats, exposed_s = record.get("plan"), record.get("stats"), record["exposed_s"]
        step_s = record["step_s"]["median"]
        first = memory_keys[0]
        rows.append(
            [
                name,
                f"{step_s * 1e3:.1f}",
                "-" if plain is None else format_ratio(step_s, plain["step_s"]["median"]),
                "-" if exposed_s is None else f"{exposed_s * 1e3:+.1f}",
                "-" if plan is None else f"{plan['exposed_s'] * 1e3:+.1f}",
                *(format_bytes(record[key]) for key in memory_keys),
                "-" if plain is None else format_ratio(record[first], plain[first]),
                "-" if stats is None else format_bytes(stats["peak_resident_bytes"]),
                "-" if plan is None else format_bytes(plan["peak_bytes"]),
                format_bytes(record.get("pinned_bytes", 0)),
                "yes" if record["gradients_equal"] else "NO",
            ]
        )
    header = ["", "step ms", "ratio", "exposed ms", "predicted"]
    header += [f"peak {key.removesuffix('_bytes')}" for key in memory_keys]
    header += ["ratio", "saved, peak", "predicted", "pinned", "gradients equal"]
    for name, reason in skipped.items():
        rows.append([name, reason.split(":")[0], *["-"] * (len(header) - 2)])
    return render_table(header, rows)


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=None, help="default: 2 on a CPU, else 1")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a block")
    parser.add_argument("--rounds", type=int, default=2, help="blocks of each mode")
    parser.add_argument("--sequence", type=int, nargs="+", help="default: by device")
    parser.add_argument("--layers", type=int, help="default: by device")
    parser.add_argument("--host-memory", help="budget for what is swapped, such as 64GiB")
    arguments = parser.parse_args()
    device = chosen_device(arguments.device)
    batch = arguments.batch or (2 if device.type == "cpu" else 1)
    results: list[dict[str, Any]] = []
    failed = False
    configs = SIZES["cpu" if device.type == "cpu" else "accelerator"]
    if arguments.sequence:
        configs = [replace(configs[0], sequence=sequence) for sequence in arguments.sequence]
    if arguments.layers:
        configs = [replace(config, layers=arguments.layers) for config in configs]
    for config in configs:
        bench = LongBench(config, batch, device, arguments.host_memory)
        results.append({"options": {**asdict(config), "batch": batch}})

        def note(
            records: Records,
            skipped: dict[str, str],
            result: dict[str, Any] = results[-1],
            compared_with: str = bench.compared_with,
        ) -> None:
            result |= {
                "gradients_compared_with": compared_with,
                "modes": summarized(records),
                "skipped": skipped,
            }
            content = {"baseline": BASELINE, "sizes": results}
            write_result(arguments.json, device, content, tell=False)

        records, skipped = measure(bench, arguments.steps, arguments.rounds, note)
        print(f"\n{device}: batch {batch}, bf16, {asdict(config)}")
        print(table(summarized(records), skipped))
        for name, reason in skipped.items():
            print(f"{name}: {reason}")
        if bench.compared_with != BASELINE:
            print(f"gradients are compared with those of {bench.compared_with}")
        failed |= any(
            not record["gradients_equal"]
            for name, record in records.items()
            if name not in (CHECKPOINTED, "save_on_cpu")
        )
        del bench
    if arguments.json is not None:
        print(f"written: {arguments.json}")
    if failed:
        raise SystemExit("memswap's gradients are not those of the plain run.")


if __name__ == "__main__":
    main()
