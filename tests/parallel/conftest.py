"""The rank processes of tests/parallel; see ranks.py."""

from __future__ import annotations

import pytest

from memswap._native import native
from ranks import rank_pool

__all__ = ["rank_pool"]

#: Files, or tests, that shard weights.
SHARDING = (
    "test_shard_",
    "test_fsdp2_pool",
    "test_compat_internevo",
    "test_example",
    "test_context_edges.py::test_shard_manage_checkpoint_and_context_compose",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this torch cannot do."""
    if native.can_lend:
        return
    for item in items:
        if item.nodeid.rpartition("/")[2].startswith(SHARDING):
            item.add_marker(pytest.mark.skip(reason="sharded weights need torch 2.13"))
