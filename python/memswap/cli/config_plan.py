"""``python -m memswap plan --config``: what a training takes of a device that is not here.

A prediction: one step of the model is run without weights (meta_step.py), so bytes are those of
its tensors' shapes; seconds are a data sheet's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memswap.cli.meta_step import ACTIVATION, GRADIENT, WORKSPACE, Sizes, measure
from memswap.cli.table import render_table
from memswap.engine.units import format_bytes, parse_bytes
from memswap.optimizers.device_budget import ROOM_SHARE
from memswap.optimizers.managed import MOST_ROOM
from memswap.optimizers.step import PARTS
from memswap.planning.cost_model import EFFICIENCY, GB, GIB, TERA, Hardware, hardware
from memswap.planning.device import KINDS

WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}

#: A desktop's card by NVIDIA's data sheet (Ada; 165 TFLOP/s in 16 bits with float32 sums, 1008
#: GB/s) behind PCIe 4.0 x16 at 0.8 of 31.5 GB/s; the codec at an H100's share of memory's rate.
RTX4090 = Hardware(
    name="RTX4090",
    matmul_flops={torch.bfloat16: 165 * TERA * EFFICIENCY},
    memory_bytes_per_s=1.008 * TERA,
    d2h_bytes_per_s=25 * GB,
    h2d_bytes_per_s=25 * GB,
    duplex_bytes_per_s=20 * GB,
    encode_bytes_per_s=0.27 * TERA,
    decode_bytes_per_s=0.31 * TERA,
)

#: NVIDIA's data sheet (Ada; 362 TFLOP/s in 16 bits, 864 GB/s), behind PCIe 4.0 x16 as `RTX4090`.
L40S = replace(
    RTX4090,
    name="L40S",
    matmul_flops={torch.bfloat16: 362 * TERA * EFFICIENCY},
    memory_bytes_per_s=0.864 * TERA,
)

#: Devices that the cost model of a step's own plans does not know.
CARDS = {one.name: one for one in (L40S, RTX4090)}

#: Bytes of the devices' memory, by their data sheets.
MEMORY = {
    "A2": 64 * GB,
    "A3": 64 * GB,
    "H100": 80 * GB,
    "H200": 141 * GB,
    "L40S": 48 * GIB,
    "RTX4090": 24 * GIB,
}

#: What a training cannot have of a device: context, kernels, the allocator's pieces.
RESERVED = 0.08

#: Shares of the state that are compared.
STATE_SHARES = 16

#: The longest bar, in characters.
BAR = 60


@dataclass(frozen=True)
class Choice:
    """One way to train, and what it takes."""

    name: str
    managed: bool
    """Whether memswap manages the optimizer, whose step goes in chunks then."""
    state_away: int
    activations_away: int
    peak: dict[str, int]
    """Bytes by kind, at the moment of the step with the most of them."""
    moment: str
    compute_s: float
    extra_s: float

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device at a time."""
        return sum(self.peak.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a prediction."""
    group = parser.add_argument_group("a prediction for a device that is not here")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json of a transformers model; --device is a device's name then: "
        + ", ".join(MEMORY),
    )
    group.add_argument("--optimizer", default="adamw", help="of torch.optim, or none")
    group.add_argument(
        "--weights",
        choices=tuple(WEIGHTS),
        default="bf16",
        help="their dtype, and that of gradients and state; fp32 is trained with bf16 autocast",
    )
    group.add_argument("--device-memory", metavar="BYTES", help="such as 24GiB, instead of its own")


def run(arguments: argparse.Namespace) -> int:
    """Print the prediction; return the exit status: 1 where the training does not fit."""
    try:
        device = card(arguments.device)
        memory = MEMORY[device.name]
        if arguments.device_memory is not None:
            memory = parse_bytes(arguments.device_memory, "--device-memory")
        sizes = measure(
            arguments.config,
            arguments.batch,
            arguments.seq,
            arguments.optimizer,
            WEIGHTS[arguments.weights],
        )
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"memswap plan: {error}") from error
    limit = int(memory * (1 - RESERVED))
    tokens = f"{arguments.batch} x {arguments.seq} tokens"
    if sizes.of_images:
        tokens = f"{arguments.batch} image(s)"
    what = (
        f"{sizes.model}, {sizes.parameters / 1e9:.2f} G parameters in {arguments.weights}, "
        f"{arguments.optimizer}, {tokens} a step"
    )
    where = (
        f"{device.name} with {format_bytes(memory)}, of which a training has {format_bytes(limit)} "
        f"({RESERVED:.0%} are left to the driver, kernels and the allocator)"
    )
    best = chosen(sizes, device, limit)
    choices = [without_memswap(sizes, device)]
    if best is not None and best.managed:
        choices.append(best)
    choices.append(least(sizes, device, limit))
    print(describe(what, where, limit, choices))
    print()
    print("\n".join(advice(sizes, device, limit, best)))
    return 0 if best is not None else 1


def card(name: str) -> Hardware:
    """A device by its name, in any case.

    Raises:
        ValueError: its memory is not known.
    """
    if name.upper() in CARDS:
        return CARDS[name.upper()]
    if name.upper() in MEMORY:
        return hardware(name)
    raise ValueError(
        f"--device {name}: with --config, name one of {', '.join(MEMORY)}: the one whose link and "
        "speed are closest; --device-memory 24GiB says how much memory yours has"
    )


# ---------------------------------------------------------------- what is chosen
def without_memswap(sizes: Sizes, device: Hardware) -> Choice:
    """With nothing away, and the optimizer's step as it is."""
    return _choice(sizes, device, "without memswap", None, 0, 0)


def with_memswap(
    sizes: Sizes,
    device: Hardware,
    limit: int,
    state_away: int,
    activations_away: int,
    name: str = "with memswap",
) -> Choice:
    """What a step takes under one number, with so many bytes of state and activations away.

    Args:
        sizes: bytes of what a step has, by kind.
        device: that it is predicted for.
        limit: bytes of the device.
        state_away: bytes of optimizer state that are away between steps.
        activations_away: bytes of saved activations that move.
        name: of the choice, in the table.
    """
    return _choice(sizes, device, name, limit, state_away, activations_away)


def _choice(
    sizes: Sizes,
    device: Hardware,
    name: str,
    limit: int | None,
    state_away: int,
    activations_away: int,
) -> Choice:
    stays = sizes.state_bytes - state_away
    kept = 1 - activations_away / max(1, sizes.activations)
    mark = max(
        range(len(sizes.marks)),
        key=lambda one: (
            sizes.marks[one][GRADIENT]
            + kept * sizes.marks[one][ACTIVATION]
            + sizes.marks[one][WORKSPACE]
        ),
    )
    gradients, activations, workspace = sizes.marks[mark]
    in_pass = (sizes.weights, gradients, stays, int(kept * activations), workspace)
    state, own = sizes.state_bytes, sizes.step_bytes
    if limit is not None:
        state, own = _in_step(sizes, limit, state_away)
    in_step = (sizes.weights, sizes.gradients, state, 0, own)
    moment = "in forward" if mark < sizes.forward_marks else "in backward"
    peak = in_pass
    if sum(in_step) > sum(in_pass):
        moment, peak = "in step()", in_step
    forward_s = sizes.forward_flop / device.matmul_flops[torch.bfloat16]
    extra_s = state_away / device.duplex_bytes_per_s
    extra_s += max(0.0, activations_away / device.d2h_bytes_per_s - forward_s)
    extra_s += max(0.0, activations_away / device.h2d_bytes_per_s - 2 * forward_s)
    return Choice(
        name=name,
        managed=limit is not None,
        state_away=state_away,
        activations_away=activations_away,
        peak=dict(zip(KINDS, peak, strict=True)),
        moment=moment,
        compute_s=3 * forward_s,
        extra_s=extra_s,
    )


def _in_step(sizes: Sizes, limit: int, state_away: int) -> tuple[int, int]:
    """Bytes of state on the device in a managed step(), and of what the step allocates.

    As plans for a device count them: two chunks, and the longest parameter's state once more.
    """
    total = sizes.state_bytes
    if not total:
        return 0, sizes.step_bytes
    room = min(int(limit * ROOM_SHARE), MOST_ROOM)
    pairs = max(sum(sizes.state[at : at + 2]) for at in range(len(sizes.state)))
    chunk = max(room // PARTS, *sizes.state)
    own = int(sizes.step_bytes * min(1.0, chunk / total))
    chunks = max(room, pairs) + max(sizes.state) if state_away else 0
    return min(total, total - state_away + chunks), own


def least(sizes: Sizes, device: Hardware, limit: int) -> Choice:
    """With everything away that can be.

    Args:
        sizes: bytes of what a step has, by kind.
        device: that it is predicted for.
        limit: bytes of the device.
    """
    name = "all away that can be"
    return with_memswap(sizes, device, limit, sizes.state_bytes, sizes.movable(), name)


def chosen(sizes: Sizes, device: Hardware, limit: int) -> Choice | None:
    """The cheapest way to train within so many bytes; None: there is none.

    Args:
        sizes: bytes of what a step has, by kind.
        device: that it is predicted for.
        limit: bytes of the device.
    """
    plain = without_memswap(sizes, device)
    if plain.peak_bytes <= limit:
        return plain
    found = []
    for share in range(STATE_SHARES + 1):
        state_away = sizes.state_bytes * share // STATE_SHARES
        needed = _activations_needed(sizes, limit - sizes.weights - sizes.state_bytes + state_away)
        one = with_memswap(sizes, device, limit, state_away, min(needed, sizes.movable()))
        if one.peak_bytes <= limit:
            found.append(one)
    return min(found, key=lambda one: (one.extra_s, one.peak_bytes), default=None)


def _activations_needed(sizes: Sizes, room: int) -> int:
    """Bytes of activations that have to be away so that forward and backward fit into `room`."""
    share = 0.0
    for gradients, activations, workspace in sizes.marks:
        over = gradients + activations + workspace - room
        if over > 0:
            share = max(share, over / activations if activations else float("inf"))
    if share > 1:
        return sizes.activations + 1
    return min(sizes.activations, int(share * sizes.activations) + (1 if share else 0))


# ---------------------------------------------------------------- in words
def describe(what: str, where: str, limit: int, choices: Sequence[Choice]) -> str:
    """The prediction as a table, with a picture of each choice.

    Args:
        what: is trained, in words.
        where: it is trained, in words.
        limit: bytes of the device.
        choices: rows of the table.
    """
    lines = [
        "A PREDICTION: bytes are those of shapes, seconds those of data sheets. Nothing ran.",
        "",
        what,
        f"on {where}",
        "",
    ]
    rows = [
        [
            one.name,
            one.moment,
            *(format_bytes(one.peak[kind]) for kind in KINDS),
            format_bytes(one.peak_bytes),
            "yes" if one.peak_bytes <= limit else "no",
            f"{one.compute_s:.2f} + {one.extra_s:.2f}",
        ]
        for one in choices
    ]
    head = ["", "peak is", *KINDS, "together", "fits", "computed + extra s"]
    lines += [render_table(head, rows), ""]
    widest = max([limit, *(one.peak_bytes for one in choices)])
    width = max(len(one.name) for one in choices)
    for one in choices:
        lines.append(f"{one.name.ljust(width)} {_bar(one, widest)}".rstrip())
    place = " " * round(limit / widest * BAR)
    lines += [
        f"{' ' * width} {place}^ {format_bytes(limit)}",
        "W weights, G gradients, S optimizer state, A activations, w workspace of operators",
    ]
    return "\n".join(lines)


def _bar(one: Choice, widest: int) -> str:
    """Of one letter for each kind, rounded together, so that the whole is as long as it should."""
    drawn, total = "", 0
    for letter, kind in zip("WGSAw", KINDS, strict=True):
        total += one.peak[kind]
        drawn += letter * (round(total / widest * BAR) - len(drawn))
    return drawn


def advice(sizes: Sizes, device: Hardware, limit: int, best: Choice | None) -> list[str]:
    """Whether it fits, what to write, and what it costs; or what would fit.

    Args:
        sizes: bytes of what a step has, by kind.
        device: that it is predicted for.
        limit: bytes of the device.
        best: what was chosen; None: nothing fits.
    """
    if best is None:
        return [*_does_not_fit(sizes, device, limit), *_what_would(sizes, device, limit)]
    if not best.managed:
        return ["It fits without memswap."]
    optimizer = "optimizer=optimizer, " if sizes.state else ""
    away = []
    if best.state_away:
        away.append(f"{format_bytes(best.state_away)} of optimizer state between steps")
    if best.activations_away:
        away.append(f"{format_bytes(best.activations_away)} of activations in forward and backward")
    slower = best.extra_s / best.compute_s if best.compute_s else 0.0
    where = ["Nothing has to be away: step() goes in chunks, and allocates less for itself."]
    if away:
        where = [
            f"Away, in host memory: {' and '.join(away)}.",
            f"That takes up to {format_bytes(best.state_away + best.activations_away)} of it; by "
            "default a pool takes half of what the machine has left (python -m memswap info), "
            "more with pool=memswap.HostPool(budget=...) or a memswap.DiskPool.",
        ]
    lines = [
        "It fits with memswap. Before training, write:",
        "",
        f'    memswap.manage(model, {optimizer}budget="device:{_gib(limit)}GiB")',
        "",
        *where,
        f"Cost: {best.extra_s:.2f} s beside {best.compute_s:.2f} s of computing, {slower:.0%} more "
        "a step. Of several forwards to a step, the state's part is paid once. No bit of the "
        "result changes.",
    ]
    if without_memswap(replace(sizes, step_bytes=0), device).peak_bytes <= limit:
        lines.append(
            "(Without memswap as well, if the optimizer's step allocates nothing for all "
            "parameters at once: foreach=False, or fused=True where torch has that.)"
        )
    return lines


def _gib(nbytes: int) -> str:
    """In GiB with a digit behind the point, rounded down."""
    return f"{nbytes * 10 // GIB / 10:.1f}"


def _does_not_fit(sizes: Sizes, device: Hardware, limit: int) -> list[str]:
    found = least(sizes, device, limit)
    lines = [
        f"It does not fit: with all away that can be, it takes {format_bytes(found.peak_bytes)}, "
        f"{format_bytes(found.peak_bytes - limit)} more than there are."
    ]
    fixed = sizes.weights + sizes.gradients
    if fixed > limit:
        lines.append(
            f"Weights and gradients alone take {format_bytes(fixed)}, and memswap keeps both on "
            "the device."
        )
    return lines


def _what_would(sizes: Sizes, device: Hardware, limit: int) -> list[str]:
    """What would fit instead, as far as that is known."""
    lines = ["What would:"]
    fitting = [
        batch
        for batch in range(1, sizes.batch)
        if least(sizes.of_batch(batch), device, limit).peak_bytes <= limit
    ]
    if fitting:
        lines.append(f"  --batch {fitting[-1]}, and gradients accumulated over several of them;")
    if sizes.state:
        alone = least(sizes.without_gradients(), device, limit)
        if alone.peak_bytes <= limit and not fitting:
            lines.append(
                "  an optimizer for each parameter, which steps in backward, so that no gradients "
                f"are kept: {format_bytes(alone.peak_bytes)} "
                "(docs/optimizers.md, Without gradients);"
            )
    lines.append("  weights spread over several devices, by memswap.parallel.shard;")
    lines.append("  training fewer of the parameters, as adapters do (LoRA).")
    return lines
