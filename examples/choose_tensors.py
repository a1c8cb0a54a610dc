"""Decide tensor by tensor what is swapped, for any block of code that autograd records.

Run it with ``python examples/choose_tensors.py``.
"""

import torch
from torch import nn

import memswap


def swap_large_floats(tensor: torch.Tensor, info: object) -> memswap.Action:
    """Swap floating-point tensors; masks and indices are small and stay."""
    return memswap.Action.SWAP if tensor.is_floating_point() else memswap.Action.KEEP


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU()
    )
    policy = memswap.Policy(min_bytes=1 << 20, fn=swap_large_floats)
    with memswap.saved_tensors(policy) as saved:
        loss = model(torch.randn(16, 3, 64, 64)).mean()
    loss.backward()

    stats = saved.stats()
    print(f"offered {stats.offered_bytes} bytes, moved {stats.moved_bytes}")
    for reason, count in stats.kept.items():
        print(f"kept {count.tensors} tensors, {count.bytes} bytes: {reason}")


if __name__ == "__main__":
    main()
