"""The seam to torch.distributed: collectives, their tickets, and the Comms that tests use."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from eventually import eventually

from comms import EventLog, FakeComm, LateComm, Recording
from memswap.parallel.comm import Comm, ProcessGroupComm, ReduceOp, WorkTicket
from ranks import Rank, distributed

LATE = pytest.mark.parametrize("late", [False, True], ids=["async", "late"])


@distributed(2, 4)
@LATE
def test_all_gather_joins_several_tensors_in_one_collective(rank: Rank, late: bool) -> None:
    comm = rank.open_comm(late=late)
    inputs = [
        torch.full((3, 2), 1.0 + rank.rank),
        torch.full((1,), rank.rank, dtype=torch.bfloat16),
    ]
    outputs = [torch.empty(3 * rank.size, 2), torch.empty(rank.size, dtype=torch.bfloat16)]
    comm.all_gather(outputs, inputs, label="w").wait()
    for r in range(rank.size):
        assert torch.equal(outputs[0][3 * r : 3 * r + 3], torch.full((3, 2), 1.0 + r))
        assert outputs[1][r] == r
    assert rank.log.events == ["all_gather w", "wait all_gather w"]


@distributed(2, 4)
@LATE
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_reduce_scatter_reduces_several_tensors_in_one_collective(
    rank: Rank, late: bool, op: str
) -> None:
    comm = rank.open_comm(late=late)
    inputs = [torch.arange(2.0 * rank.size) * (rank.rank + 1), torch.ones(rank.size, 3)]
    outputs = [torch.empty(2), torch.empty(1, 3)]
    comm.reduce_scatter(outputs, inputs, op=op, label="g").wait()  # type: ignore[arg-type]
    ranks = sum(range(1, rank.size + 1))
    divisor = rank.size if op == "avg" else 1
    mine = torch.arange(2.0 * rank.size)[2 * rank.rank : 2 * rank.rank + 2]
    assert torch.equal(outputs[0], mine * ranks / divisor)
    assert torch.equal(outputs[1], torch.full((1, 3), rank.size / divisor))


@distributed(2, 4)
@LATE
def test_all_to_all_with_equal_and_unequal_parts(rank: Rank, late: bool) -> None:
    comm = rank.open_comm(late=late)
    output = torch.empty(rank.size, 2)
    send = torch.arange(2.0 * rank.size).view(rank.size, 2) + 100 * rank.rank
    comm.all_to_all(output, send).wait()
    for r in range(rank.size):
        assert torch.equal(output[r], torch.tensor([0.0, 1.0]) + 2 * rank.rank + 100 * r)
    # Rank r sends j + 1 rows to rank j.
    splits = [j + 1 for j in range(rank.size)]
    send = torch.full((sum(splits), 2), float(rank.rank))
    output = torch.empty((rank.rank + 1) * rank.size, 2)
    comm.all_to_all(output, send, [rank.rank + 1] * rank.size, splits).wait()
    expected = torch.arange(float(rank.size)).repeat_interleave(rank.rank + 1)
    assert torch.equal(output[:, 0], expected)


@distributed(2, 4)
@LATE
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_all_reduce_reduces_several_tensors_in_place(rank: Rank, late: bool, op: ReduceOp) -> None:
    tensors = [torch.full((count,), 1.0 + rank.rank, dtype=torch.float64) for count in (3, 1)]
    rank.open_comm(late=late).all_reduce(tensors, op=op, label="x").wait()
    expected = (rank.size + 1) / 2 * (rank.size if op == "sum" else 1)
    assert all(torch.equal(one, torch.full_like(one, expected)) for one in tensors)
    assert rank.log.events == ["all_reduce x", "wait all_reduce x"]


@distributed(2)
@LATE
def test_broadcast_is_from_a_rank_of_the_group(rank: Rank, late: bool) -> None:
    tensor = torch.full((3,), float(rank.rank))
    rank.open_comm(late=late).broadcast(tensor, 1).wait()
    assert torch.equal(tensor, torch.ones(3))


@distributed(2)
def test_a_ticket_may_be_waited_twice_and_then_holds_nothing(rank: Rank) -> None:
    tensor, output = torch.ones(4), torch.empty(8)
    ticket = ProcessGroupComm().all_gather([output], [tensor])
    gone = weakref.ref(tensor.untyped_storage())
    tensor = torch.ones(0)
    gc.collect()
    assert gone() is not None, "an input was freed under a collective"
    ticket.wait()
    ticket.wait()
    # Gloo's thread holds the input until it is scheduled again.
    assert eventually(lambda: gone() is None, collect=True), "a waited ticket still holds its input"


class Interrupted:
    """A Work whose wait ends early: as gloo's, it says nothing of that when it is asked again."""

    def __init__(self, error: BaseException) -> None:
        self.errors = [error]

    def wait(self) -> None:
        if self.errors:
            raise self.errors.pop()


def test_a_collective_that_failed_fails_each_wait() -> None:
    ticket = WorkTicket(Interrupted(RuntimeError("connection closed")), [torch.ones(1)])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="connection closed"):
            ticket.wait()


def test_an_interrupted_wait_can_be_waited_again() -> None:
    tensor = torch.ones(1)
    ticket = WorkTicket(Interrupted(KeyboardInterrupt()), [tensor])
    held = weakref.ref(tensor)
    del tensor
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert held() is not None, "memory was freed that a collective still writes"
    ticket.wait()
    assert held() is None


@distributed(2)
def test_a_ticket_keeps_its_tensors_until_it_is_waited(rank: Rank) -> None:
    # The only references: a network that reads late would read freed memory without the ticket's.
    output = torch.empty(2 * 4096)
    tickets = [
        rank.open_comm(late=True).all_gather([output], [torch.full((4096,), 1.0 + rank.rank)])
    ]
    torch.full((4096,), 9.0)
    tickets[0].wait()
    assert torch.equal(output, torch.tensor([1.0, 2.0]).repeat_interleave(4096))


@distributed(2)
def test_a_collective_is_no_inplace_edit_for_autograd(rank: Rank) -> None:
    output = torch.empty(2)
    version = output._version
    ProcessGroupComm().all_gather([output], [torch.ones(1, requires_grad=True)]).wait()
    assert output._version == version
    assert not output.requires_grad


@distributed(2)
def test_sizes_that_do_not_fit_raise_here_and_not_on_another_rank(rank: Rank) -> None:
    comm = ProcessGroupComm()
    with pytest.raises(ValueError, match=r"all_gather 'w': found 3 elements, expected 4"):
        comm.all_gather([torch.empty(3)], [torch.empty(2)], label="w")
    with pytest.raises(ValueError, match=r"reduce_scatter 'w': found 4 elements, expected 5"):
        comm.reduce_scatter([torch.empty(2)], [torch.empty(5)], label="w")


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        ProcessGroupComm()


# --- the late network notices what a fast one hides ---------------------------------------------


def _uses_before_the_wait(comm: Comm, n: int) -> torch.Tensor:
    output = torch.zeros(n * comm.size)
    ticket = comm.all_gather([output], [torch.full((n,), 1.0 + comm.rank)])
    seen = output.clone()
    ticket.wait()
    return seen


def _reuses_the_input_of_an_all_gather(comm: Comm, n: int) -> torch.Tensor:
    tensor, output = torch.full((n,), 1.0 + comm.rank), torch.empty(n * comm.size)
    ticket = comm.all_gather([output], [tensor])
    tensor.fill_(9.0)
    ticket.wait()
    return output


def _gathers_into_a_slot_in_use(comm: Comm, n: int) -> torch.Tensor:
    slot = torch.empty(n * comm.size)
    comm.all_gather([slot], [torch.full((n,), 1.0 + comm.rank)]).wait()
    ticket = comm.all_gather([slot], [torch.full((n,), 5.0 + comm.rank)])
    seen = slot.clone()
    ticket.wait()
    return seen


def _reuses_the_input_of_a_reduce_scatter(comm: Comm, n: int) -> torch.Tensor:
    tensor = torch.arange(1.0, comm.size + 1).repeat_interleave(n)
    output = torch.empty(n)
    ticket = comm.reduce_scatter([output], [tensor])
    tensor.fill_(9.0)
    ticket.wait()
    return torch.cat([output - comm.rank + r for r in range(comm.size)])


@distributed(2)
@pytest.mark.parametrize(
    "bug",
    [
        "_uses_before_the_wait",
        "_reuses_the_input_of_an_all_gather",
        "_gathers_into_a_slot_in_use",
        "_reuses_the_input_of_a_reduce_scatter",
    ],
)
def test_the_late_comm_finds_the_bug_every_time(rank: Rank, bug: str) -> None:
    n = 64
    right = torch.arange(1.0, rank.size + 1).repeat_interleave(n)
    for _ in range(10):
        wrong = globals()[bug](rank.open_comm(late=True), n)
        assert not torch.equal(wrong, right), f"{bug} went unnoticed"


# --- the pretended one --------------------------------------------------------------------------


def test_a_fake_comm_is_any_rank_of_64() -> None:
    log = EventLog()
    comm = Recording(FakeComm(63, 64), log)
    output, part = torch.empty(128), torch.empty(2)
    comm.all_gather([output], [torch.tensor([1.0, 2.0])], label="w").wait()
    comm.reduce_scatter([part], [output], op="sum", label="g").wait()
    assert torch.equal(output, torch.tensor([1.0, 2.0]).repeat(64))
    assert torch.equal(part, torch.tensor([64.0, 128.0]))
    assert log.events == [
        *("all_gather w", "wait all_gather w"),
        *("reduce_scatter g", "wait reduce_scatter g"),
    ]
    assert log.before("all_gather w", "reduce_scatter g") and log.count("wait") == 2


def test_late_and_fake_compose() -> None:
    comm = LateComm(FakeComm(0, 2))
    output = torch.zeros(2)
    ticket = comm.all_gather([output], [torch.ones(1)])
    assert output.isnan().all(), "a late output is poison until it is waited"
    ticket.wait()
    assert torch.equal(output, torch.ones(2))
