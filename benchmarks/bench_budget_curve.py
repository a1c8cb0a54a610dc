"""How many bytes of a Llama-8B's activations can leave for how much of a step.

The step of layers with Llama-3-8B's shapes is written down operator by operator, with the seconds
of a data sheet, and the planner plans it under one budget after the other, as it does in training.
What a plan costs is what its replay in virtual time says. That is a prediction, the same on every
machine.

`--execute` also trains these layers on the simulated accelerator of tests/simdev, with
placeholders for their operators, under some of the budgets: memswap learns, plans and moves as in
a training, and a step is timed by the simulator's clock, which is the same on every machine too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from common import chosen_device, make_parser, write_result
from llama_operators import Marks, llama

from memswap import Action, BudgetError, Policy
from memswap.cli.table import render_table
from memswap.planning.cost_model import Hardware, hardware
from memswap.planning.planner import make_plan
from memswap.planning.step import Step

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)

#: What a plan may use, by what the table calls it.
SETS: dict[str, tuple[Action, ...]] = {
    "swap": (Action.SWAP,),
    "encode": (Action.ENCODE,),
    "encode, swap": (Action.ENCODE_SWAP,),
    "recompute": (Action.RECOMPUTE,),
    "regions": (),
    "all": (Action.SWAP, Action.ENCODE_SWAP, Action.ENCODE, Action.RECOMPUTE),
}
WITH_REGIONS = ("regions", "all")

#: What is executed as well: these sets, without regions, at these shares. (The simulator's codec is
#: as fast as its memory, so frames alone would say nothing about a card.)
EXECUTED = {"swap": Policy(action=Action.SWAP, min_bytes=1), "all": Policy(min_bytes=1)}
EXECUTED_SHARES = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def curve(step: Step, card: Hardware, shares: Iterable[float]) -> list[dict[str, Any] | None]:
    """For each share of the saved bytes, the plan's peak and its time; None: it cannot be met."""
    found: list[dict[str, Any] | None] = []
    for share in shares:
        try:
            plan = make_plan(step, card.rates(), f"{share:.0%}")
        except BudgetError:
            found.append(None)
            continue
        found.append(
            {
                "budget": share,
                "peak": plan.peak_bytes / plan.kept_peak_bytes,
                "slowdown": plan.slowdown,
                "regions": len(plan.recompute),
            }
        )
    return found


def executions(card: Hardware, marks: Marks) -> list[dict[str, Any]]:
    """Steps of the layers on the simulated accelerator, beside what is predicted for them."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engine"))
    import_module("simulator").start("sim")
    executed = import_module("executed_curve").executed
    rates = replace(card.rates(), copy_latency_s=0.0)  # as the simulator's copies
    found = []
    for name, policy in EXECUTED.items():
        step = marks.step(SETS[name], regions=False)
        for share in EXECUTED_SHARES:
            try:
                predicted = make_plan(step, rates, f"{share:.0%}").slowdown
                ran = executed(chosen_device("sim"), card, marks, policy, f"{share:.0%}")
            except BudgetError:
                continue
            found.append(
                {
                    "set": name,
                    "budget": share,
                    "predicted": predicted,
                    "planned": ran.planned,
                    "executed": ran.slowdown,
                    **asdict(ran),
                }
            )
    return found


def described(one: dict[str, Any]) -> list[str]:
    """A row of the table of what was executed."""
    slower = [f"+{one[name]:.2%}" for name in ("predicted", "planned", "executed")]
    return [one["set"], f"{one['budget']:.0%}", f"{one['peak']:.1%}", *slower]


def main() -> None:
    """Print a table: a row for each budget, a column for each set of actions."""
    parser = make_parser(__doc__)
    parser.add_argument("--card", default="H200", help="hardware of the cost model")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--execute", action="store_true", help="also on the simulator")
    arguments = parser.parse_args()
    card = hardware(arguments.card)
    program, head_s = llama(arguments.layers, arguments.batch, arguments.length, card)
    marks = Marks(program, head_s)
    curves = {
        name: curve(marks.step(actions, name in WITH_REGIONS), card, SHARES)
        for name, actions in SETS.items()
    }
    rows = [
        [
            f"{share:.0%}",
            *(
                "-" if one[place] is None else f"+{one[place]['slowdown']:.1%}"
                for one in curves.values()
            ),
        ]
        for place, share in enumerate(SHARES)
    ]
    step = marks.step((), regions=False)
    print(
        f"Llama-8B, {arguments.layers} layers, {arguments.batch} x {arguments.length} tokens, on "
        f"{card.name} by its data sheet: {step.saved_bytes / 2**30:.1f} GiB saved, "
        f"{step.compute_s * 1e3:.0f} ms a step.\n"
        "How much longer a step is by the plan, for each set of actions; -: cannot be met.\n"
    )
    print(render_table(("budget", *SETS), rows))
    device, ran = chosen_device(arguments.device), None
    if arguments.execute:
        ran = executions(card, marks)
        print(
            "\nExecuted on the simulated accelerator, whose memory and link have the card's rates, "
            "without regions:\n"
        )
        header = ("actions", "budget", "peak", "by the cost model", "by the plan", "executed")
        print(render_table(header, [described(one) for one in ran]))
    result = {
        "card": card.name,
        "layers": arguments.layers,
        "batch": arguments.batch,
        "length": arguments.length,
        "saved_bytes": step.saved_bytes,
        "step_s": step.compute_s,
        "curves": curves,
        "executed": ran,
    }
    write_result(arguments.json, device, result)


if __name__ == "__main__":
    main()
