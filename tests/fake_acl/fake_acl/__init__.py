"""The real torch_npu on a runtime of our own, with everything that makes streams hard.

    import fake_acl   # before torch: builds and loads the libraries that torch_npu asks for
    import torch      # and torch.npu is there

`fake_acl.simdev` is the laboratory of tests/simdev (schedules, race detector, mutations) around
this machine; `install_as_simdev()` lets tests written for the simulator run on torch_npu.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from types import ModuleType

from .build import EXTENSION, ensure_built

DIRECTORY = ensure_built()
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")


def _load_libraries() -> None:
    if "torch_npu" in sys.modules:
        raise ImportError("fake_acl must be imported before torch and torch_npu")
    for name in LIBRARIES:  # found again by their sonames, whatever the library path says
        ctypes.CDLL(str(DIRECTORY / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)


def _load_extension() -> ModuleType:
    name = f"{__name__}._C"
    spec = importlib.util.spec_from_file_location(name, DIRECTORY / EXTENSION)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# torch_npu checks an installation of CANN only where it is told of one; there is none.
os.environ.pop("ASCEND_HOME_PATH", None)
_load_libraries()

import torch  # noqa: E402
import torch_npu  # noqa: E402

_C = _load_extension()
torch.npu.init()
torch.npu.set_compile_mode(jit_compile=False)  # the default of an Atlas A2
_C.install()

from . import machine  # noqa: E402
from .machine import calls, device_lost, faults_of  # noqa: E402
from .simulator import install_as_simdev, simdev  # noqa: E402

__all__ = [
    "calls",
    "device_lost",
    "faults_of",
    "install_as_simdev",
    "machine",
    "simdev",
    "torch_npu",
]
