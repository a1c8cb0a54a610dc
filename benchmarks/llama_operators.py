"""A Llama-8B's layers, operator by operator: what each reads, makes and saves, and for how long.

The shapes are Llama-3-8B's, and the seconds those of a data sheet (`memswap.planning.cost_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memswap import Action
from memswap.planning.cost_model import Hardware, hardware
from memswap.planning.step import Recipe, Region, SavedStorage, Step

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 4096, 14336, 32, 8
VOCABULARY = 128256
BF16 = 2  # bytes of an element

#: Frames of dense bfloat16: bytes before, by bytes after (docs/format.md).
RATIO = 1.48


@dataclass(frozen=True)
class Operator:
    """One operator of a layer's forward. Names of tensors end with the layer's number."""

    seconds: float
    reads: tuple[str, ...]
    makes: str
    saves: tuple[str, ...]
    backward: float
    """Seconds of its backward, by those of its forward."""
    repeatable: bool = False


@dataclass
class Program:
    """Operators in the order of the forward, and the bytes of what they make."""

    nbytes: dict[str, int] = field(default_factory=dict)
    operators: list[tuple[str, Operator]] = field(default_factory=list)
    card: Hardware = field(default_factory=lambda: hardware("H200"))

    def product(self, unit: str, left: str, inner: int, outer: int, makes: str) -> None:
        """A matrix product with a weight, ``[inner, outer]``: it saves its input."""
        rows = self.nbytes[left] // BF16 // inner
        self.nbytes[makes] = rows * outer * BF16
        seconds = self.card.matmul_s((rows, inner), (inner, outer))
        self.operators.append((unit, Operator(seconds, (left,), makes, (left,), 2.0)))

    def pointwise(
        self, unit: str, reads: Sequence[str], makes: str, saves: Sequence[str], like: str
    ) -> None:
        """An operator that memory bounds, and that a recipe may run again."""
        self.nbytes[makes] = self.nbytes[like]
        moved = sum(self.nbytes[one] for one in reads) + self.nbytes[makes]
        seconds = moved / self.card.memory_bytes_per_s
        operator = Operator(seconds, tuple(reads), makes, tuple(saves), 2.0, True)
        self.operators.append((unit, operator))

    def attention(self, unit: str, reads: Sequence[str], makes: str, length: int) -> None:
        """Fused causal attention: it saves its inputs and its output."""
        self.nbytes[makes] = self.nbytes[reads[0]]
        batch = self.nbytes[makes] // BF16 // HIDDEN // length
        width = HIDDEN // HEADS
        whole = self.card.matmul_s((batch, HEADS, length, width), (batch, HEADS, width, length))
        saves = (*reads, makes)
        self.operators.append((unit, Operator(whole, tuple(reads), makes, saves, 2.5)))


def llama(layers: int, batch: int, length: int, card: Hardware) -> tuple[Program, float]:
    """The layers of a Llama-3-8B, and the seconds between their forward and their backward."""
    program = Program(card=card)
    program.nbytes["h0"] = batch * length * HIDDEN * BF16
    for layer in range(layers):
        unit = f"layers.{layer}"

        def name(tensor: str, layer: int = layer) -> str:
            return f"{tensor}{layer}"

        h, norm = name("h"), name("norm")
        program.pointwise(unit, [h], norm, [h], like=h)
        kv = HIDDEN * KV_HEADS // HEADS
        for tensor, width in (("raw_q", HIDDEN), ("raw_k", kv), ("v", kv)):
            program.product(unit, norm, HIDDEN, width, name(tensor))
        for raw, turned in (("raw_q", "q"), ("raw_k", "k")):  # sine and cosine are buffers
            program.pointwise(unit, [name(raw)], name(turned), [], like=name(raw))
        heads = [name(one) for one in ("q", "k", "v")]
        program.attention(unit, heads, name("mixed"), length)
        program.product(unit, name("mixed"), HIDDEN, HIDDEN, name("out"))
        program.pointwise(unit, [h, name("out")], name("g"), [], like=h)
        program.pointwise(unit, [name("g")], name("normed"), [name("g")], like=h)
        program.product(unit, name("normed"), HIDDEN, FEED_FORWARD, name("gate"))
        program.product(unit, name("normed"), HIDDEN, FEED_FORWARD, name("up"))
        gate, silu, up, act = (name(one) for one in ("gate", "silu", "up", "act"))
        program.pointwise(unit, [gate], silu, [gate], like=gate)
        program.pointwise(unit, [silu, up], act, [silu, up], like=gate)
        program.product(unit, act, FEED_FORWARD, HIDDEN, name("down"))
        program.pointwise(unit, [name("g"), name("down")], f"h{layer + 1}", [], like=h)
    head_s = 3 * card.matmul_s((batch * length, HIDDEN), (HIDDEN, VOCABULARY))
    return program, head_s


class Marks:
    """The marks of a program: what is saved when, who holds it for how long, what is demanded."""

    def __init__(self, program: Program, head_s: float) -> None:
        self.program = program
        self.head_s = head_s
        self.saved: dict[str, int] = {}  # tensor -> storage
        self.units: list[str] = []
        self.gaps: list[float] = []
        self.order: list[int] = []
        self.last_demand: dict[int, int] = {}
        self.held_until: dict[str, int] = {}
        self.tail_s = 0.0
        gap = self._forward()
        self._backward(gap + head_s)

    def _forward(self) -> float:
        gap = 0.0
        for unit, operator in self.program.operators:
            # Autograd saves inputs before an operator runs, and outputs after.
            for tensor in operator.saves:
                if tensor != operator.makes:
                    gap = self._save(unit, tensor, gap)
            gap += operator.seconds
            if operator.makes in operator.saves:
                gap = self._save(unit, operator.makes, gap)
            for tensor in (*operator.reads, operator.makes):
                self.held_until[tensor] = len(self.units)
        return gap

    def _save(self, unit: str, tensor: str, gap: float) -> float:
        if tensor in self.saved:
            return gap
        self.saved[tensor] = len(self.units)
        self.units.append(unit)
        self.gaps.append(gap)
        return 0.0

    def _backward(self, gap: float) -> None:
        saves = len(self.units)
        for _, operator in reversed(self.program.operators):
            for tensor in operator.saves:
                index = self.saved[tensor]
                if index not in self.last_demand:
                    self.order.append(index)
                    self.gaps.append(gap)
                    gap = 0.0
            for tensor in operator.saves:
                self.last_demand[self.saved[tensor]] = saves + len(self.order) - 1
            gap += operator.backward * operator.seconds
        self.tail_s = gap

    def step(self, actions: tuple[Action, ...], regions: bool) -> Step:
        """The step as the planner takes it."""
        makers = {one.makes: one for _, one in self.program.operators}
        ordinals: dict[str, int] = {}
        storages = []
        for tensor, index in self.saved.items():
            unit, nbytes = self.units[index], self.program.nbytes[tensor]
            ordinals[unit] = ordinals.get(unit, -1) + 1
            frame = int(nbytes / RATIO)
            storages.append(
                SavedStorage(
                    unit=unit,
                    ordinal=ordinals[unit],
                    nbytes=nbytes,
                    dtype="torch.bfloat16",
                    actions=actions,
                    frame_nbytes=frame,
                    held_frame_nbytes=frame,
                    held_until=min(self.held_until[tensor], len(self.units)),
                    last_demand=self.last_demand[index],
                    recipe=self._recipe(tensor, makers.get(tensor)),
                )
            )
        names = dict.fromkeys(self.units)
        inputs = {name: (self.saved[f"h{layer}"],) for layer, name in enumerate(names)}
        return Step(
            storages=tuple(storages),
            order=tuple(self.order),
            gaps_s=tuple(self.gaps),
            tail_s=self.tail_s,
            regions=tuple(Region(name, inputs[name]) for name in names) if regions else (),
        )

    def _recipe(self, tensor: str, maker: Operator | None) -> Recipe | None:
        """Only what reads saved tensors, or their recipes, is one."""
        if maker is None or not maker.repeatable:
            return None
        if not all(one in self.saved for one in maker.reads):
            return None
        sources = tuple(self.saved[one] for one in maker.reads)
        return Recipe(f"{tensor} of {' and '.join(maker.reads)}", sources, maker.seconds)
