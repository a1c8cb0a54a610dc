"""What a measured number means nothing without: the device and the versions."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import memswap


def device_name(device: torch.device) -> str:
    """Return the accelerator's product name, or the processor's."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions by name."""
    return {
        "device": device_name(device),
        "memswap": memswap.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
