"""Mutations break what they say, count it, and are gone afterwards."""

from __future__ import annotations

import pytest
import torch
from simdev_models import train_language_model
from simdev_offload import Offload

import simdev
from simdev import Schedule, laboratory, mutations, run_in, schedules

DEVICE = simdev.NAME
EAGER_COLLECT = Schedule("eager", "eager", check="collect")
LAZY_OFF = Schedule("lazy", "lazy", check="off")


def current():
    return torch.accelerator.current_stream()


def train_under(schedule, make_mutation):
    """Parameters after training with a correct offloader on a broken machine, and the hits."""

    def body():
        offload = Offload()
        with make_mutation(offload.side) as mutation:
            result = train_language_model(DEVICE, forward_context=lambda: offload)
        assert mutation.hits > 0, "the mutation never struck"
        return result

    return run_in(schedule, body)


MUTATIONS = {
    "side does not wait": lambda side: mutations.drop_waits(waiter=side),
    "main does not wait": lambda side: mutations.drop_waits(waiter=0, source={side.stream_id}),
    "record_stream is dropped": lambda side: mutations.drop_record_stream(),
    "main allocates on side": lambda side: mutations.allocate_on(side, when=0),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_correct_program_on_a_broken_machine_is_caught_both_ways(name):
    reference = run_in(EAGER_COLLECT, train_language_model, DEVICE)
    with pytest.raises(AssertionError, match="race report") as caught:
        train_under(EAGER_COLLECT, MUTATIONS[name])
    assert len(caught.value.reports) > 0

    def is_wrong(schedule):
        try:
            result = train_under(schedule.with_check("off"), MUTATIONS[name])
        except (RuntimeError, IndexError):
            return True
        return not all(torch.equal(a, b) for a, b in zip(reference, result, strict=True))

    assert any(is_wrong(s) for s in schedules(6)), f"no schedule showed wrong data: {name}"


def test_drop_waits_matches_waiter_and_source():
    with laboratory(LAZY_OFF, allow_device_growth=True):
        main, one, two = current(), torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
        torch.ones(1, device=DEVICE)
        cases = [
            ({}, 3),
            ({"waiter": one}, 2),
            ({"waiter": [one, two]}, 3),
            ({"source": main}, 2),
            ({"waiter": one.stream_id, "source": two}, 1),
            ({"waiter": (1, one.stream_id)}, 0),
        ]
        for arguments, expected in cases:
            with mutations.drop_waits(**arguments) as mutation:
                one.wait_stream(main)
                two.wait_stream(main)
                one.wait_event(two.record_event())
                one.wait_stream(one)
            assert mutation.hits == expected, arguments
            one.wait_stream(main)
            assert mutation.hits == expected, "it still strikes after its block"


def test_a_dropped_wait_orders_neither_the_schedule_nor_the_clocks():
    def body(mutate):
        main, side = current(), torch.Stream(device=DEVICE)
        x = torch.full((64,), 2.0, device=DEVICE)
        host = torch.empty(64, pin_memory=True)
        with mutations.drop_waits(side, main) if mutate else mutations.lying_queries():
            side.wait_stream(main)
        with side:
            host.copy_(x, non_blocking=True)
        side.synchronize()
        value = host[0].item()
        main.wait_stream(side)
        main.synchronize()
        return value

    assert run_in(LAZY_OFF, body, False) == 2.0
    assert run_in(LAZY_OFF, body, True) != 2.0
    with pytest.raises(AssertionError, match=r"'copy_d2h' .* is not ordered after"):
        run_in(EAGER_COLLECT, body, True)


def test_lying_queries_answer_true_and_order_nothing():
    with laboratory(LAZY_OFF, allow_device_growth=True, allow_pinned_growth=True):
        host = torch.zeros(4, pin_memory=True)
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        event = current().record_event()
        with mutations.lying_queries(source=torch.Stream(device=DEVICE)) as elsewhere:
            assert not event.query()
        assert elsewhere.hits == 0
        with mutations.lying_queries() as mutation:
            assert event.query() and current().query()
        assert mutation.hits == 2
        assert host.tolist() == [0.0] * 4
        assert not event.query()


def test_a_lying_query_leaves_the_host_unordered_for_the_detector():
    def body():
        host = torch.zeros(4, pin_memory=True)
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        with mutations.lying_queries():
            assert current().record_event().query()
        simdev.host_access(host, name="codec")
        torch.accelerator.synchronize()

    with pytest.raises(AssertionError, match="'codec' \\(read, host\\)"):
        run_in(EAGER_COLLECT, body)


def test_dropped_synchronizes_return_at_once():
    with laboratory(LAZY_OFF, allow_device_growth=True, allow_pinned_growth=True):
        host = torch.zeros(4, pin_memory=True)
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        other = torch.Stream(device=DEVICE)
        with mutations.drop_synchronizes(source=current()) as mutation:
            other.synchronize()
            assert mutation.hits == 0
            current().record_event().synchronize()
            current().synchronize()
            assert mutation.hits == 2 and host.tolist() == [0.0] * 4
        current().synchronize()
        assert host.tolist() == [1.0] * 4


def test_allocate_on_moves_memory_to_another_streams_pool():
    with laboratory(LAZY_OFF):
        side = torch.Stream(device=DEVICE)
        with mutations.allocate_on(side, when=current()) as mutation:
            x = torch.empty(1000, device=DEVICE)
            assert mutation.hits == 1
            with side:
                torch.empty(1000, device=DEVICE)
            assert mutation.hits == 1
        pointer = x.data_ptr()
        del x
        assert torch.empty(1000, device=DEVICE).data_ptr() != pointer
        with side:
            assert torch.empty(1000, device=DEVICE).data_ptr() == pointer


def test_a_laboratory_removes_mutations_that_were_left():
    with pytest.raises(ZeroDivisionError), laboratory(LAZY_OFF):
        simdev._C.mutate_lying_queries()
        1 / 0  # noqa: B018
    with laboratory(LAZY_OFF, allow_device_growth=True):
        torch.ones(1, device=DEVICE)
        assert not current().query()
