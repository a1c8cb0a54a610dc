"""``python -m memswap demo``: the same training, plain and managed, compared in every bit."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import memswap
from memswap.cli.arguments import file, folder, whole, write
from memswap.cli.gpt import GPT
from memswap.cli.measure import Difference, differing_gradients
from memswap.cli.model_options import add_model_arguments, check_device
from memswap.cli.plan import Planned
from memswap.cli.report import write_report
from memswap.cli.table import format_ratio, format_seconds, render_table
from memswap.cli.training import LEARNING_STEPS, TrainingConfig, TrainingResult
from memswap.cli.turns import train_in_turns
from memswap.engine.units import format_bytes
from memswap.planning.planner import make_plan

#: Three steps learn, the others follow the plan; the second of those is timed.
PLANNED_STEPS = 6

POLICIES = ("auto", *(action.value for action in memswap.Action))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options."""
    add_model_arguments(parser)
    parser.add_argument("--steps", type=whole(1), default=16, help="of training")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="auto",
        help="of the managed run; auto: recompute and encode on cpu, swap on an accelerator",
    )
    parser.add_argument(
        "--pool-dir", type=Path, help="where the DiskPool's file is made (cpu); swaps by default"
    )
    parser.add_argument(
        "--budget",
        default="80%",
        help="of a third run, which plans: a share of the saved activations, or none; it takes "
        f"{PLANNED_STEPS} steps",
    )
    parser.add_argument(
        "--picture", type=folder, metavar="FOLDER", help="draw a planned step, and write its trace"
    )
    parser.add_argument("--json", type=file, help="write every number to this file as well")


def config_from(arguments: argparse.Namespace) -> TrainingConfig:
    """Turn checked options into the managed run's configuration.

    Raises:
        SystemExit: with a sentence, for options that cannot be run.
    """
    check_device(arguments.device)
    if arguments.pool_dir is not None:
        if arguments.device != "cpu":
            raise SystemExit("memswap demo: --pool-dir needs --device cpu; others swap to RAM.")
        if not arguments.pool_dir.is_dir():
            raise SystemExit(f"memswap demo: --pool-dir {arguments.pool_dir} is not a directory.")
    try:
        with torch.device("meta"):
            GPT(arguments.layers, arguments.hidden, arguments.heads, arguments.seq)
    except ValueError as error:
        raise SystemExit(f"memswap demo: {error}") from None
    return TrainingConfig(
        device=arguments.device,
        steps=arguments.steps,
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        sequence=arguments.seq,
        batch=arguments.batch,
        dtype=arguments.dtype,
        seed=arguments.seed,
        policy=arguments.policy,
        pool_dir=None if arguments.pool_dir is None else str(arguments.pool_dir),
    )


def train_all(configs: Mapping[str, TrainingConfig]) -> dict[str, TrainingResult]:
    """Train all configurations: on a CPU, whose other work comes and goes, a step of each in turn;
    on an accelerator, whose memory is what is scarce, one after the other."""
    if all(takes_turns(config) for config in configs.values()):
        return train_in_turns(configs)
    return {title: train_in_turns({title: one})[title] for title, one in configs.items()}


def takes_turns(config: TrainingConfig) -> bool:
    """Whether all runs live at the same time."""
    return config.device == "cpu"


def steps_table(
    plain: TrainingResult, managed: TrainingResult, differences: Sequence[Difference]
) -> str:
    """One line per step: both losses, and how many of its gradients are identical.

    Args:
        plain: the run without memswap.
        managed: the run with it.
        differences: gradients that are not the same.
    """
    rows = []
    for step, (one, other) in enumerate(zip(plain.losses, managed.losses, strict=True), start=1):
        total = len(plain.gradients[step - 1])
        differing = sum(difference.step == step for difference in differences)
        verdict = "identical" if not differing else "DIFFERENT"
        rows.append(
            [str(step), f"{one:.6f}", f"{other:.6f}", f"{verdict}, {total - differing} of {total}"]
        )
    return render_table(["step", "loss plain", "loss managed", "gradients"], rows)


def cost_table(plain: TrainingResult, runs: Mapping[str, TrainingResult]) -> str:
    """Memory and time of all runs, each with its ratio to the plain one.

    Args:
        plain: without memswap.
        runs: the others, by what they are called.
    """

    def peak(stats: dict[str, Any]) -> int:
        return int(stats["peak_resident_bytes"])

    measured: list[tuple[str, Callable[[TrainingResult], int | None]]] = [
        ("saved activations, when forward ends", lambda run: run.held_bytes),
        ("  peak, with what forward still uses", lambda run: peak(run.stats)),
        ("  peak of the first step, which learns", lambda run: peak(run.first_stats)),
        ("process memory, peak", lambda run: run.peak_process_bytes),
        ("device memory allocated, peak", lambda run: run.peak_device_bytes),
    ]
    rows = []
    for title, value in measured:
        one, others = value(plain), [value(run) for run in runs.values()]
        if one is not None and all(other is not None for other in others):
            found = [
                f"{format_bytes(other)}, {format_ratio(other, one)}"
                for other in others
                if other is not None
            ]
            rows.append([title, format_bytes(one), *found])
    titles = {"step, median": False}
    if len(plain.step_s) > LEARNING_STEPS:
        titles[f"  of steps 2 to {LEARNING_STEPS}, which may learn recipes"] = True
    for title, learning in titles.items():
        found = [
            f"{format_seconds(run.median_step_s(learning))}, {run.step_ratio(plain, learning):.2f}x"
            for run in runs.values()
        ]
        rows.append([title, format_seconds(plain.median_step_s(learning)), *found])
    same = [
        "not identical" if differing_gradients(plain.gradients, run.gradients) else "identical"
        for run in runs.values()
    ]
    rows.append(["gradients, every bit", "", *same])
    return render_table(["", "plain", *runs], rows)


def account_table(stats: dict[str, Any]) -> str:
    """What became of every tensor that autograd offered in the managed run."""

    def line(title: str, tensors: int, size_bytes: int) -> list[str]:
        return [title, str(tensors), format_bytes(size_bytes)]

    rows = [
        line("offered by autograd", stats["offered_tensors"], stats["offered_bytes"]),
        line(
            "  deduplicated: storage known already",
            stats["deduplicated_tensors"],
            stats["deduplicated_bytes"],
        ),
    ]
    for reason, count in sorted(stats["kept"].items()):
        rows.append(line(f"  kept: {reason}", count["tensors"], count["bytes"]))
    rows.append(line("  moved away (storages)", stats["moved_storages"], stats["moved_bytes"]))
    if stats.get("recipe_storages"):
        rows.append(
            line("    of these, as recipes", stats["recipe_storages"], stats["recipe_bytes"])
        )
    if stats["encoded_storages"]:
        ratio = format_ratio(stats["encoded_bytes"], stats["frame_bytes"])
        rows += [
            line("    of these, encoded", stats["encoded_storages"], stats["encoded_bytes"]),
            [f"      their frames, ratio {ratio}", "", format_bytes(stats["frame_bytes"])],
        ]
    rows += [
        line("brought back (storages)", stats["returned_storages"], stats["returned_bytes"]),
        ["really freed on the device", "", format_bytes(stats["freed_bytes"])],
        ["in the pool at once, peak", "", format_bytes(stats["peak_away_bytes"])],
    ]
    return render_table(["managed run, steps after those that learn", "tensors", "bytes"], rows)


def as_json(
    config: TrainingConfig,
    plain: TrainingResult,
    managed: TrainingResult,
    runs: Mapping[str, TrainingResult],
    differences: Sequence[Difference],
) -> dict[str, Any]:
    """Everything the tables show and the fingerprints behind the verdict.

    Args:
        config: of all runs.
        plain: the run without memswap.
        managed: the run with it that the verdict is about.
        runs: all of them, by name.
        differences: gradients that are not the same.
    """
    return {
        "memswap": memswap.__version__,
        "torch": torch.__version__,
        "config": asdict(config),
        "identical": not differences,
        "differences": [difference._asdict() for difference in differences],
        "step_time_ratio": managed.step_ratio(plain),
        "plain": {**asdict(plain), "median_step_s": plain.median_step_s()},
        "managed": {**asdict(managed), "median_step_s": managed.median_step_s()},
        "runs": {
            name: {**asdict(run), "median_step_s": run.median_step_s()}
            for name, run in runs.items()
        },
    }


def recomputes_by_default(config: TrainingConfig) -> bool:
    """Whether the managed run recomputes, so that frames alone are worth a run of their own."""
    return config.policy == "auto" and config.device == "cpu" and config.pool_dir is None


def share_of(budget: str) -> float | None:
    """The share that ``--budget`` names; None for none.

    Raises:
        SystemExit: with a sentence, for anything else.
    """
    if budget == "none":
        return None
    try:
        share = float(budget.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not budget.endswith("%") or not 0 < share <= 1:
        raise SystemExit(
            f"memswap demo: --budget is a share such as 80%, or none; found {budget!r}. "
            "(python -m memswap plan takes bytes.)"
        )
    return share


def show_plan(
    config: TrainingConfig, plain: TrainingResult, share: float, picture: Path | None
) -> list[Difference] | None:
    """Train a few steps under a budget, and show the plan.

    What differs from the plain run; None where there is no plan, and nothing to compare.

    Args:
        config: of the plain run.
        plain: the run without memswap.
        share: of its saved activations that the budget is.
        picture: folder for a report; None: none is written.
    """
    budget = int(share * plain.stats["peak_resident_bytes"])
    under = replace(config, budget=budget, steps=PLANNED_STEPS)
    title = f"budget {share:.0%}"
    try:
        planned = train_all({title: under})[title]
    except memswap.BudgetError as error:
        print(f"\nno plan: {error}")
        return None
    print(f"\nthe same under a budget of {share:.0%} of the plain run's saved activations:\n")
    print(planned.plan)
    if picture is not None and planned.learnt is not None:
        step, rates = planned.learnt
        made = Planned(make_plan(step, rates, budget, at_least=True), step, rates)
        print("written: " + ", ".join(map(str, write_report(made, picture))))
    return differing_gradients(plain.gradients[:PLANNED_STEPS], planned.gradients)


def run(arguments: argparse.Namespace) -> int:
    """Train all runs, print the tables and return the exit status: 0 only if nothing differs."""
    config = config_from(arguments)
    share = share_of(arguments.budget)
    print(
        f"memswap {memswap.__version__}, torch {torch.__version__}, {config.device}: a byte-level "
        f"GPT of {config.layers} layers, hidden {config.hidden}, {config.heads} heads, trained on "
        f"{config.batch} x {config.sequence} bytes of Python's standard library per step, "
        f"{config.dtype}, seed {config.seed}",
        flush=True,
    )
    managed_title = "managed"
    configs = {"plain": replace(config, policy=None)}
    if recomputes_by_default(config):
        configs["frames"] = replace(config, policy="encode")
        managed_title = "recipes, frames"
    runs = train_all({**configs, managed_title: config})
    plain, managed = runs.pop("plain"), runs[managed_title]
    differences = [
        one for run in runs.values() for one in differing_gradients(plain.gradients, run.gradients)
    ]
    if arguments.json is not None:
        content = json.dumps(as_json(config, plain, managed, runs, differences), indent=1)
        write(arguments.json, content)

    stats = managed.stats
    print("\n" + steps_table(plain, managed, differences))
    print("\n" + cost_table(plain, runs))
    print("\n" + account_table(stats))
    if stats["moved_storages"]:
        print(f"\naway form: {managed.away_form}", end="")
    turns = ", and took\nits steps in turn with the others" if takes_turns(config) else ""
    print(
        f"\nreturned when backward asked, not ahead of it: {stats['stalls']}; host time waiting: "
        f"{format_seconds(stats['exposed_wait_s'])}\n"
        "Saved activations are those of the managed layers, frames on the device included; the "
        "plain run's were\ncounted in one more step, untimed, in which memswap looked on and kept "
        "everything. Each run was\na process of its own, with MALLOC_MMAP_THRESHOLD_ set so that "
        f"freed memory leaves it{turns}."
    )
    compared = len(runs) * sum(map(len, plain.gradients))
    if share is not None and config.steps >= PLANNED_STEPS and config.policy != "keep":
        planned = show_plan(config, plain, share, arguments.picture)
        if planned is not None:
            differences += planned
            compared += sum(map(len, plain.gradients[:PLANNED_STEPS]))
    elif arguments.picture is not None:
        print(
            f"\nno picture: nothing was planned (--steps {config.steps}, --budget "
            f"{arguments.budget}, --policy {config.policy}); a plan takes {PLANNED_STEPS} steps"
        )
    if differences:
        print(f"\nDIFFERENT: {len(differences)} of {compared} gradients are not identical:")
        for difference in differences[:10]:
            print(f"  step {difference.step}: {difference.name}")
        return 1
    print(f"\nIDENTICAL: all {compared} gradients of {config.steps} steps agree in every bit.")
    sys.stdout.flush()
    return 0
