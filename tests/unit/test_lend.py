"""Lent memory: a storage stays the same while its memory comes and goes."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

import memswap
from memswap._native import native

pytestmark = pytest.mark.skipif(not native.can_lend, reason="lent memory needs torch 2.13")


def shell_of(nbytes: int, memory: torch.Tensor) -> tuple[torch.Tensor, object]:
    """A tensor on a shell that has `memory` now, and the shell."""
    tensor = torch.empty(0, dtype=torch.uint8)
    shell = native.StorageRef(tensor)
    native.lend(shell, native.StorageRef(memory), 0, nbytes)
    return tensor.set_(tensor.untyped_storage(), 0, (nbytes,), (1,)), shell


def test_views_follow_the_memory_from_slot_to_slot() -> None:
    first, second = torch.full((8,), 1, dtype=torch.uint8), torch.full((16,), 2, dtype=torch.uint8)
    tensor, shell = shell_of(8, first)
    view = tensor[2:4]
    assert torch.equal(view, first[2:4]) and native.is_lent(view)
    native.take_back(shell, "gone")
    native.lend(shell, native.StorageRef(second), 8, 8)
    assert torch.equal(view, second[:2])
    assert view.data_ptr() == second.data_ptr() + 10


def test_without_memory_reading_and_writing_raise_the_message() -> None:
    tensor, shell = shell_of(8, torch.zeros(8, dtype=torch.uint8))
    native.take_back(shell, "unit 7 is not here")
    assert not native.is_lent(tensor)
    for use in (lambda: tensor + 1, lambda: tensor.add_(1), tensor[1:].clone):
        with pytest.raises(RuntimeError, match="unit 7 is not here"):
            use()


def test_memory_that_is_lent_is_not_freed_under_its_reader() -> None:
    memory = torch.full((8,), 5, dtype=torch.uint8)
    gone = weakref.ref(memory.untyped_storage())
    tensor, shell = shell_of(8, memory)
    del memory
    gc.collect()
    assert gone() is not None and int(tensor.sum()) == 40
    native.take_back(shell, "gone")
    gc.collect()
    assert gone() is None


def test_what_does_not_fit_or_is_lent_already_is_refused() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    _, shell = shell_of(8, memory)
    with pytest.raises(RuntimeError, match="has memory already"):
        native.lend(shell, native.StorageRef(memory), 0, 8)
    native.take_back(shell, "gone")
    with pytest.raises(RuntimeError, match="9 bytes at 0 of 8"):
        native.lend(shell, native.StorageRef(memory), 0, 9)


@pytest.mark.parametrize("action", ["swap", "encode"])
def test_lent_memory_is_never_moved_by_the_engine(action: str, tmp_path: Path) -> None:
    # Neither a parameter nor a leaf that requires grad: nothing but the loan tells what it is.
    weight = (
        shell_of(4096, torch.zeros(4096, dtype=torch.uint8))[0].view(torch.float32).view(32, 32)
    )
    policy = memswap.Policy(action=memswap.Action(action), min_bytes=0)
    x = torch.ones(32, 32, requires_grad=True)
    with memswap.saved_tensors(policy, pool=memswap.DiskPool(tmp_path)) as saved:
        out = (x @ weight).sum()
    assert saved.stats().kept["parameter"].tensors == 1
    out.backward()
