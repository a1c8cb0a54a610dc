"""Checkpoint a stack of layers, with the costly outputs and the inputs of the layers swapped away.

What ``torch.utils.checkpoint`` keeps on the device until backward leaves it here, and the matrix
products do not run twice. Run it with ``python examples/checkpoint_layers.py``; it uses an
accelerator where torch sees one.
"""

import torch
from torch import nn

import memswap

MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def policy(ctx, op, *args, **kwargs):
    if op in MATMULS:
        return memswap.CheckpointPolicy.MUST_SWAP
    return memswap.keep_collectives(ctx, op, *args, **kwargs)  # recomputes everything else


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    with torch.device(device):
        layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024) for _ in range(6))
        head = nn.Linear(256, 1)
    optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()])

    regions = memswap.checkpoint_module(layers, policy, swap_inputs=True)
    for step in range(4):
        states = torch.randn(128, 2, 256, device=device)
        for layer in layers:
            states = layer(states)
        loss = head(states).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    print(regions.report())
    regions.remove()


if __name__ == "__main__":
    main()
