"""Other activation offloaders to measure beside memswap, where they can be imported.

None is a dependency and none is shipped. A peer that is not here is named with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

# TRL: huggingface/trl, Apache-2.0. torchtune: pytorch/torchtune, BSD-3-Clause. Both give a context
# manager of the same name, from one file.
CLASS = "OffloadActivations"


def load_file(path: Path, device: torch.device | None = None) -> ModuleType:
    """Import one file as a module.

    Args:
        path: the file.
        device: what stands in the place of CUDA in it, where that is written out.

    Raises:
        ImportError: it is not there, or something that it imports is not.
    """
    if not path.is_file():
        raise ImportError(f"{path} is not a Python file")
    source = path.read_text(encoding="utf-8")
    if device is not None:
        source = source.replace("torch.cuda", f"torch.{device.type}")
        source = source.replace('"cuda"', f'"{device.type}"')
    module = ModuleType(f"peer_{path.stem}")
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def load_trl(device: torch.device) -> ModuleType:
    """TRL's module, which knows every device."""
    return importlib.import_module("trl.models.activation_offloading")


def load_torchtune(device: torch.device) -> ModuleType:
    """Torchtune's one file: its packages import a torchao that is gone by now, and data sets.

    Of torchao the file needs a class of 4-bit tensors, to know them by, and a version.

    Args:
        device: what it offloads from.

    Raises:
        ImportError: torchtune is not installed (``pip install --no-deps torchtune psutil``).
    """
    found = importlib.util.find_spec("torchtune")
    if found is None or not found.submodule_search_locations:
        raise ImportError("torchtune is not installed")
    folder = Path(found.submodule_search_locations[0])
    names = ("torchtune", "torchtune.modules", "torchtune.utils")
    bare = {name: ModuleType(name) for name in (*names, "torchao", "torchao.dtypes")}
    bare["torchao.dtypes.nf4tensor"] = ModuleType("torchao.dtypes.nf4tensor")
    for name in names:
        bare[name].__path__ = [str(folder.parent.joinpath(*name.split(".")))]
    with mock.patch.dict(sys.modules, bare):
        tied = importlib.import_module("torchtune.modules.tied_linear")
        logs = importlib.import_module("torchtune.utils._logging")
        vars(bare["torchtune.modules"]).update(TiedLinear=tied.TiedLinear)
        vars(bare["torchtune.utils"]).update(get_logger=logs.get_logger)
        vars(bare["torchao"]).update(__version__="0.0")
        vars(bare["torchao.dtypes.nf4tensor"]).update(NF4Tensor=type("NF4Tensor", (), {}))
        return load_file(folder / "training" / "_activation_offloading.py", device)


PEERS: dict[str, Callable[[torch.device], ModuleType]] = {
    "TRL OffloadActivations": load_trl,
    "torchtune OffloadActivations": load_torchtune,
}


def find_peers(
    device: torch.device, paths: Sequence[Path]
) -> tuple[dict[str, Callable[[], AbstractContextManager[Any]]], dict[str, str]]:
    """Return the contexts of the peers that can run here, and why the others cannot.

    Args:
        device: what the benchmark runs on.
        paths: files that hold an ``OffloadActivations``, in addition to the installed ones.
    """
    sources = dict(PEERS)
    for path in paths:
        sources[f"{path.name} {CLASS}"] = lambda device, path=path: load_file(path)
    found: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    reasons: dict[str, str] = {}
    for name, load in sources.items():
        if device.type == "cpu":
            reasons[name] = "needs an accelerator and its streams"
            continue
        # Peers break at import in many ways (ImportError, AttributeError, RuntimeError of their
        # own dependencies); each is a reason to print, none is a reason to stop.
        try:
            offload = getattr(load(device), CLASS)
        except Exception as error:
            reasons[name] = f"cannot be imported: {type(error).__name__}: {error}"
            continue
        found[name] = offload
    return found, reasons
