"""What fits on a device under one number, and what a step costs: Llama-8B, by the cost model.

Nothing is run: bytes are those of the model's shapes, seconds those of data sheets, and plans are
made as in training, so the same commit gives the same numbers on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from common import chosen_device, make_parser, write_result

from memswap import Action
from memswap._native import native
from memswap.cli.config_plan import L40S, RESERVED, RTX4090
from memswap.cli.table import render_table
from memswap.engine.units import format_bytes
from memswap.optimizers.managed import MOST_ROOM
from memswap.planning.cost_model import GB, GIB, H100, Hardware
from memswap.planning.device import (
    DevicePlan,
    DeviceTerms,
    StateTerms,
    plan_for_device,
    smallest_of_device,
)
from memswap.planning.step import SavedStorage, Step

DEVICES: tuple[tuple[Hardware, int], ...] = (
    (RTX4090, 24 * GIB),
    (L40S, 48 * GIB),
    (H100, 80 * GB),
)

LAYERS, WIDTH, INNER, KEYS, VOCABULARY = 32, 4096, 14336, 1024, 128256
ITEM = 2  # bytes of bfloat16, of weights, gradients, both moments of AdamW and activations

#: Parameters of a block, matrix by matrix, and of the whole model (norms left out: 0.003 %).
BLOCK = (WIDTH * WIDTH, WIDTH * KEYS, WIDTH * KEYS, WIDTH * WIDTH, *(3 * (WIDTH * INNER,)))
ENDS = (VOCABULARY * WIDTH, VOCABULARY * WIDTH)
PARAMETERS = (ENDS[0], *(LAYERS * BLOCK), ENDS[1])


@dataclass(frozen=True)
class Training:
    """What is trained."""

    name: str
    trained: float
    """Share of the parameters that have gradients and state."""


TRAININGS = (Training("full", 1.0), Training("LoRA", 0.005))

#: What a block saves with a fused norm and fused attention: elements a token, and the products
#: (multiplications a token) that are done before it is saved. Attention's own come on top.
SAVED: tuple[tuple[str, int, int], ...] = (
    ("norm", WIDTH, 0),
    ("queries", WIDTH, WIDTH * WIDTH),
    ("keys", KEYS, WIDTH * KEYS),
    ("values", KEYS, WIDTH * KEYS),
    ("attended", WIDTH, 0),
    ("residual", WIDTH, WIDTH * WIDTH),
    ("norm 2", WIDTH, 0),
    ("gate", INNER, WIDTH * INNER),
    ("up", INNER, WIDTH * INNER),
    ("activated", INNER, 0),
    ("product", INNER, 0),
    ("output", WIDTH, INNER * WIDTH),
)


def step_of(
    device: Hardware, training: Training, tokens: int
) -> tuple[Step, native.WorkspaceRecord]:
    """Forward and backward of one sequence, with everything else that is on the device."""
    flops = device.matmul_flops[torch.bfloat16]
    count = LAYERS * len(SAVED)
    weights = ITEM * sum(PARAMETERS)
    gradients = round(training.trained * weights)
    passing = 2 * ITEM * INNER * tokens  # gradients of the two longest activations
    logits = (ITEM + 4 + 4) * VOCABULARY * tokens  # as they are, as float32, and their gradient
    storages, forward_s = [], []
    for index in range(count):
        unit, ordinal = divmod(index, len(SAVED))
        name, width, products = SAVED[ordinal]
        flop = 2 * products * tokens
        if name == "attended":
            flop += 2 * tokens * tokens * WIDTH  # causal: a half of both products
        elements_s = 3 * ITEM * width * tokens / device.memory_bytes_per_s
        forward_s.append(max(flop / flops, elements_s))
        storages.append(
            SavedStorage(
                unit=f"layers.{unit}",
                ordinal=ordinal,
                nbytes=ITEM * width * tokens,
                dtype="torch.bfloat16",
                actions=(Action.SWAP,),
                held_until=min(index + 2, count),
                last_demand=2 * count - 1 - index,
            )
        )
    head_s = 2 * ENDS[1] * tokens / flops
    extra, growing = [], []
    for mark in range(2 * count):
        back = max(mark - count, 0) / count
        growing.append(round(gradients * back))
        turn = logits if mark == count - 1 else 0
        extra.append(weights + growing[-1] + passing + turn)
    backward_s = [head_s * 3, *(2 * seconds for seconds in reversed(forward_s))][:count]
    step = Step(
        storages=tuple(storages),
        order=tuple(reversed(range(count))),
        gaps_s=(*forward_s, *backward_s),
        tail_s=2 * forward_s[0],
        extra_nbytes=tuple(extra),
    )
    return step, native.WorkspaceRecord(tuple(extra), tuple(growing), extra[0])


def planned(device: Hardware, memory: int, training: Training, tokens: int) -> dict[str, Any]:
    """One line of the table."""
    step, workspace = step_of(device, training, tokens)
    weights = ITEM * sum(PARAMETERS)
    gradients = round(training.trained * weights)
    sizes = tuple(round(2 * ITEM * training.trained * one) for one in PARAMETERS)
    budget = int(memory * (1 - RESERVED))
    room = min(MOST_ROOM, sum(sizes))
    longest = max(sum(sizes[place : place + 3]) for place in range(len(sizes)))
    chunks = max(room, longest)
    state = StateTerms(sizes, weights + gradients + 2 * chunks, chunks)
    terms = DeviceTerms(budget, weights, gradients, state)
    plan: DevicePlan = plan_for_device(
        step, device.rates(), f"device:{budget}B", terms, workspace, 1, None, (), inf
    )
    plain = max(plan.kept_peak_bytes, weights + 2 * gradients) + sum(sizes)
    smallest, where = smallest_of_device(terms, plan, 1)
    return {
        "device": device.name,
        "memory_bytes": memory,
        "budget_bytes": budget,
        "training": training.name,
        "tokens": tokens,
        "plain_peak_bytes": plain,
        "plain_fits": plain <= budget,
        "fits": smallest <= budget,
        "smallest_budget_bytes": smallest,
        "smallest_is_of": where,
        "peak_bytes": plan.device_peak_bytes,
        "peak_by_kind": dict(plan.peak_by_kind),
        "state_bytes": plan.state_bytes,
        "state_away_bytes": plan.state_bytes - plan.state_stays_bytes,
        "activations_away_bytes": plan.moved_bytes,
        "compute_s": step.compute_s,
        "activations_cost_s": plan.exposed_s,
        "state_cost_s": plan.state_s,
    }


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="of a step")
    arguments = parser.parse_args()
    found = [
        planned(device, memory, training, tokens)
        for training in TRAININGS
        for device, memory in DEVICES
        for tokens in arguments.tokens
    ]
    rows = []
    for one in found:
        fits = one["fits"]
        cost_s = one["activations_cost_s"] + one["state_cost_s"]
        away = [format_bytes(one[f"{kind}_away_bytes"]) for kind in ("state", "activations")]
        rows.append(
            (
                f"{one['device']}, {format_bytes(one['memory_bytes'])}",
                one["training"],
                str(one["tokens"]),
                format_bytes(one["plain_peak_bytes"]) + (", fits" if one["plain_fits"] else ""),
                "yes" if fits else f"needs {format_bytes(one['smallest_budget_bytes'])}",
                *(away if fits else ("-", "-")),
                f"{one['compute_s']:.2f} + {cost_s:.2f} s" if fits else "-",
            )
        )
    head = ("device", "training", "tokens", "plain", "fits", "state away", "saved away", "a step")
    print(render_table(head, rows))
    write_result(arguments.json, chosen_device(arguments.device), {"device": found})


if __name__ == "__main__":
    main()
