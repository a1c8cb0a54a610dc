"""Weights sharded by torch's FSDP2, the sequence cut among the ranks, activations managed.

    torchrun --nproc-per-node 2 examples/fsdp2_context_parallel.py

Three calls on one model, each of which may be left out: `ContextParallel` for the attention,
`fully_shard` for the weights, `manage` for what autograd saves.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memswap
from memswap.parallel import ContextParallel

WIDTH, HEADS, LENGTH = 64, 4, 256


class Attention(nn.Module):
    """Attention proper, [batch, tokens, heads, size]: what ContextParallel is applied to."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.attention, self.out = Attention(), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.mlp(x)


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    layers = [Block() for _ in range(6)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *layers, nn.Linear(WIDTH, 256)).to(device)
    style = ContextParallel(sequence_length=LENGTH)
    for layer in layers:
        style.apply(layer.attention, mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with memswap.manage(layers) as manager:
        for step in range(8):
            text = torch.arange(LENGTH + 1).add(step).remainder(256).expand(2, -1)
            batch = style.shard_batch({"tokens": text[:, :-1], "labels": text[:, 1:]})
            logits, labels = model(batch["tokens"].to(device)), batch["labels"].to(device).flatten()
            total = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            loss = style.mean_loss(total, labels.numel(), gradients="avg")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if mesh.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")
        if mesh.get_rank() == 0:
            print(manager.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
