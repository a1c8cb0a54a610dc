"""Host memory that a pool may take: what the system, control groups and other ranks leave."""

from __future__ import annotations

from pathlib import Path

import pytest

import memswap
from memswap.engine import pools
from memswap.engine.host_memory import HostLimits, host_limits

pytestmark = pytest.mark.cpu_only

GIB = 1 << 30


def machine(root: Path, files: dict[str, str], group: str = "0::/") -> Path:
    """A file system with 64 GiB available, and what else is given."""
    every = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n", **files}
    for name, text in {**every, "proc/self/cgroup": group + "\n"}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    return root


def test_without_a_group_what_is_available_counts(tmp_path):
    limits = host_limits(machine(tmp_path, {}), {})
    assert limits.available == 64 * GIB and limits.group is None and limits.ranks == 1
    assert limits.pool_bytes == 32 * GIB


@pytest.mark.parametrize("folder", ["", "slice/", "slice/job/"])
def test_the_narrowest_group_above_the_process_counts(tmp_path, folder):
    at = f"sys/fs/cgroup/{folder}memory"
    files = {f"{at}.max": f"{20 * GIB}\n", f"{at}.current": f"{4 * GIB}\n"}
    files.setdefault("sys/fs/cgroup/memory.max", "max\n")
    limits = host_limits(machine(tmp_path, files, "0::/slice/job"), {})
    assert limits.group == 16 * GIB
    assert limits.pool_bytes == 8 * GIB


@pytest.mark.parametrize("folder", ["", "job/"])
def test_groups_of_the_first_version(tmp_path, folder):
    at = f"sys/fs/cgroup/memory/{folder}memory"
    files = {f"{at}.limit_in_bytes": f"{10 * GIB}\n", f"{at}.usage_in_bytes": f"{2 * GIB}\n"}
    group = "5:cpu,cpuacct:/other\n4:memory:/job"
    assert host_limits(machine(tmp_path, files, group), {}).group == 8 * GIB


def test_a_limit_of_the_first_version_that_is_none(tmp_path):
    at = "sys/fs/cgroup/memory/memory"
    files = {f"{at}.limit_in_bytes": "9223372036854771712\n", f"{at}.usage_in_bytes": "5\n"}
    assert host_limits(machine(tmp_path, files), {}).group is None


def test_ranks_of_one_machine_share_it(tmp_path):
    root = machine(tmp_path, {})
    assert host_limits(root, {"LOCAL_WORLD_SIZE": "8"}).pool_bytes == 4 * GIB
    assert host_limits(root, {"LOCAL_WORLD_SIZE": "8"}).ranks == 8
    assert host_limits(root, {"LOCAL_WORLD_SIZE": "many"}).ranks == 1


def test_a_pool_without_a_budget_takes_no_more(monkeypatch):
    limits = HostLimits(available=6 << 20, group=4 << 20, locked=1 << 16, ranks=2)
    monkeypatch.setattr(pools, "host_limits", lambda: limits)
    assert memswap.HostPool(device="cpu").budget_bytes == 1 << 20
    assert memswap.HostPool(budget="2MiB", device="cpu").budget_bytes == 2 << 20
    for text in ("control group", "ulimit -l", "2 ranks"):
        assert text in str(limits)


def test_this_machine_says_something():
    limits = host_limits()
    assert limits.available > 0 and limits.pool_bytes > 0
