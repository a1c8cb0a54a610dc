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
    "test_internevo_parts.py::test_a_router_of_the_users_own_stands_beside_whole_weights",
    "test_internevo_parts.py::test_biases_pass_the_hooks_as_weights_do",
    "test_internevo_parts.py::test_rows_of_a_weight_are_not_sharded_again",
    "test_internevo_parts.py::test_what_a_prerequisite_returns_is_awaited_or_told_once",
    "test_internevo_parts.py::test_whole_weights_that_were_taken_for_parts_are_told",
    "test_context_edges.py::test_shard_manage_checkpoint_and_context_compose",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this torch cannot do."""
    if native.can_lend:
        return
    for item in items:
        if item.nodeid.rpartition("/")[2].startswith(SHARDING):
            item.add_marker(pytest.mark.skip(reason="sharded weights need torch 2.13"))
