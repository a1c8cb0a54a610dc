"""What the demo and the benchmarks compare: gradients bit for bit, and memory at its peak."""

from __future__ import annotations

import ctypes
import hashlib
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import memswap

FINGERPRINT_BYTES = 16


class Difference(NamedTuple):
    """A gradient that is not the same in two runs."""

    step: int
    name: str


def fingerprint(tensor: torch.Tensor) -> str:
    """Hash a tensor's dtype, shape and every bit of its elements.

    Unlike a comparison of values this tells -0.0 from 0.0 and one NaN from another, and two
    identical NaNs are equal. Two different tensors share one of the 2**128 fingerprints (BLAKE2b)
    only by a chance that can be neglected, so runs can be compared without keeping the gradients.

    Returns:
        32 hexadecimal digits.
    """
    elements = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(
        f"{elements.dtype} {tuple(elements.shape)}".encode(), digest_size=FINGERPRINT_BYTES
    )
    size_bytes = elements.numel() * elements.element_size()
    if size_bytes:
        digest.update((ctypes.c_char * size_bytes).from_address(elements.data_ptr()))
    return digest.hexdigest()


def gradient_fingerprints(model: nn.Module) -> dict[str, str]:
    """Return the fingerprint of every parameter's gradient, ``"none"`` where there is none."""
    return {
        name: "none" if parameter.grad is None else fingerprint(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def differing_gradients(
    first: Sequence[Mapping[str, str]], second: Sequence[Mapping[str, str]]
) -> list[Difference]:
    """List the gradients that differ between two runs, given their fingerprints step by step.

    A step or a gradient that only one run has is a difference. Steps are counted from 1.
    """
    found = []
    for step in range(max(len(first), len(second))):
        one = first[step] if step < len(first) else {}
        other = second[step] if step < len(second) else {}
        for name in {**one, **other}:
            if name not in one or name not in other or one[name] != other[name]:
                found.append(Difference(step + 1, name))
    return found


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Whether two tensors have the same dtype, shape and bits; two missing ones are the same."""
    if first is None or second is None:
        return first is second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    raw = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (first, second))
    return bool(torch.equal(*raw))


def settle_math_library() -> None:
    """Have this process make its first call into MKL on one thread.

    Torch takes square roots, exponentials and others on a CPU from MKL. Where the first such call
    of a process runs on two threads, one of them now and then computes its part with other kernels
    (torch 2.13: one process in five): then the first step of AdamW has other last bits than the
    same step in another process, or later. Whoever compares two trainings calls this first.
    """
    torch.ones(16).sqrt()


def stats_as_dict(stats: memswap.types.Stats) -> dict[str, Any]:
    """Return memswap's account in plain dictionaries, for JSON and for another process."""
    account = {item.name: getattr(stats, item.name) for item in fields(stats)}
    account["kept"] = {reason: asdict(count) for reason, count in stats.kept.items()}
    return account


def peak_process_bytes() -> int:
    """Return the largest amount of memory this process has had resident so far."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        # Kilobytes everywhere but on macOS (getrusage(2)).
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    # Not getrusage: what a child inherits there is its parent's peak at the fork.
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
