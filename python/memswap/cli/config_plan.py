"""``python -m memswap plan --config``: what a training takes of a device that is not here.

A prediction: the model of a transformers configuration is made on the meta device, without weights,
and run once there, so bytes are those of its tensors' shapes; seconds are a data sheet's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

from memswap.cli.table import render_table
from memswap.engine.units import format_bytes, parse_bytes
from memswap.optimizers import LEAST_ROOM, MOST_ROOM, ROOM_SHARE
from memswap.planning.cost_model import EFFICIENCY, GB, GIB, TERA, Hardware, hardware

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

#: Bytes of the devices' memory, by their data sheets.
MEMORY = {"A2": 64 * GB, "A3": 64 * GB, "H100": 80 * GB, "H200": 141 * GB, "RTX4090": 24 * GIB}

#: What a training cannot have of a device: context, kernels, the allocator's pieces.
RESERVED = 0.08

KINDS = ("weights", "gradients", "optimizer state", "activations", "workspace")


@dataclass(frozen=True)
class Sizes:
    """What one step of a model has, as bytes and operations."""

    model: str
    parameters: int
    weights: int
    gradients: int
    state: int
    activations: int
    """Saved for backward, each storage once."""
    workspace: int
    """The longest of these once more: its gradient."""
    layers: int
    forward_flop: float

    def movable(self) -> int:
        """Bytes of activations that can be away: all layers' but two."""
        return int(self.activations * max(0, self.layers - 2) / self.layers)


@dataclass(frozen=True)
class Choice:
    """One way to train, and what it takes."""

    state_away: bool
    activations_away: int
    room: int
    peak: dict[str, int]
    """Bytes by kind, at the moment of the step with the most of them."""
    moment: str
    compute_s: float
    extra_s: float

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device at a time."""
        return sum(self.peak.values())

    @property
    def name(self) -> str:
        """In words."""
        away = ["state"] if self.state_away else []
        if self.activations_away:
            away.append(f"{format_bytes(self.activations_away)} of activations")
        return " and ".join(away) + " away" if away else "without memswap"


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
    group.add_argument("--weights", choices=tuple(WEIGHTS), default="bf16", help="their dtype")
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
    choices = choices_of(sizes, device, limit)
    fitting = [one for one in choices if one.peak_bytes <= limit]
    best = min(fitting, key=lambda one: (one.extra_s, one.peak_bytes), default=None)
    print(describe(sizes, device, memory, limit, choices, best))
    return 0 if best is not None else 1


def card(name: str) -> Hardware:
    """A device by its name, in any case.

    Raises:
        ValueError: its memory is not known.
    """
    if name.upper() == RTX4090.name:
        return RTX4090
    if name.upper() in MEMORY:
        return hardware(name)
    raise ValueError(
        f"--device {name}: with --config, name one of {', '.join(MEMORY)}; --device-memory changes "
        "how much it has"
    )


# ---------------------------------------------------------------- sizes, on the meta device
class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Saves what a fused attention does: its inputs, its output and a number for each row."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError("a model on the meta device runs forward alone")


def measure(config: Path, batch: int, length: int, optimizer: str, weights: torch.dtype) -> Sizes:
    """Bytes and operations of a step of a transformers configuration.

    Args:
        config: its config.json.
        batch: samples of a step.
        length: tokens of each; images have their own.
        optimizer: a class of torch.optim, in any case, or "none".
        weights: dtype of weights and gradients. Activations are bfloat16.

    Raises:
        ImportError: transformers is not installed.
        ValueError: there is no such optimizer, or the model cannot be run on the meta device.
        OSError: the file cannot be read.
    """
    model = _on_meta(config)
    attention_flop = _register_attention(causal="CausalLM" in type(model).__name__)
    model.set_attn_implementation("memswap_plan")
    inputs = _inputs(model, batch, length)
    from torch.utils.flop_counter import FlopCounterMode

    owned = {one.untyped_storage()._cdata for one in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in owned:
            saved.setdefault(key, tensor)
        return tensor

    counter = FlopCounterMode(display=False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), counter:
            _loss(model(**inputs), saved, pack)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be run without weights, on the meta device: "
            f"{str(error).splitlines()[0]}"
        ) from error
    nbytes = [one.untyped_storage().nbytes() for one in saved.values()]
    elements = sum(one.numel() for one in model.parameters())
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return Sizes(
        model=type(model).__name__,
        parameters=elements,
        weights=elements * weights.itemsize,
        gradients=trained * weights.itemsize,
        state=_state_bytes(model, optimizer, weights),
        activations=sum(nbytes),
        workspace=max(nbytes, default=0),
        layers=max(1, getattr(model.config, "num_hidden_layers", 1)),
        forward_flop=counter.get_total_flops() + sum(attention_flop),
    )


def _on_meta(path: Path) -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ImportError("--config needs transformers: pip install transformers") from error
    transformers.utils.logging.set_verbosity_error()
    text = json.loads(path.read_text("utf-8"))
    config = transformers.AutoConfig.for_model(**text)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    with torch.device("meta"):
        if kind is None:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        else:
            model = kind._from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    return model.train()


def _register_attention(causal: bool) -> list[int]:
    """Makes `memswap_plan` an attention of transformers'; where its operations are counted."""
    modeling: Any = import_module("transformers.modeling_utils")
    flop: list[int] = []

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        batch, heads, rows, width = q.shape
        whole = 2 * batch * heads * rows * k.shape[-2] * (width + v.shape[-1])
        flop.append(whole // 2 if causal else whole)
        return _Attention.apply(q, k, v), None

    modeling.ALL_ATTENTION_FUNCTIONS.register("memswap_plan", attend)
    return flop


def _inputs(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    config = model.config
    if model.main_input_name == "pixel_values":
        side = config.image_size
        size = (batch, config.num_channels, side, side)
        return {"pixel_values": torch.zeros(size, dtype=torch.bfloat16, device="meta")}
    longest = getattr(config, "max_position_embeddings", length)
    if length > longest:
        raise ValueError(f"--seq {length}: {type(model).__name__} has positions for {longest}")
    return {"input_ids": torch.zeros(batch, length, dtype=torch.long, device="meta")}


def _loss(out: Any, saved: dict[int, torch.Tensor], pack: Any) -> None:
    """The usual loss keeps the logits once more, in float32."""
    logits = getattr(out, "logits", None)
    if logits is not None:
        pack(logits.new_empty(logits.shape, dtype=torch.float32))


def _state_bytes(model: Any, name: str, weights: torch.dtype) -> int:
    """What an optimizer keeps, of a step with it on the meta device."""
    if name.lower() == "none":
        return 0
    kinds = {key.lower(): one for key, one in vars(torch.optim).items() if isinstance(one, type)}
    kind = kinds.get(name.lower())
    if kind is None or kind is torch.optim.Optimizer or not issubclass(kind, torch.optim.Optimizer):
        raise ValueError(f"--optimizer {name}: torch.optim has none of that name")
    parameters = [
        torch.empty(one.shape, dtype=weights, device="meta", requires_grad=True)
        for one in model.parameters()
        if one.requires_grad
    ]
    for one in parameters:
        one.grad = torch.empty_like(one)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    try:
        optimizer = kind(parameters, **options)
        optimizer.step()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"--optimizer {name}: {str(error).splitlines()[0]}") from error
    return sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    )


# ---------------------------------------------------------------- what is chosen
def choices_of(sizes: Sizes, device: Hardware, limit: int) -> list[Choice]:
    """Without memswap; the state away; and of each, as many activations away as are needed."""
    found = []
    for state_away, some_away in product((False, True), (False, True)):
        plain = _choice(sizes, device, state_away, 0)
        if not some_away:
            found.append(plain)
            continue
        needed = min(max(0, plain.peak_bytes - limit), sizes.movable())
        moved = _choice(sizes, device, state_away, needed)
        if moved.peak_bytes < plain.peak_bytes:
            found.append(moved)
    return found


def _choice(sizes: Sizes, device: Hardware, state_away: bool, activations_away: int) -> Choice:
    room = min(max(int(sizes.state * ROOM_SHARE), LEAST_ROOM), MOST_ROOM, sizes.state)
    state = 0 if state_away else sizes.state
    kept = sizes.activations - activations_away
    moments = {
        "where backward begins": (sizes.weights, 0, state, kept, sizes.workspace),
        "where backward ends": (sizes.weights, sizes.gradients, state, 0, 0),
        "in step()": (sizes.weights, sizes.gradients, room if state_away else state, 0, 0),
    }
    moment = max(moments, key=lambda name: sum(moments[name]))
    forward_s = sizes.forward_flop / device.matmul_flops[torch.bfloat16]
    extra_s = sizes.state / device.duplex_bytes_per_s if state_away else 0.0
    extra_s += max(0.0, activations_away / device.d2h_bytes_per_s - forward_s)
    extra_s += max(0.0, activations_away / device.h2d_bytes_per_s - 2 * forward_s)
    peak = dict(zip(KINDS, moments[moment], strict=True))
    return Choice(state_away, activations_away, room, peak, moment, 3 * forward_s, extra_s)


# ---------------------------------------------------------------- in words
def describe(
    sizes: Sizes,
    device: Hardware,
    memory: int,
    limit: int,
    choices: Sequence[Choice],
    best: Choice | None,
) -> str:
    """The prediction as a page of text, with a picture of each choice."""
    lines = [
        "A PREDICTION: bytes of shapes on the meta device, seconds of data sheets. Nothing ran.",
        "",
        f"{sizes.model}, {sizes.parameters / 1e9:.2f} G parameters, on {device.name} with "
        f"{format_bytes(memory)}, of which a training has {format_bytes(limit)}",
        "",
    ]
    rows = [
        [
            one.name,
            *(format_bytes(one.peak[kind]) for kind in KINDS),
            format_bytes(one.peak_bytes),
            "yes" if one.peak_bytes <= limit else "no",
            f"{one.compute_s:.2f} + {one.extra_s:.2f}",
        ]
        for one in choices
    ]
    head = ["at the peak", *KINDS, "together", "fits", "s a step"]
    lines += [render_table(head, rows), ""]
    widest = max([limit, *(one.peak_bytes for one in choices)])
    for one in choices:
        lines.append(f"{_bar(one, widest)}  {one.name} ({one.moment})")
    mark = " " * round(limit / widest * 50) + "^"
    lines += [
        f"{mark} {format_bytes(limit)}",
        "W weights, G gradients, S state, A activations, w workspace",
    ]
    lines.append("")
    if best is None:
        lines.append(
            "It does not fit, whatever is away: fewer samples, or weights that are sharded."
        )
    elif not best.state_away and not best.activations_away:
        lines.append("It fits without memswap.")
    else:
        lines.append(f"Chosen: {best.name}, {best.extra_s:.2f} s a step more.")
        if best.state_away:
            lines.append(f'    memswap.manage_optimizer(optimizer, room="{best.room >> 20}MiB")')
        if best.activations_away:
            stays = sizes.activations - best.activations_away
            lines.append(f'    memswap.manage(model, budget="{stays >> 20}MiB")')
    return "\n".join(lines)


def _bar(one: Choice, widest: int) -> str:
    letters = "WGSAw"
    drawn = "".join(
        letter * round(one.peak[kind] / widest * 50)
        for letter, kind in zip(letters, KINDS, strict=True)
    )
    return drawn.ljust(52)
