"""Fixtures of the scripts that the users of other systems bring; one file for each system.

A script here is written as that system's documentation has its users write it, with another import.
Its bits are compared with the same training in plain torch. Those that need several processes take
`@distributed` of tests/parallel/ranks.py; they run on CPUs only, whatever `--device` says. All
others take `device`, and on the simulated accelerator they run once per schedule.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import flush_autograd

from memswap._native import native

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))
from ranks import rank_pool

__all__ = ["rank_pool"]

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several processes mean CPUs here, and some of their systems need what this torch has not."""
    elsewhere = config.getoption("--device") != "cpu"
    for item in items:
        if HERE not in Path(item.path).parents or "rank_pool" not in item.fixturenames:
            continue
        if elsewhere:
            item.add_marker(pytest.mark.skip(reason="several processes: on CPUs only"))
        if not native.can_lend and "internevo" in item.path.name:
            item.add_marker(pytest.mark.skip(reason="sharded weights need torch 2.13"))


@pytest.fixture(autouse=True)
def _let_go(_laboratory: object, device: torch.device) -> Iterator[None]:
    """The laboratory looks for leaks once autograd's thread has let go, and cycles are gone."""
    yield
    flush_autograd(device)
    gc.collect()
