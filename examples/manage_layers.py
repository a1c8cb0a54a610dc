"""Train a stack of layers with their saved activations swapped away: two lines more than without.

Run it with ``python examples/manage_layers.py``; it uses an accelerator where torch sees one.
"""

import torch
from torch import nn

import memswap


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    with torch.device(device):
        layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024) for _ in range(6))
        head = nn.Linear(256, 1)
    optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()])

    with memswap.manage(layers) as manager:
        for step in range(4):
            states = torch.randn(128, 2, 256, device=device)
            for layer in layers:
                states = layer(states)
            loss = head(states).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.4f}")
        print(manager.report())


if __name__ == "__main__":
    main()
