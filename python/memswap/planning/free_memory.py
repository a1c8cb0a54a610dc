"""Free memory of a device, as far as it tells."""

from __future__ import annotations

import torch

from memswap.engine.host_memory import host_limits


def free_bytes(device: torch.device) -> int | None:
    """Bytes that may still be allocated on a device; None: nobody can say."""
    if device.type == "cpu":
        return host_limits().free_bytes
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free) + int(unused)
