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


def _check_versions() -> None:
    """Torch keeps no C++ interface stable from one minor version to the next."""
    built, running = native.torch_version, torch.__version__
    if built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"memswap was built against torch {built}, and this is torch {running}. Build it again "
            "in this environment: pip install --no-build-isolation ."
        )


_check_versions()

__all__ = ["native"]
