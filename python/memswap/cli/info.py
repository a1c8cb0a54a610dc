"""``python -m memswap info``: what memswap sees of this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform

import torch

import memswap
from memswap._native import native
from memswap.cli.bench.environment import device_name
from memswap.cli.table import render_table
from memswap.engine.host_memory import host_share
from memswap.engine.pools import node_of
from memswap.engine.units import format_bytes


def describe_accelerator() -> str:
    """Name the accelerator that torch would use, or say that there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "none: activations are encoded in host memory"
    return f"{torch.accelerator.device_count()} x {device_name(device)} ({device.type})"


def describe_codec() -> str:
    """Which of the devices that torch has here can encode."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.device("cpu"), *([accelerator] if accelerator is not None else [])]
    return ", ".join(device.type for device in devices if native.codec_name(device) is not None)


def describe_left_out() -> list[str]:
    """Codecs that this build lacks: what was missing when it was made, and how to get it."""
    return [
        f"no {device_type} codec in this build: {reason}"
        for device_type, reason in native.codecs_left_out.items()
    ]


def describe_faults() -> list[str]:
    """What the self-check of the accelerator's codec found wrong, by dtype and layout."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return native.codec_faults(device)


def describe_numa() -> str:
    """Count the machine's NUMA nodes, and say where the accelerator and a pool's memory are."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    nodes = native.numa_nodes()
    text = f"{nodes} node(s)"
    if accelerator is None:
        return text
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    node = node_of(device)
    if node is None:
        return f"{text}; which one {device} hangs on is not told"
    return f"{text}; {device} hangs on node {node}, where a HostPool takes its memory"


def describe_locked_limit() -> str:
    """How much memory this process may pin by mlock; drivers may pin beyond it."""
    locked = host_share().limits.lockable
    return "none for this process" if locked is None else format_bytes(locked)


def describe_host_limits() -> str:
    """What a pool takes of host memory if nobody says how much, and why."""
    share = host_share()
    return f"{format_bytes(share.pool_bytes)} ({share})"


def describe_rates(refresh: bool) -> list[list[str]]:
    """How fast bytes move and shrink here: measured now, or the last time somebody asked."""
    rates = memswap.profile(refresh=refresh)
    where = "disk" if rates.inline_codec else "host"

    return [
        [f"copies to {where}, back", per_pair(rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)],
        [
            "both at once",
            per_pair(rates.duplex_d2h_bytes_per_s, rates.duplex_h2d_bytes_per_s),
        ],
        ["copies take of compute", f"{rates.copy_share:.0%}" if rates.copy_share else "-"],
        ["encode, decode", per_pair(rates.encode_bytes_per_s, rates.decode_bytes_per_s)],
    ]


def per_pair(one: float, other: float) -> str:
    """Two rates; a dash for what the device cannot do."""
    return ", ".join(f"{rate / 1e9:.1f} GB/s" if rate else "-" for rate in (one, other))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="measure the rates again: those that are remembered may be of a busy moment",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the facts; return the exit status."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    rows = [
        ["memswap", memswap.__version__],
        ["Python", f"{platform.python_version()}, {platform.machine()}"],
        ["torch", f"{torch.__version__}, {torch.get_num_threads()} threads"],
        ["accelerator", describe_accelerator()],
        ["codec", describe_codec()],
        ["torch_npu", "installed" if importlib.util.find_spec("torch_npu") else "not installed"],
        ["host memory", format_bytes(page * pages)],
        ["a HostPool takes", describe_host_limits()],
        ["mlock limit", describe_locked_limit()],
        ["NUMA", describe_numa()],
        *describe_rates(arguments.refresh),
    ]
    print(render_table(["", ""], rows).partition("\n")[2].partition("\n")[2])
    for line in [*describe_left_out(), *describe_faults()]:
        print(line)
    print("rates are measured once and remembered; `memswap info --refresh` measures them again")
    return 0
