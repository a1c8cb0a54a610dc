"""A longer sequence in the same memory: activations of every length within one number of bytes.

    python examples/long_sequence.py [--budget 12MiB] [--lengths 512 1024 2048]

What autograd saves grows with the sequence. The budget is what a plain step of the first length
takes: the longer ones stay within it too, and give the gradients that they give without memswap. It
swaps to host memory on an accelerator and to a file on a CPU.
"""

import argparse
import tempfile

import torch
from torch import nn

import memswap


def new_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0, device=device)
    return nn.TransformerEncoder(layer, 8)


def gradient(model: nn.Module, length: int, device: torch.device) -> torch.Tensor:
    """One step; the gradient of the first layer, which everything behind it is part of."""
    generator = torch.Generator().manual_seed(length)
    states = torch.randn(1, length, 128, generator=generator).to(device)
    model.zero_grad()
    model(states).square().mean().backward()
    return model.layers[0].linear1.weight.grad.clone()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--budget", help="bytes, or such as 12MiB; default: the first length's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help=" ")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    plain = new_model(device)
    peaks, expected = {}, {}
    keep = memswap.Policy(memswap.Action.KEEP)  # moves nothing, and counts
    with memswap.manage(plain, keep) as counting:
        for length in options.lengths:
            counting.reset_stats()
            expected[length] = gradient(plain, length, device)
            peaks[length] = counting.stats().peak_resident_bytes
    budget = options.budget or peaks[options.lengths[0]]

    model = new_model(device)
    with tempfile.TemporaryDirectory() as folder:
        pool = memswap.DiskPool(folder) if device.type == "cpu" else None
        with memswap.manage(model, budget=budget, pool=pool) as manager:
            for length in options.lengths:
                for _ in range(8):  # three steps of a length are measured, then it has a plan
                    gradient(model, length, device)
                    manager.wait_for_plan()
                manager.reset_stats()
                same = torch.equal(gradient(model, length, device), expected[length])
                print(
                    f"{length} tokens: {peaks[length] / 2**20:.1f} MiB plain, "
                    f"{manager.stats().peak_resident_bytes / 2**20:.1f} MiB under the budget, "
                    f"gradient {'identical' if same else 'DIFFERENT'}"
                )


if __name__ == "__main__":
    main()
