"""Real activations, one tensor per kind: what three small transformers save after some training.

The kinds are those of a GPT block (LayerNorm, GELU, dropout), of a Llama block (RMSNorm, RoPE,
SwiGLU) and of a block with squared ReLU (arXiv:2109.08668), with the softmax written out; gradients
and weights besides. All models train on the text of the demo, so that the numbers have the
distribution of a model that has learnt something.

The ignored types: mypy is told not to follow torch (pyproject.toml), so its Module is Any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from memswap.cli.corpus import Batches, read_corpus
from memswap.cli.gpt import VOCABULARY
from memswap.cli.progress import ProgressBar

HIDDEN = 256
HEADS = 4
SEQUENCE = 256
BATCH = 8
LAYERS = 2
DROPOUT = 0.1
CONTEXT = 2048  # of the causal mask
# Squared ReLU's zeros become more for as long as a model learns: 54 % after 60 steps at the others'
# rate, 65 % after 400. At this one 70 % after 60.
LEARNING_RATES = {"llama": 1e-3, "gpt": 1e-3, "primer": 3e-3}


@dataclass
class Tap:
    """Takes copies of tensors by name, and of their gradients, while it is open.

    Every layer and every step adds to what a name has, up to ``most_bytes``: so the pieces differ,
    and a codec that looks for repetitions finds none but real ones.
    """

    most_bytes: int
    open: bool = False
    taken: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.open:
            self.take(name, tensor)
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(lambda grad: self.take(f"gradient of {name}", grad))
        return tensor

    def take(self, name: str, tensor: torch.Tensor) -> None:
        pieces = self.taken.setdefault(name, [])
        if sum(piece.nbytes for piece in pieces) < self.most_bytes:
            pieces.append(tensor.detach().contiguous().flatten().clone())

    def full(self) -> bool:
        """Whether every name that was seen has all it may have."""
        return all(
            sum(piece.nbytes for piece in pieces) >= self.most_bytes
            for pieces in self.taken.values()
        )

    def joined(self) -> dict[str, torch.Tensor]:
        """The tensors by name, one-dimensional, at most ``most_bytes`` each."""
        return {
            name: torch.cat(pieces)[: self.most_bytes // pieces[0].element_size()]
            for name, pieces in self.taken.items()
        }


def rotate(states: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``[batch, heads, sequence, width]``."""
    half = states.shape[-1] // 2
    steps = torch.arange(states.shape[-2], device=states.device, dtype=torch.float32)
    rates = 10000.0 ** (-torch.arange(half, device=states.device, dtype=torch.float32) / half)
    angles = torch.outer(steps, rates)
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    low, high = states[..., :half], states[..., half:]
    return torch.cat([low * cosine - high * sine, low * sine + high * cosine], dim=-1)


class Attention(nn.Module):  # type: ignore[misc]
    """Multi-head causal attention with every intermediate tapped."""

    def __init__(self, tap: Tap, style: str) -> None:
        super().__init__()
        self.tap, self.style = tap, style
        self.projection = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        future = torch.full((SEQUENCE, SEQUENCE), float("-inf")).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        tap, shape = self.tap, states.shape
        query, key, value = (
            part.view(*shape[:2], HEADS, -1).transpose(1, 2)
            for part in self.projection(states).chunk(3, dim=-1)
        )
        if self.style == "llama":
            query, key = rotate(query), rotate(key)
        query, key, value = tap("q", query), tap("k", key), tap("v", value)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = tap("softmax", (scores + self.future).softmax(-1).to(value.dtype))
        if self.style == "gpt":
            weights = tap("attention dropout", functional.dropout(weights, DROPOUT, self.training))
        mixed = (weights @ value).transpose(1, 2).reshape(shape)
        return self.output(tap("attention output", mixed))


class FeedForward(nn.Module):  # type: ignore[misc]
    """GELU, SwiGLU or squared ReLU."""

    def __init__(self, tap: Tap, style: str) -> None:
        super().__init__()
        self.tap, self.style = tap, style
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.gate = nn.Linear(HIDDEN, 4 * HIDDEN) if style == "llama" else None
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        tap = self.tap
        if self.style == "primer":
            # An accelerator's autocast computes powers in float32.
            squares = functional.relu(self.up(states)).square().to(states.dtype)
            return self.down(tap("ReLU^2", squares))
        if self.gate is None:
            inner = tap("GELU output", functional.gelu(tap("GELU input", self.up(states))))
            dropped = functional.dropout(self.down(inner), DROPOUT, self.training)
            return tap("dropout", dropped)
        gate, up = tap("gate", self.gate(states)), tap("up", self.up(states))
        return self.down(tap("SwiGLU", tap("SiLU", functional.silu(gate)) * up))


class Block(nn.Module):  # type: ignore[misc]
    """One pre-norm block of any style."""

    def __init__(self, tap: Tap, style: str) -> None:
        super().__init__()
        norm = nn.RMSNorm if style == "llama" else nn.LayerNorm
        self.tap = tap
        self.attention_norm, self.feed_forward_norm = norm(HIDDEN), norm(HIDDEN)
        self.attention, self.feed_forward = Attention(tap, style), FeedForward(tap, style)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        tap = self.tap
        states = tap("residual", states)
        lower = torch.get_autocast_dtype(states.device.type)
        states = states + self.attention(tap("norm output", self.attention_norm(states).to(lower)))
        return states + self.feed_forward(self.feed_forward_norm(states).to(lower))


class Model(nn.Module):  # type: ignore[misc]
    """Embedding, blocks, norm and head."""

    def __init__(self, tap: Tap, style: str) -> None:
        super().__init__()
        self.tap = tap
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.ModuleList(Block(tap, style) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.embedding(tokens) + self.positions(places)
        states = states.to(torch.get_autocast_dtype(states.device.type))
        for block in self.blocks:
            states = block(states)
        logits = self.tap("logits", self.head(self.norm(states)))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _train(
    style: str, steps: int, most_bytes: int, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tap = Tap(most_bytes)
    model = Model(tap, style).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATES[style])
    batches = Batches(read_corpus(), BATCH, SEQUENCE, seed)

    def forward_and_backward() -> float:
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = batches.draw(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        return float(loss.detach())

    bar = ProgressBar(f"training ({style})", steps)
    for step in range(steps):
        bar.show(step + 1, f"loss {forward_and_backward():.4f}")
        optimizer.step()
    tap.open = True
    while not tap.full() or not tap.taken:
        forward_and_backward()
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    for matrix in matrices:
        tap.take("weight", matrix.to(torch.bfloat16))
        tap.take("weight gradient", matrix.grad.to(torch.bfloat16))
    return tap.joined()


def capture(
    steps: int,
    most_bytes: int,
    device: torch.device,
    seed: int = 0,
    show: Callable[[str], object] = print,
) -> dict[str, torch.Tensor]:
    """Train the models and return one tensor per kind.

    Args:
        steps: optimizer steps of each model before tensors are taken.
        most_bytes: length of each tensor; what there is less of (weights) is shorter.
        device: where they train and where the tensors are.
        seed: of weights, batches and dropout.
        show: told what is being done.

    Returns:
        One-dimensional tensors by kind, most of them bfloat16; the Llama model's come first, and
        only what it has not got is taken from the others.
    """
    kinds: dict[str, torch.Tensor] = {}
    for style in LEARNING_RATES:
        for name, tensor in _train(style, steps, most_bytes, device, seed).items():
            kinds.setdefault(name, tensor)
    kinds["dropout mask (bool)"] = torch.rand(most_bytes, device=device) >= DROPOUT
    causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool, device=device).tril().flatten()
    kinds["causal mask (bool)"] = causal.repeat(-(-most_bytes // causal.numel()))[:most_bytes]
    kinds["residual upcast (fp32)"] = kinds["residual"][: most_bytes // 4].float()
    text = torch.frombuffer(bytearray(read_corpus(most_bytes // 8)), dtype=torch.uint8)
    kinds["token indices (int64)"] = text.long().to(device)
    show(f"{len(kinds)} kinds of tensors captured")
    return kinds
