"""The only door to the native module."""

from __future__ import annotations

import torch

try:
    from memswap import _C as native
except ImportError as error:
    raise ImportError(
        "memswap's native module is missing or was built against another torch than "
        f"{torch.__version__}. Build it in this environment: pip install --no-build-isolation . "
        f"(cause: {error})"
    ) from error

__all__ = ["native"]
