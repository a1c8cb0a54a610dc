"""How long planning takes: layers that each save some storages, under a budget, on no device.

Planning runs beside training, on a thread of its own, so that this is no time of a step. It is how
long a new plan is in the making.
"""

from __future__ import annotations

import time
from statistics import median

from common import chosen_device, make_parser, write_result

from memswap import Action, Rates
from memswap.cli.table import render_table
from memswap.planning.planner import make_plan
from memswap.planning.step import Region, SavedStorage, Step

ACTIONS = (Action.SWAP, Action.ENCODE_SWAP, Action.ENCODE)

#: A GPU behind PCIe 5.0: memswap's own figures of an H100 (planning/cost_model.py).
RATES = Rates("H100", 52.8e9, 55.6e9, 45e9, 45e9, 0.9e12, 1.05e12)


def step_of(layers: int, storages: int, regions: bool, encodes: bool) -> Step:
    """A stack whose layers save 16 MiB storages and take 4 ms forward, 8 ms backward.

    Each layer is called with what the layer before saved last.
    """
    count = layers * storages
    saved = []
    for index in range(count):
        unit, ordinal = divmod(index, storages)
        nbytes = (16 << 20) * (1 + ordinal % 3)
        saved.append(
            SavedStorage(
                unit=f"layers.{unit}",
                ordinal=ordinal,
                nbytes=nbytes,
                dtype="torch.bfloat16",
                actions=ACTIONS if encodes else ACTIONS[:1],
                frame_nbytes=nbytes * 2 // 3,
                held_frame_nbytes=nbytes * 7 // 10,
                held_until=min(index + 2, count),
                last_demand=2 * count - 1 - index,
            )
        )
    inputs = [(unit * storages - 1,) if unit else () for unit in range(layers)]
    return Step(
        storages=tuple(saved),
        order=tuple(reversed(range(count))),
        gaps_s=(4e-3 / storages,) * count + (8e-3 / storages,) * count,
        regions=tuple(
            Region(f"layers.{unit}", known, 0 if known else 16 << 20)
            for unit, known in enumerate(inputs)
        )
        if regions
        else (),
    )


def seconds(step: Step, budget: int | str, rounds: int) -> float:
    """Median seconds of planning once."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        make_plan(step, RATES, budget, at_least=True)
        times.append(time.perf_counter() - began)
    return median(times)


def main() -> None:
    """Print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--storages", type=int, default=16, help="of each layer")
    parser.add_argument("--budgets", nargs="+", default=["70%", "40%", "10%", "auto"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found = []
    for layers in arguments.layers:
        for regions in (False, True):
            for encodes in (False, True):
                step = step_of(layers, arguments.storages, regions, encodes)
                for budget in arguments.budgets:
                    if budget == "auto" and regions:
                        continue  # "auto" recomputes nothing
                    found.append(
                        {
                            "layers": layers,
                            "storages": arguments.storages,
                            "may_recompute": regions,
                            "encodes": encodes,
                            "budget": budget,
                            "planning_s": seconds(step, budget, arguments.rounds),
                        }
                    )
    rows = [
        (
            f"{one['layers']} x {one['storages']}",
            "regions" if one["may_recompute"] else "-",
            "swap, encode" if one["encodes"] else "swap",
            str(one["budget"]),
            f"{one['planning_s']:.3f} s",
        )
        for one in found
    ]
    print(render_table(("storages", "may recompute", "actions", "budget", "planning"), rows))
    write_result(arguments.json, chosen_device(arguments.device), {"planning": found})


if __name__ == "__main__":
    main()
