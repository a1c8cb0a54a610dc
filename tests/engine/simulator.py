"""The simulated accelerator, as tests and programs begin with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

SIMDEV = Path(__file__).resolve().parents[1] / "simdev"


def start(name: str) -> None:
    """Register it under a name, `sim` or `npu`, with memswap's own codec."""
    os.environ["SIMDEV_NAME"] = name
    sys.path.insert(0, str(SIMDEV))
    torch.set_num_threads(1)  # its executor and OpenMP's threads would fight for the cores
    import simdev
    from memswap._native import native

    host_codec = native.codec_capsule(torch.device("cpu"))
    native.register_codec(simdev.NAME, simdev.codec_on_streams(host_codec))
