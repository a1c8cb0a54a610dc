"""The module that torch expects of a backend: `torch.<name>`."""

from __future__ import annotations

import atexit
import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from . import _C

_MASK = 2**64 - 1
_name = "privateuseone"


def _index(device: Any = None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Nothing is left to do; but torch 2.11 does not wait for a device without this name."""


def _is_in_bad_fork() -> bool:
    return _C.in_forked_child()


def device_count() -> int:
    return _C.device_count


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: Any = None) -> str:
    return f"simulated accelerator {_index(device)}"


class device:  # noqa: N801  torch calls it so
    """Context manager that changes the current device."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._previous = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *unused: object) -> None:
        torch.accelerator.set_device_index(self._previous)


def synchronize(device: Any = None) -> None:
    _C.synchronize_device(_index(device))


def Stream(device: Any = None, priority: int = 0, **unused: Any) -> torch.Stream:
    return torch.Stream(device=f"{_name}:{_index(device)}", priority=priority)


Event = torch.Event


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    base = torch.accelerator.current_stream(_index(device))
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=base.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def empty_cache() -> None:
    for index in range(_C.device_count):
        _C.empty_cache(index)


def memory_allocated(device: Any = None) -> int:
    return _C.memory_stats(_index(device))["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    return _C.memory_stats(_index(device))["peak"]


def memory_reserved(device: Any = None) -> int:
    return _C.memory_stats(_index(device))["reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _C.reset_peak(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    stats = _C.memory_stats(_index(device))
    return stats["capacity"] - stats["reserved"], stats["capacity"]


def manual_seed(seed: int) -> None:
    _C.set_generator_state(current_device(), seed & _MASK, 0)


def manual_seed_all(seed: int) -> None:
    for index in range(_C.device_count):
        _C.set_generator_state(index, seed & _MASK, 0)


def get_rng_state(device: Any = None) -> torch.Tensor:
    state = b"".join(part.to_bytes(8, "little") for part in _C.generator_state(_index(device)))
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    raw = bytes(state.tolist())
    seed, offset = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")
    _C.set_generator_state(_index(device), seed, offset)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def install(name: str) -> None:
    """Renames PrivateUse1 and makes this module's functions `torch.<name>`."""
    global _name  # noqa: PLW0603  one process has one name
    _name = name
    torch.utils.rename_privateuse1_backend(name)
    module = types.ModuleType(f"torch.{name}", __doc__)
    own = {key: value for key, value in globals().items() if not key.startswith("__")}
    for key in (
        "annotations",
        "atexit",
        "contextlib",
        "time",
        "types",
        "Iterator",
        "Any",
        "torch",
        "install",
    ):
        own.pop(key, None)
    module.__dict__.update(own)
    module.__dict__["_initialized"] = True  # torch.utils.checkpoint asks
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # torch's autograd threads drop a finished graph's Python objects after backward() has returned.
    # One that asks for the GIL when the interpreter is already going down aborts the process, so it
    # gets a moment with the GIL free before that.
    atexit.register(time.sleep, 0.1)
