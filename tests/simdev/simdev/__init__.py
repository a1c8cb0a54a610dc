"""A simulated accelerator: torch's PrivateUse1 backend, with everything that makes streams hard.

Importing it builds the extension if needed, registers the backend under the name in the
environment variable SIMDEV_NAME (default "sim") and installs `torch.<name>`. One process has one
name, for torch allows one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

from .build import ensure_built


def _load_extension() -> ModuleType:
    name = f"{__name__}._C"
    spec = importlib.util.spec_from_file_location(name, ensure_built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


NAME: str = os.environ.get("SIMDEV_NAME", "sim")
_C = _load_extension()
_C.register_hooks()

from . import device_module  # noqa: E402  needs the extension

device_module.install(NAME)

from . import mutations  # noqa: E402
from .laboratory import (  # noqa: E402  needs the device
    SCHEDULES,
    LaboratoryError,
    Schedule,
    capturing,
    counters,
    faults,
    host_access,
    laboratory,
    run_in,
    schedules,
    virtual_time,
)


def c_functions() -> dict[str, int]:
    """Addresses of the functions of csrc/runtime/launch.h, for native code under test.

    Keys: launch, memcpy_async, memset_async, last_error. An extension module is loaded with local
    symbols, so they cannot be looked up by name.
    """
    return _C.c_functions()


def codec_on_streams(host_codec: object) -> object:
    """A codec for the simulated device, as a capsule named `memswap_codec`.

    It does in stream order what `host_codec`, a capsule of the same kind, does at once.
    """
    return _C.codec_on_streams(host_codec)


__all__ = [
    "NAME",
    "SCHEDULES",
    "LaboratoryError",
    "Schedule",
    "c_functions",
    "capturing",
    "codec_on_streams",
    "counters",
    "faults",
    "host_access",
    "laboratory",
    "mutations",
    "run_in",
    "schedules",
    "virtual_time",
]
