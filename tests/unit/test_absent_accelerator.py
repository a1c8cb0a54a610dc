"""A torch that was built for an accelerator, on a machine without one, is a torch for the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memswap
from memswap.cli import info, model_options
from memswap.compat.mindspeed import CompressHook, GlobalContext, GlobalContextConfig
from memswap.engine import pools


@pytest.fixture(autouse=True)
def _torch_for_cuda_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_devices_that_nobody_named_are_the_cpu() -> None:
    assert pools.present_device(None, "profile") == torch.device("cpu")
    assert model_options.default_device() == "cpu"
    assert memswap.HostPool(budget="1MiB").statistics().slabs == 0
    assert info.describe_accelerator().startswith("none") and info.describe_codec() == "cpu"


class Layer(nn.Linear):
    """Its product is a window."""

    def __init__(self) -> None:
        super().__init__(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with memswap.window(name="product"):
            return super().forward(x)


def test_windows_are_not_measured_with_events_of_a_device_that_is_not_there() -> None:
    layer = Layer()
    manager = memswap.manage(nn.ModuleList([layer]), windows=memswap.Windows())
    for _ in range(3):  # the second and the third step are measured
        layer(torch.randn(1024, 512, requires_grad=True) * 1).sum().backward()
    manager.remove()
    context = GlobalContext(GlobalContextConfig())
    for step in range(3):
        key = (1, context.get_absolute_order(step == 0))
        context.pack_start(key)
        with CompressHook(key, context):
            output = layer(torch.randn(1024, 512, requires_grad=True) * 1)
        output.sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
