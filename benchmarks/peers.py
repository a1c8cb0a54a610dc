"""Other activation offloaders to measure beside memswap, where they can be imported.

None is a dependency and none is shipped. A peer that is not here is named with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# TRL: huggingface/trl, Apache-2.0. torchtune: pytorch/torchtune, BSD-3-Clause. Both give a context
# manager of the same name, from one file.
PEERS = {
    "TRL OffloadActivations": "trl.models.activation_offloading",
    "torchtune OffloadActivations": "torchtune.training._activation_offloading",
}
CLASS = "OffloadActivations"


def load_file(path: Path) -> ModuleType:
    """Import one file as a module.

    Raises:
        ImportError: it is not there, or something that it imports is not.
    """
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_peers(
    device: torch.device, paths: Sequence[Path]
) -> tuple[dict[str, Callable[[], AbstractContextManager[Any]]], dict[str, str]]:
    """Return the contexts of the peers that can run here, and why the others cannot.

    Args:
        device: what the benchmark runs on.
        paths: files that hold an ``OffloadActivations``, in addition to the installed ones.
    """
    sources: dict[str, Callable[[], ModuleType]] = {
        name: lambda module=module: importlib.import_module(module)
        for name, module in PEERS.items()
    }
    for path in paths:
        sources[f"{path.name} {CLASS}"] = lambda path=path: load_file(path)
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    reasons: dict[str, str] = {}
    for name, load in sources.items():
        if device.type == "cpu":
            reasons[name] = "needs an accelerator and its streams"
            continue
        # Peers break at import in many ways (ImportError, AttributeError, RuntimeError of their
        # own dependencies); each is a reason to print, none is a reason to stop.
        try:
            offload = getattr(load(), CLASS)
        except Exception as error:
            reasons[name] = f"cannot be imported: {type(error).__name__}: {error}"
            continue
        found[name] = offload
    return found, reasons
