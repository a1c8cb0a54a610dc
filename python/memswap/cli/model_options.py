"""Options that say which model is trained, and where."""

from __future__ import annotations

import argparse
import platform

import torch

from memswap.cli.arguments import whole
from memswap.cli.training import DTYPES


def default_device() -> str:
    """The accelerator that torch sees, or the CPU."""
    present = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if present is None else str(present.type)


def multiplies_bfloat16_slowly() -> bool:
    """Whether torch multiplies bfloat16 matrices on this CPU without instructions made for it.

    A step of the usual model takes minutes then: on x86 without AVX-512.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return is_x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of what is trained."""
    device = default_device()
    is_slow = device == "cpu" and multiplies_bfloat16_slowly()
    parser.add_argument(
        "--device", default=device, help="cpu, cuda, npu, ...; an accelerator if any"
    )
    parser.add_argument("--layers", type=whole(1), default=6, help="of the GPT")
    parser.add_argument("--hidden", type=whole(1), default=384, help="its width")
    parser.add_argument("--heads", type=whole(1), default=6, help="they divide the width")
    parser.add_argument("--seq", type=whole(1), default=512, help="bytes of text per sequence")
    parser.add_argument(
        "--batch",
        type=whole(1),
        default=2 if is_slow else 8,
        help="sequences per step; fewer on a CPU without AVX-512",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="fp32" if is_slow else "bf16",
        help="bf16 is autocast; fp32 on a CPU without AVX-512, where bf16 is slow",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and text")


def check_device(name: str) -> None:
    """Refuse a device that torch does not know or this machine does not have.

    Raises:
        SystemExit: with a sentence that names what is here.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    here = "cpu" if present is None else f"cpu and {present.type}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SystemExit(
            f"memswap: torch knows no device {name!r}; here: {here}. (torch_npu brings npu.)"
        ) from None
    if device.type == "cpu":
        return
    if present is None or present.type != device.type:
        raise SystemExit(f"memswap: this torch sees no {device.type} device; here: {here}.")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise SystemExit(
            f"memswap: there is no {name}; this machine has "
            f"{torch.accelerator.device_count()} of them, counted from 0."
        )
