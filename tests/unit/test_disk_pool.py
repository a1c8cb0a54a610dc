"""Promises of DiskPool: nothing stays on the disk, no space is assumed, every byte comes back."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from apart import run_warm
from pool_contents import assert_bytes_come_back

from memswap._native import native
from memswap.engine.pools import DiskPool, is_in_memory
from memswap.engine.transfers import default_pool

MIB = 2**20


def swap_files(directory: Path) -> list[str]:
    """This process's descriptors of nameless files in a directory, as paths in /proc."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(str(directory)) and "(deleted)" in target:
            found.append(str(entry))
    return found


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, 4097, 10 * MIB + 3])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_bytes_come_back_as_they_were(tmp_path: Path, nbytes: int, shift: int) -> None:
    pool = DiskPool(tmp_path, "64MiB", "16MiB")
    room = torch.randint(0, 256, (nbytes + 4097,), dtype=torch.uint8)
    start = -room.data_ptr() % 4096 + shift
    data = room[start : start + nbytes]
    assert_bytes_come_back(pool, data, fence_nbytes=100)


def test_blocks_of_a_file_have_no_address(tmp_path: Path) -> None:
    assert DiskPool(tmp_path, "1MiB").native.allocate(10).data_ptr == 0


def test_the_directory_stays_empty(tmp_path: Path) -> None:
    pool = DiskPool(tmp_path, "1MiB", "1MiB")
    named = DiskPool(tmp_path / "prefix", "1MiB", "1MiB")
    blocks = [p.native.allocate(1000) for p in (pool, named)]
    assert all(blocks)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    done = run_warm(
        """
import os, signal, sys, torch
from memswap.engine.pools import DiskPool
pool = DiskPool(sys.argv[1], "8MiB", "4MiB")
block = pool.native.allocate(1000)
block.write(torch.zeros(1000, dtype=torch.uint8))
print(pool.statistics().reserved_bytes, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        tmp_path,
    )
    assert done.returncode == -9, done.stderr
    assert done.stdout.strip() == str(4 * MIB)
    assert list(tmp_path.iterdir()) == [], "a crash left a swap file on the disk"


def test_a_directory_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"found no directory .*missing"):
        DiskPool(tmp_path / "missing" / "file", "1MiB")


def test_a_directory_that_may_not_be_written_is_an_os_error() -> None:
    with pytest.raises(OSError, match=r"could not make a file .*/proc"):
        DiskPool("/proc", "1MiB")


def test_without_a_path_the_system_chooses() -> None:
    pool = DiskPool(budget="1MiB")
    assert pool.path == Path(tempfile.gettempdir())
    assert pool.native.allocate(10) is not None


def test_the_default_budget_leaves_room_on_the_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    assert 0 < DiskPool(tmp_path).budget_bytes <= free.f_bavail * free.f_frsize


def test_a_spent_budget_is_none_and_counted(tmp_path: Path) -> None:
    pool = DiskPool(tmp_path, "1MiB", "1MiB")
    block = pool.native.allocate(MIB)
    assert block is not None
    assert pool.native.allocate(1) is None
    assert pool.statistics().refusals == 1
    assert "budget" in pool.statistics().last_refusal


def test_a_full_disk_is_a_refusal_at_allocation(tmp_path: Path) -> None:
    done = run_warm(
        """
import resource, sys, torch
from memswap.engine.pools import DiskPool
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
pool = DiskPool(sys.argv[1], "64MiB", "2MiB")
first = pool.native.allocate(2 << 20)
second = pool.native.allocate(2 << 20)
print(first is not None, second is None, pool.statistics().refusals)
print(pool.statistics().last_refusal)
data = torch.randint(0, 256, (2 << 20,), dtype=torch.uint8)
first.write(data)
back = torch.empty_like(data)
first.read(back)
print(torch.equal(back, data))
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    flags, reason, intact = done.stdout.strip().splitlines()
    assert flags == "True True 1", "the end of the disk was not found at allocation"
    assert "could not set 2097152 bytes aside" in reason
    assert "File too large" in reason
    assert intact == "True", "what was on the disk already was lost"


def test_a_truncated_file_says_what_is_missing(tmp_path: Path) -> None:
    pool = DiskPool(tmp_path, "16MiB", "4MiB")
    first, second = pool.native.allocate(8192), pool.native.allocate(100_000)
    data = torch.zeros(100_000, dtype=torch.uint8)
    second.write(data)
    first.write(torch.ones(8192, dtype=torch.uint8))
    (descriptor,) = swap_files(tmp_path)
    os.truncate(descriptor, 8192 + 5000)
    with pytest.raises(native.TransferError) as caught:
        second.read(data)
    message = str(caught.value)
    for part in ("the file ends there", "offset 8192", "expected 100000 bytes", "found 5000"):
        assert part in message, message
    back = torch.empty(8192, dtype=torch.uint8)
    first.read(back)
    assert back.min() == 1, "bytes before the cut were lost"


def test_released_space_returns_to_the_disk(tmp_path: Path) -> None:
    pool = DiskPool(tmp_path, "16MiB", "4MiB")
    block = pool.native.allocate(4 * MIB)
    block.write(torch.ones(4 * MIB, dtype=torch.uint8))
    (descriptor,) = swap_files(tmp_path)
    assert os.stat(descriptor).st_blocks * 512 >= 4 * MIB, "no space was set aside"
    del block
    assert pool.trim() >= 4 * MIB
    assert os.stat(descriptor).st_blocks * 512 < MIB, "the file keeps space that nothing uses"


def test_the_file_is_closed_with_the_last_block(tmp_path: Path) -> None:
    pool = DiskPool(tmp_path, "16MiB", "4MiB")
    block = pool.native.allocate(10)
    del pool
    assert len(swap_files(tmp_path)) == 1
    del block
    assert swap_files(tmp_path) == []


def test_what_a_forked_child_drops_stays_in_its_parents_file(tmp_path: Path) -> None:
    """The child would give the extent's space back, and the parent would read zeros."""
    pool = DiskPool(tmp_path, "16MiB", "1MiB")
    block = pool.native.allocate(MIB)
    data = torch.full((MIB,), 7, dtype=torch.uint8)
    block.write(data)
    del pool  # its blocks keep what they need
    child = os.fork()
    if child == 0:
        del block
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = torch.empty_like(data)
    block.read(back)
    assert torch.equal(back, data), "bytes were lost on the disk"


def test_a_folder_that_is_memory_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes there is still in the memory that it was to leave."""
    shared = Path("/dev/shm")
    if not is_in_memory(shared):
        pytest.skip("/dev/shm is no tmpfs here")
    assert "memory itself" in DiskPool(shared, "1MiB", "1MiB").describe()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(shared))
    with pytest.warns(UserWarning, match=r"Name a folder on a disk: pool=memswap.DiskPool") as told:
        default_pool(torch.device("cpu"))
    assert [one.filename for one in told] == [__file__]
    folder = Path(__file__).parent
    if not is_in_memory(folder):
        assert str(folder) in DiskPool(folder, "1MiB", "1MiB").describe()
        assert "memory itself" not in DiskPool(folder, "1MiB", "1MiB").describe()
