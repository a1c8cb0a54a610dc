"""Runs a test's body in several processes that form a gloo group, in seconds and never hanging.

    @distributed(2, 4)                       # one test for 2 ranks, one for 4
    @pytest.mark.parametrize("late", [False, True])
    def test_sums(rank: Rank, late: bool) -> None:
        ...

The body runs in every rank process; it is a function of its module, and its arguments can be
pickled. Rank processes are forked once and used for many tests, each of which gets a process group
of its own under a prefix of one store. After a failure they are killed and forked anew, so what a
failed test left behind meets no other. The failure that is reported is the one that came first:
when a rank stops, the others fail or wait for it, and what they say is noise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import itertools
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from comms import EventLog, LateComm, Recording
from memswap.parallel.comm import Comm, ProcessGroupComm

#: A collective that waits longer for its peers raises.
COLLECTIVE_TIMEOUT_S = 20.0

#: A test that takes longer is stopped, and says where every rank was.
TEST_TIMEOUT_S = 60.0

#: How long the others may take to fail as well once one rank has.
GRACE_S = 0.3


@dataclass
class Rank:
    """What a test's body gets: who it is, and ways to talk to the others."""

    rank: int
    size: int
    log: EventLog = field(default_factory=EventLog)

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """A 1-D mesh of all ranks, named "wp"."""
        return init_device_mesh("cpu", (self.size,), mesh_dim_names=("wp",))

    def open_comm(
        self, group: dist.ProcessGroup | None = None, *, late: bool = False, record: bool = True
    ) -> Comm:
        """A Comm on the group, or on that of all ranks; late if asked; recording into ``log``."""
        comm: Comm = ProcessGroupComm(group)
        comm = LateComm(comm) if late else comm
        return Recording(comm, self.log) if record else comm

    def same_everywhere(self, value: object, what: str) -> None:
        """Fails unless all ranks have equal values."""
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        for other, theirs in enumerate(values):
            assert theirs == values[0], f"{what}: rank {other} has {theirs}, rank 0 {values[0]}"


class RankError(AssertionError):
    """A rank's failure, as told by the rank."""


@dataclass
class Failure:
    """What ended a rank's test, and whether the rank itself is gone."""

    rank: int
    text: str
    skipped: str | None = None
    died: bool = False


class RankPool:
    """Rank processes that wait for tests to run."""

    def __init__(self) -> None:
        self._context = mp.get_context("fork")
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="memswap-ranks-")
        # Who waits for a key is woken by it: a FileStore is asked again and again, 10 ms apart, and
        # each group of processes is made by dozens of keys.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._serial = itertools.count()

    def run(self, world: int, body: str, module: str, arguments: dict[str, Any]) -> None:
        """Run ``module.body(rank, **arguments)`` on ``world`` ranks; raise the first failure."""
        while len(self._ranks) < world:
            self._ranks.append(self._fork(len(self._ranks)))
        ranks = self._ranks[:world]
        prefix = str(next(self._serial))
        deadline = time.monotonic() + TEST_TIMEOUT_S
        for _, connection in ranks:
            connection.send((world, prefix, module, body, arguments))
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
        failures: list[Failure] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for one in ready:
                assert isinstance(one, Connection)
                rank = waiting.pop(one)
                try:
                    outcome = one.recv()
                except EOFError:
                    failures.append(self._death_of(rank))
                else:
                    if outcome is None:
                        continue
                    failures.append(Failure(rank, *outcome))
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not failures and not waiting:
            return
        stacks = self._stacks(sorted(waiting.values())) if waiting and not failures else ""
        self.close()
        if not failures:
            raise RankError(f"ranks {sorted(waiting.values())} hang for {TEST_TIMEOUT_S} s{stacks}")
        # What a lost peer makes the others say may be here before its end is seen.
        first, *rest = sorted(failures, key=lambda failure: not failure.died)
        others = ", ".join(str(failure.rank) for failure in rest)
        noise = f"\n(then failed as well: rank {others})" if others else ""
        if first.skipped is not None:
            pytest.skip(first.skipped)
        raise RankError(f"rank {first.rank} of {world} failed first:\n{first.text}{noise}")

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks.clear()

    def _fork(self, rank: int) -> tuple[Any, Connection]:
        mine, theirs = self._context.Pipe()
        others = [connection for _, connection in self._ranks] + [mine]
        arguments = (rank, theirs, self._store.port, self._stacks_of(rank), others)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, mine

    def _death_of(self, rank: int) -> Failure:
        """What a rank that is gone left behind."""
        process = self._ranks[rank][0]
        process.join(5)
        where = self._stacks_of(rank).read_text()  # of a signal such as SIGABRT
        return Failure(rank, f"died, exit code {process.exitcode}\n{where}", died=True)

    def _stacks_of(self, rank: int) -> Path:
        """Where it writes what its threads do."""
        return Path(self._folder.name) / f"stacks-{rank}"

    def _stacks(self, ranks: list[int]) -> str:
        """Where these ranks are now."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        files = [self._stacks_of(rank) for rank in ranks]
        deadline = time.monotonic() + 10
        lengths, before = [0], None
        while (0 in lengths or lengths != before) and time.monotonic() < deadline:
            time.sleep(GRACE_S)  # they are written piece by piece
            before, lengths = lengths, [file.stat().st_size for file in files]
        texts = [file.read_text() for file in files]
        return "".join(f"\nrank {rank}:\n{text}" for rank, text in zip(ranks, texts, strict=True))


def _serve(
    rank: int, connection: Connection, port: int, stacks: Path, others: list[Connection]
) -> None:
    """The main loop of a rank process."""
    for other in others:  # or else a rank that lives would hide that another one died
        other.close()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # C++'s, behind Python's
        faulthandler.enable(file, all_threads=True)
        while True:
            try:
                world, prefix, module, body, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            test = getattr(sys.modules[module], body)
            connection.send(_run(rank, world, dist.PrefixStore(prefix, store), test, arguments))


def _run(
    rank: int, world: int, store: dist.Store, test: Any, arguments: dict[str, Any]
) -> tuple[str, str | None] | None:
    """One test in a process group of its own: None, or what went wrong, or why it was skipped."""
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        torch.manual_seed(0)
        test.body(Rank(rank, world), **arguments)
        dist.barrier()  # nobody takes the group down under another one
        dist.destroy_process_group()
    except BaseException as error:
        return traceback.format_exc(), error.msg if isinstance(
            error, pytest.skip.Exception
        ) else None
    return None


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The session's rank processes."""
    pool = RankPool()
    yield pool
    pool.close()


def distributed(
    *worlds: int, slow: tuple[int, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test run its body in every process of a group, once for each number of ranks.

    Args:
        worlds: the numbers of ranks.
        slow: more numbers of ranks, which run with --slow.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(rank_pool: RankPool, world: int, **arguments: Any) -> None:
            rank_pool.run(world, test.__name__, test.__module__, arguments)

        functools.update_wrapper(test, body)
        del test.__wrapped__  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        own = list(inspect.signature(body).parameters.values())[1:]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        extra = [inspect.Parameter(name, kind) for name in ("rank_pool", "world")]
        test.__signature__ = inspect.Signature([*extra, *own])  # type: ignore[attr-defined]
        each = [pytest.param(world, id=f"{world}ranks") for world in worlds]
        each += [pytest.param(one, id=f"{one}ranks", marks=pytest.mark.slow) for one in slow]
        return pytest.mark.parametrize("world", each)(test)

    return decorate
