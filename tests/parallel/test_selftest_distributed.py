"""The self-test finds networks that do not do what they should."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from comms import FakeComm
from memswap.cli import selftest
from memswap.cli.selftest_distributed import check_lanes
from memswap.parallel.comm import Comm, ProcessGroupComm, Ticket
from ranks import Rank, distributed

CPU = torch.device("cpu")


@distributed(2, 4)
@pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
def test_a_good_network_passes(rank: Rank, late: bool) -> None:
    results = dict(check_lanes(rank.open_comm(late=late), CPU, "the same"))
    assert len(results) == 9 and not any(results.values()), results


class Zeros(ProcessGroupComm):
    """An all-to-all that delivers zeros, as a broken driver did."""

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        label: str = "",
    ) -> Ticket:
        ticket = super().all_to_all(output, input, output_splits, input_splits, label=label)
        ticket.wait()
        output.zero_()
        return ticket


@distributed(2)
def test_an_exchange_that_delivers_zeros_is_named(rank: Rank) -> None:
    results = dict(check_lanes(Zeros(), CPU))
    wrong = {name for name, problem in results.items() if problem}
    assert wrong == {"all-to-all", "all-to-all, unequal parts"}
    assert f"rank {rank.rank} of 2 found zeros only" in results["all-to-all"]


@distributed(2)
def test_ranks_of_different_versions_are_noticed(rank: Rank) -> None:
    results = dict(check_lanes(rank.open_comm(), CPU, f"version {rank.rank}"))
    assert (
        f"rank {rank.rank} has 'version {rank.rank}'; ranks [{1 - rank.rank}] do not"
        in (results["same configuration on all ranks"])
    )


def test_an_exchange_that_raises_ends_the_check() -> None:
    class Raises(FakeComm):
        def all_gather(self, *args: object, **kwargs: object) -> Ticket:
            raise RuntimeError("no route to host")

    comm: Comm = Raises(0, 2)
    assert list(check_lanes(comm, CPU)) == [("all-gather", "RuntimeError: no route to host")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    selftest.add_arguments(parser)
    return parser.parse_args(["--distributed", "--timeout", "20"])


@distributed(2)
def test_the_command_passes_under_torchruns_environment(rank: Rank) -> None:
    """Ranks find one another by a store that is there already, as torchrun's own."""
    store = dist.TCPStore("localhost", 0, is_master=True) if rank.rank == 0 else None
    port = [0 if store is None else store.port]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    torchruns = {
        "RANK": str(rank.rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port[0]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.update(torchruns)
    try:
        assert selftest.run(_arguments()) == 0
    finally:
        for name in torchruns:
            del os.environ[name]
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())


def test_without_torchrun_the_command_says_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert selftest.run(_arguments()) == 2
    assert "torchrun --nproc-per-node 2 -m memswap selftest" in capsys.readouterr().err
