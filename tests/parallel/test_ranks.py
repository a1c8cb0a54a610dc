"""The harness itself: it fails in seconds, says what came first, and recovers."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection, wait

import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import Rank, RankError, RankPool, distributed


@distributed(2, 4)
def test_the_body_runs_on_every_rank(rank: Rank) -> None:
    total = torch.tensor([1 << rank.rank])
    dist.all_reduce(total)
    assert total.item() == (1 << rank.size) - 1


@distributed(2)
@pytest.mark.parametrize("value", [1.5])
def test_parameters_reach_the_body(rank: Rank, value: float) -> None:
    assert value == 1.5


@distributed(2)
def test_every_test_has_a_group_of_its_own(rank: Rank) -> None:
    assert dist.get_world_size() == 2
    assert rank.mesh.size() == 2


class Body:
    """Bodies that fail, run by hand."""

    def __init__(self, body: object) -> None:
        self.body = body


def _fails_on_rank_1(rank: Rank) -> None:
    assert rank.rank != 1, "the reason"
    dist.barrier()


def _dies_on_rank_0(rank: Rank) -> None:
    if rank.rank == 0:
        os._exit(7)
    dist.barrier()


def _dies_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(7)
    dist.barrier()


def _hangs_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(60)
    dist.barrier()


def _aborts_on_rank_1(rank: Rank) -> None:
    if rank.rank == 1:
        os.abort()
    dist.barrier()


aborts_on_rank_1 = Body(_aborts_on_rank_1)
fails_on_rank_1 = Body(_fails_on_rank_1)
dies_on_rank_0 = Body(_dies_on_rank_0)
dies_on_rank_1 = Body(_dies_on_rank_1)
hangs_on_rank_1 = Body(_hangs_on_rank_1)


def test_the_first_failure_is_told_and_the_next_test_runs(rank_pool: RankPool) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed first.*the reason"):
        rank_pool.run(2, "fails_on_rank_1", __name__, {})
    took_s = time.monotonic() - began
    assert took_s < ranks.COLLECTIVE_TIMEOUT_S, "a failed rank must not hold up the others"
    rank_pool.run(2, "test_every_test_has_a_group_of_its_own", __name__, {})


def test_a_rank_that_dies_is_named(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed first:\ndied, exit code 7"):
        rank_pool.run(2, "dies_on_rank_0", __name__, {})


def test_a_death_comes_before_what_it_makes_the_others_say(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_late(connections: list[Connection], timeout: float) -> list[object]:
        time.sleep(1.0)  # rank 0 has told that its peer is gone, and stands first in the list
        return wait(connections, timeout)  # type: ignore[return-value]

    monkeypatch.setattr(ranks, "wait", wait_late)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed first:\ndied.*as well: rank 0"):
        rank_pool.run(2, "dies_on_rank_1", __name__, {})


def test_a_rank_that_aborts_says_where_it_was(
    rank_pool: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    rank_pool.close()  # ranks that are forked now write where this test looks
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed first.*-6.*_aborts_on_rank_1"):
        rank_pool.run(2, "aborts_on_rank_1", __name__, {})
    assert "libc10" in capfd.readouterr().err, "no frames of C++"


def test_ranks_that_hang_are_stopped_and_say_where_they_were(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_pool.run(2, "test_every_test_has_a_group_of_its_own", __name__, {})  # they are there
    monkeypatch.setattr(ranks, "TEST_TIMEOUT_S", 3.0)  # so long they have to begin the test
    with pytest.raises(RankError, match=r"(?s)hang for 3.0 s.*_hangs_on_rank_1"):
        rank_pool.run(2, "hangs_on_rank_1", __name__, {})
