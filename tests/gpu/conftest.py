"""Fixtures of the tests on a real GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The same bits from the same program. Not `warn_only`: then attention's backward only warns,
    and adds in any order, flash attention's and float32's alike."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=warned)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
