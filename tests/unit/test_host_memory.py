"""Host memory that a pool may take: what the system, control groups and other ranks leave."""

from __future__ import annotations

from pathlib import Path

import pytest

import memswap
from memswap._native import native
from memswap.engine import pools
from memswap.engine.host_memory import host_share, ranks_of_machine

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
    share = host_share(machine(tmp_path, {}), {})
    assert share.limits.available == 64 * GIB and share.limits.group is None and share.ranks == 1
    assert share.pool_bytes == 32 * GIB


@pytest.mark.parametrize("folder", ["", "slice/", "slice/job/"])
def test_the_narrowest_group_above_the_process_counts(tmp_path, folder):
    at = f"sys/fs/cgroup/{folder}memory"
    files = {f"{at}.max": f"{20 * GIB}\n", f"{at}.current": f"{4 * GIB}\n"}
    files.setdefault("sys/fs/cgroup/memory.max", "max\n")
    share = host_share(machine(tmp_path, files, "0::/slice/job"), {})
    assert share.limits.group == 16 * GIB
    assert share.pool_bytes == 8 * GIB


@pytest.mark.parametrize("folder", ["", "job/"])
def test_groups_of_the_first_version(tmp_path, folder):
    at = f"sys/fs/cgroup/memory/{folder}memory"
    files = {f"{at}.limit_in_bytes": f"{10 * GIB}\n", f"{at}.usage_in_bytes": f"{2 * GIB}\n"}
    group = "5:cpu,cpuacct:/other\n4:memory:/job"
    assert host_share(machine(tmp_path, files, group), {}).limits.group == 8 * GIB


def test_a_limit_of_the_first_version_that_is_none(tmp_path):
    at = "sys/fs/cgroup/memory/memory"
    files = {f"{at}.limit_in_bytes": "9223372036854771712\n", f"{at}.usage_in_bytes": "5\n"}
    assert host_share(machine(tmp_path, files), {}).limits.group is None


def test_ranks_of_one_machine_share_it(tmp_path):
    root = machine(tmp_path, {})
    assert host_share(root, {"LOCAL_WORLD_SIZE": "8"}).pool_bytes == 4 * GIB
    assert host_share(root, {"LOCAL_WORLD_SIZE": "8"}).ranks == 8
    assert host_share(root, {"LOCAL_WORLD_SIZE": "many"}).ranks == 1


def test_a_pool_without_a_budget_takes_no_more(monkeypatch, tmp_path):
    files = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {6 << 10} kB\n",
        "sys/fs/cgroup/memory.max": f"{4 << 20}\n",
        "sys/fs/cgroup/memory.current": "0\n",
        "proc/self/limits": f"Max locked memory  {1 << 16}  {1 << 16}  bytes\n",
    }
    share = host_share(machine(tmp_path, files), {"LOCAL_WORLD_SIZE": "2"})
    monkeypatch.setattr(pools, "host_share", lambda: share)
    assert memswap.HostPool(device="cpu").budget_bytes == 1 << 20
    assert memswap.HostPool(budget="2MiB", device="cpu").budget_bytes == 2 << 20
    for text in ("control group", "ulimit -l", "2 ranks"):
        assert text in str(share)


def test_files_in_the_page_cache_are_no_memory_in_use(tmp_path):
    """A group that reads a data set is always full, and loses none of its processes by it."""
    at = "sys/fs/cgroup/memory"
    files = {
        f"{at}.max": f"{20 * GIB}\n",
        f"{at}.current": f"{20 * GIB}\n",
        f"{at}.stat": f"anon {4 * GIB}\ninactive_file {10 * GIB}\nactive_file {6 * GIB}\n",
    }
    assert host_share(machine(tmp_path, files), {}).limits.group == 16 * GIB
    first = "sys/fs/cgroup/memory/memory"
    files = {
        f"{first}.limit_in_bytes": f"{20 * GIB}\n",
        f"{first}.usage_in_bytes": f"{20 * GIB}\n",
        f"{first}.stat": f"inactive_file 0\ntotal_inactive_file {8 * GIB}\n",
    }
    assert host_share(machine(tmp_path / "first", files), {}).limits.group == 8 * GIB


@pytest.mark.parametrize(
    ("line", "capabilities", "locked"),
    [
        ("8388608              8388608              bytes", "0000000000000000", 8 << 20),
        ("8388608              unlimited            bytes", "0000000000003fff", 8 << 20),
        ("8388608              8388608              bytes", "000001fffeffffff", None),
        ("unlimited            unlimited            bytes", "0000000000000000", None),
    ],
)
def test_the_limit_of_locked_memory(tmp_path, line, capabilities, locked):
    """Whoever has CAP_IPC_LOCK (bit 14) may lock more than the limit says."""
    files = {
        "proc/self/limits": f"Limit   Soft Limit  Hard Limit  Units\nMax locked memory  {line}\n",
        "proc/self/status": f"VmLck:\t    64 kB\nVmPin:\t    32 kB\nCapEff:\t{capabilities}\n",
    }
    root = machine(tmp_path, files)
    limits = native.host_limits(str(root))
    assert limits.lockable == locked
    assert limits.locked == 96 << 10


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x16)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "LOCAL_WORLD_SIZE": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({}, 1),
    ],
)
def test_every_launcher_says_how_many_ranks_share_the_machine(environment, ranks):
    assert ranks_of_machine(environment) == ranks


def test_the_node_of_a_device_is_read_from_its_slot(tmp_path):
    """The system's files, as a machine with two sockets has them."""
    machine(
        tmp_path,
        {
            "sys/devices/system/node/online": "0-1\n",
            "sys/bus/pci/devices/0000:17:00.0/numa_node": "1\n",
            "sys/bus/pci/devices/0000:18:00.0/numa_node": "-1\n",
        },
    )
    root = str(tmp_path)
    assert native.numa_nodes(root) == 2
    assert native.numa_node_of_pci("0000:17:00.0", root) == 1
    assert native.numa_node_of_pci("0000:18:00.0", root) is None


def test_this_machine_says_something():
    share = host_share()
    assert share.limits.available > 0 and share.pool_bytes > 0
