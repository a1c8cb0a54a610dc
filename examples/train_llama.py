"""Train a small Llama-style model with sharded weights, managed activations and checkpointing.

    python examples/train_llama.py
    torchrun --nproc-per-node 4 examples/train_llama.py --shard --manage --checkpoint 2

Each option may be combined with each other one, on any number of ranks that divides the batch: the
printed losses are those of one process without any of them.
"""

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import memswap


@dataclass(frozen=True)
class Config:
    """The model, the data, and what memswap does."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 256
    length: int = 64
    batch: int = 4
    steps: int = 4
    dtype: str = "float32"
    shard: bool = False
    """Shard weights over the ranks."""
    slots: int = 2
    """Layers whose weights may be gathered at once."""
    manage: bool = False
    """Move saved activations, as suits the device."""
    checkpoint: int = 0
    """Layers, from the first, that are recomputed in backward."""


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer heads of keys and values than of queries."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.wq = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(config.width, config.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        def split(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, self.size)).transpose(1, 2)

        q, k, v = rotate(split(self.wq(x)), angles), rotate(split(self.wk(x)), angles), self.wv(x)
        out = F.scaled_dot_product_attention(q, k, split(v), is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of channels, turned by ``angles`` [length, channels / 2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, 3 * config.width, bias=False)
        self.up = nn.Linear(config.width, 3 * config.width, bias=False)
        self.down = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        size = config.width // config.heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        positions = torch.arange(config.length)
        self.register_buffer("angles", positions[:, None] * frequencies, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))


def train(config: Config, device: torch.device, mesh: DeviceMesh | None) -> list[float]:
    """The loss of each step, the same on every rank."""
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)
    if config.batch % ranks:
        raise SystemExit(f"found {ranks} ranks for a batch of {config.batch}; expected a divisor")
    if ranks > 1 and not config.shard:
        raise SystemExit(f"found {ranks} ranks; expected --shard, or one process")
    torch.manual_seed(0)
    model = Llama(config).to(device, getattr(torch, config.dtype))
    if mesh is not None and config.shard:
        context = memswap.parallel.ShardContext(slots=config.slots)
        for layer in model.layers:
            memswap.parallel.shard(layer, mesh, context=context, anchor="attention.wo")
        memswap.parallel.shard(model, mesh, context=context)
    if config.checkpoint:
        memswap.checkpoint_module(model.layers[: config.checkpoint])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    losses = []
    with memswap.manage(model.layers) if config.manage else nullcontext():
        for _ in range(config.steps):
            # Counting upwards from anywhere: something that can be learnt.
            first = torch.randint(config.vocabulary, (config.batch, 1), generator=data)
            text = (first + torch.arange(config.length + 1)) % config.vocabulary
            text = text.chunk(ranks)[rank].to(device)
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach()
            if ranks > 1:
                dist.all_reduce(mean)
            losses.append(mean.item() / ranks)
    if rank == 0 and mesh is not None and config.shard:
        print(memswap.parallel.describe(model))
    return losses


def parse() -> Config:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, field in Config.__dataclass_fields__.items():
        option = f"--{name.replace('_', '-')}"
        if field.type is bool:
            parser.add_argument(option, action="store_true", help=" ")
        else:
            parser.add_argument(option, type=field.type, default=field.default, help=" ")
    return Config(**vars(parser.parse_args()))


def main() -> None:
    config = parse()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device, mesh = accelerator or torch.device("cpu"), None
    if "RANK" in os.environ:
        if accelerator is not None:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    for step, loss in enumerate(train(config, device, mesh)):
        if mesh is None or mesh.get_local_rank() == 0:
            print(f"step {step + 1}: loss {loss:.6f}")
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
