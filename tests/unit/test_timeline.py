"""Timeline: what one iteration predicts about the next, without tensors."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from memswap._native import native
from memswap.engine.entry import NEEDED_AT_ONCE, NEVER_FREED

ENGINE = native.Engine(0)
Iteration, Timeline = native.Iteration, native.Timeline


def new_entry():
    """An entry of no particular storage."""
    tensor = torch.empty(1)
    return native.Entry(ENGINE, native.capture(tensor), native.StorageRef(tensor))


def forward(timeline, sizes):
    """An iteration in which storages of these sizes were saved; the verdicts; the entries."""
    iteration = timeline.begin()
    verdicts, entries = [], []
    for nbytes in sizes:
        verdicts.append(iteration.admit(nbytes))
        entries.append(new_entry())
        iteration.place(entries[-1])
    return iteration, verdicts, entries


def backward(iteration, entries, order):
    """The indices that each demand asked for ahead."""
    return [[entry.index for entry in iteration.demand(i)] for i in order]


def plan_of(fetches, count):
    """A plan that knows so many storages, and what their demands bring back."""
    places = [
        ("", index, 50, torch.uint8, "keep", (), (), fetches.get(index, ()), False, None)
        for index in range(count)
    ]
    pool = native.make_host_pool(torch.device("cpu"), 0, 1 << 20)
    sender = native.BlockSender(native.WorkerLane(workers=0), pool)
    return native.Plan(torch.device("cpu"), sender, 0, places)


def reverse(sizes):
    return list(reversed(range(len(sizes))))


def test_nothing_is_known_in_the_first_iteration():
    timeline = Timeline(100)
    _, verdicts, _ = forward(timeline, [50, 50, 50])
    assert verdicts == [None] * 3


def test_first_backward_expects_the_reverse_order():
    iteration, _, entries = forward(Timeline(100), [50] * 5)
    assert backward(iteration, entries, [4, 3, 2, 1, 0]) == [[3, 2], [1], [0], [], []]


def test_window_of_zero_asks_for_nothing_ahead():
    timeline = Timeline(0)
    for _ in range(2):
        iteration, verdicts, entries = forward(timeline, [50] * 4)
        assert verdicts == [None] * 4
        assert backward(iteration, entries, [3, 2, 1, 0]) == [[], [], [], []]


def test_what_backward_wants_first_stays_up_to_the_window():
    timeline = Timeline(120)
    sizes = [50] * 5
    iteration, _, entries = forward(timeline, sizes)
    backward(iteration, entries, reverse(sizes))
    iteration, verdicts, entries = forward(timeline, sizes)
    assert verdicts == [None, None, None, NEEDED_AT_ONCE, NEEDED_AT_ONCE]


def test_prediction_follows_the_recorded_order_not_the_order_of_saving():
    timeline = Timeline(50)
    sizes = [50] * 4
    order = [1, 3, 0, 2]
    iteration, _, entries = forward(timeline, sizes)
    backward(iteration, entries, order)
    iteration, verdicts, entries = forward(timeline, sizes)
    assert verdicts == [None, NEEDED_AT_ONCE, None, None]
    assert backward(iteration, entries, order) == [[3], [0], [2], []]


def test_each_storage_is_asked_for_once():
    timeline = Timeline(100)
    sizes = [40, 10, 30, 50, 20]
    for _ in range(3):
        iteration, _, entries = forward(timeline, sizes)
        asked = [i for ahead in backward(iteration, entries, reverse(sizes)) for i in ahead]
        assert len(asked) == len(set(asked)), "a storage was asked for twice"


@pytest.mark.parametrize("window", [0, 10, 35, 60, 150])
def test_bytes_ahead_never_exceed_the_window(window):
    timeline = Timeline(window)
    sizes = [40, 10, 30, 50, 20, 10, 10]
    for _ in range(3):
        iteration, _, alive = forward(timeline, sizes)
        assert len(alive) == len(sizes)  # an iteration knows its entries weakly
        waiting: set[int] = set()
        for index in reverse(sizes):
            waiting.discard(index)
            waiting.update(entry.index for entry in iteration.demand(index))
            assert sum(sizes[i] for i in waiting) <= window


@pytest.mark.parametrize(
    ("groups", "order"),
    [
        ([None, None, None], [2, 1, 0]),
        ([0, 0, 2, 2, 2, None, 6], [6, 5, 2, 3, 4, 0, 1]),
        ([3], [0]),
    ],
    ids=["saved tensors: last saved first", "regions replay their forward", "one"],
)
def test_the_first_guess_goes_back_by_regions(groups, order):
    iteration = Iteration(1 << 20)
    entries = [new_entry() for _ in groups]
    for group, entry in zip(groups, entries, strict=True):
        iteration.admit(1, group=group)
        iteration.place(entry)
    assert [entry.index for entry in iteration.demand(order[0])] == order[1:]


def test_second_demand_of_the_same_storage_asks_for_nothing():
    iteration, _, entries = forward(Timeline(100), [50] * 4)
    assert entries
    assert iteration.demand(3)
    assert iteration.demand(3) == [], "a retained graph's second backward prefetches again"
    assert iteration.order == [3]


def test_changed_sizes_end_the_guessing_from_there_on():
    timeline = Timeline(100)
    iteration, _, entries = forward(timeline, [50] * 4)
    backward(iteration, entries, [3, 2, 1, 0])
    _, verdicts, _ = forward(timeline, [50, 60, 50, 50])
    assert verdicts == [None] * 4, "a forecast for other sizes was believed"


def test_longer_and_shorter_iterations_than_the_forecast():
    timeline = Timeline(60)
    for count in (4, 6, 2, 1, 5, 5):
        sizes = [50] * count
        iteration, _, entries = forward(timeline, sizes)
        asked = [i for ahead in backward(iteration, entries, reverse(sizes)) for i in ahead]
        assert set(asked) <= set(range(count))


def test_what_was_held_is_not_sent_again():
    timeline = Timeline(0)
    iteration, _, entries = forward(timeline, [50] * 3)
    iteration.note_held(1)
    backward(iteration, entries, [2, 1, 0])
    _, verdicts, _ = forward(timeline, [50] * 3)
    assert verdicts == [None, NEVER_FREED, None]


def test_iteration_without_backward_teaches_nothing():
    timeline = Timeline(50)
    sizes = [50] * 3
    iteration, _, entries = forward(timeline, sizes)
    backward(iteration, entries, [2, 1, 0])
    forward(timeline, [10, 20])  # evaluation with grad, dropped
    _, verdicts, _ = forward(timeline, sizes)
    assert verdicts == [None, None, NEEDED_AT_ONCE]


def test_several_iterations_alive_at_once():
    """1F1B: the forecast comes from the last iteration whose backward began."""
    timeline = Timeline(50)
    sizes = [50] * 3
    iterations = [forward(timeline, sizes) for _ in range(3)]
    for iteration, _, entries in iterations:
        assert backward(iteration, entries, [2, 1, 0]) == [[1], [0], []]
    _, verdicts, _ = forward(timeline, sizes)
    assert verdicts == [None, None, NEEDED_AT_ONCE]


def test_dead_entries_are_not_asked_for():
    iteration, _, entries = forward(Timeline(1000), [50] * 4)
    entries[1] = None
    gc.collect()
    assert [entry.index for entry in iteration.demand(3)] == [2, 0]


def test_began_backward():
    iteration, _, entries = forward(Timeline(0), [1, 1])
    assert entries and not iteration.began_backward
    iteration.demand(0)
    assert iteration.began_backward


@pytest.mark.parametrize(
    ("sizes", "window_bytes", "expected"),
    [([], None, 0), ([100, 10], None, 100), ([10] * 80, None, 100), ([10] * 80, 7, 7)],
)
def test_automatic_window_is_an_eighth_and_never_less_than_the_largest(
    sizes, window_bytes, expected
):
    iteration, _, _ = forward(Timeline(window_bytes), sizes)
    assert iteration.window_bytes == expected


def test_automatic_window_is_shorter_for_what_is_decoded():
    iteration = Timeline(None).begin()
    for _ in range(320):
        iteration.admit(10, decoded=True)
    assert iteration.window_bytes == 100, "a thirty-second of what is encoded"
    iteration.admit(800)
    assert iteration.window_bytes == 800
    iteration.admit(800, decoded=True)
    assert iteration.window_bytes == 1000, "the largest and what is around it"


def layered(timeline, rooms, count=40):
    """An iteration of two decoded storages to a window each way, as its backward has left it."""
    iteration = timeline.begin()
    entries = []
    for index in range(count):
        if index % 2 == 0:
            iteration.open_window(0)
        iteration.admit(50, decoded=True)
        entries.append(new_entry())
        iteration.place(entries[-1])
    for index in reversed(range(count)):
        if index % 2 == 1:
            iteration.open_window(rooms(index))
        iteration.demand(index)
    return iteration


@pytest.mark.parametrize("room_bytes", [0, 100, 1000])
def test_decodes_are_ahead_by_the_demands_of_two_windows(room_bytes):
    iteration = layered(Timeline(None), lambda index: room_bytes)
    assert iteration.bytes_ahead == (2 + 2 + 1) * 50, "one lies beside its frame"
    assert iteration.own_window_bytes == 250
    assert iteration.least_window_bytes == 62, "without windows, the largest and what is around it"


def test_before_the_first_backward_the_windows_of_the_forward_say_how_far_ahead():
    iteration = Timeline(None).begin()
    assert iteration.bytes_ahead == 0
    for index in range(40):
        if index % 2 == 0:
            iteration.open_window(0)
        iteration.admit(50, decoded=True)
    assert iteration.own_window_bytes == 250


def test_windows_too_short_for_their_decodes_are_made_up_for_by_earlier_ones():
    # Each window has room for two decodes. That of 15 has none: its two are due a window earlier.
    even = layered(Timeline(None), lambda index: 100)
    one_short = layered(Timeline(None), lambda index: 1 if index == 15 else 100)
    assert one_short.bytes_ahead == even.bytes_ahead + 100
    starved = layered(Timeline(None), lambda index: 1)
    assert starved.bytes_ahead > 1000, "decodes that never keep up begin at once"
    assert starved.own_window_bytes == 500, "within a quarter of what is encoded"


def test_an_operator_that_was_not_measured_says_nothing_about_time():
    iteration = layered(Timeline(None), lambda index: 0 if index == 15 else 1)
    assert iteration.bytes_ahead == 250


def test_prefetch_bytes_bounds_what_windows_would_need():
    assert layered(Timeline(70), lambda index: 100).own_window_bytes == 70


def test_windows_with_nothing_between_them_are_one():
    iteration = Timeline(None).begin()
    for _ in range(20):
        for _ in range(3):
            iteration.open_window(0)
        iteration.admit(50, decoded=True)
        iteration.admit(50, decoded=True)
    assert iteration.bytes_ahead == 250


def test_a_decoded_storage_in_use_is_part_of_the_window():
    iteration = Timeline(100).begin()
    entries = [new_entry() for _ in range(6)]
    for entry in entries:
        iteration.admit(50, decoded=True)
        iteration.place(entry)
    assert backward(iteration, entries, [5, 4, 3]) == [[4], [3], [2]]
    iteration = Timeline(10).begin()
    entries = [new_entry() for _ in range(6)]
    for entry in entries:
        iteration.admit(50, decoded=True)
        iteration.place(entry)
    assert backward(iteration, entries, [5, 4, 3]) == [[], [], []]


def test_bytes_that_may_leave_at_once_are_the_window_and_never_less_than_one_storage():
    iteration, _, _ = forward(Timeline(30), [50, 10])
    assert iteration.leaving_bytes == 50
    iteration, _, _ = forward(Timeline(300), [50, 10])
    assert iteration.leaving_bytes == 300


def test_what_was_never_demanded_is_expected_last_the_last_saved_first():
    timeline = Timeline(50)
    iteration, _, entries = forward(timeline, [50] * 5)
    backward(iteration, entries, [2, 0])
    iteration, _, entries = forward(timeline, [50] * 5)
    assert backward(iteration, entries, [2, 0, 4, 3, 1]) == [[0], [4], [3], [1], []]


# --- the native books -----------------------------------------------------------------------------


def test_a_plan_says_what_comes_back_in_the_window_s_place():
    iteration, _, entries = forward(Timeline(100), [50] * 4)
    iteration.plan = plan_of({3: (0, 2), 2: (3, 1)}, 4)
    assert iteration.returns_as_planned
    assert backward(iteration, entries, [3, 2, 1, 0]) == [[0, 2], [1], [], []]


@pytest.mark.parametrize("planned", [3, 5])
def test_a_plan_for_other_storages_leaves_the_window_in_its_place(planned):
    iteration, _, entries = forward(Timeline(100), [50] * 4)
    iteration.plan = plan_of({2: (0,)}, planned)
    assert not iteration.returns_as_planned
    assert backward(iteration, entries, [3, 2, 1, 0]) == [[2, 1], [0], [], []]


def test_storages_that_are_saved_during_backward_are_expected_too():
    iteration, _, entries = forward(Timeline(1000), [50] * 2)
    assert [entry.index for entry in iteration.demand(1)] == [0]
    iteration.admit(50)
    entries.append(new_entry())
    iteration.place(entries[-1])
    assert iteration.demand(2) == [entries[0]]
    assert iteration.order == [1, 2]


def test_an_entry_has_one_place_and_only_what_was_admitted_has_one():
    iteration = Timeline(0).begin()
    entry = new_entry()
    with pytest.raises(ValueError, match="admitted last"):
        iteration.place(entry)
    iteration.admit(1)
    iteration.place(entry)
    iteration.admit(1)
    with pytest.raises(ValueError, match="without an iteration"):
        iteration.place(entry)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        iteration.place(object())
    assert (entry.iteration, entry.index) == (iteration, 0)
    assert iteration.entry(1) is None, "a storage whose entry was never made has one"


@pytest.mark.parametrize("ask", ["demand", "was_demanded", "entry"])
def test_a_place_that_an_iteration_does_not_have_is_an_error(ask):
    iteration, _, entries = forward(Timeline(0), [1])
    assert entries
    for wrong in (1, -1):
        with pytest.raises(IndexError, match=f"of 1 storages, found {wrong}"):
            getattr(iteration, ask)(wrong)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        getattr(iteration, ask)("0")
    assert not iteration.began_backward


def test_iterations_and_entries_leave_nothing_behind():
    def step():
        timeline = Timeline(100)
        for _ in range(2):
            iteration, _, entries = forward(timeline, [50] * 4)
            backward(iteration, entries, [3, 1, 2, 0])

    for _ in range(10):
        step()
    gc.collect()
    objects, known = len(gc.get_objects()), ENGINE.ledger.known_storages
    for _ in range(1000):
        step()
    gc.collect()
    assert len(gc.get_objects()) <= objects + 20, "iterations are kept for ever"
    assert ENGINE.ledger.known_storages == known


def test_entries_that_die_in_other_threads_are_found_by_nobody():
    iteration, _, entries = forward(Timeline(10**6), [50] * 400)

    def drop():
        for _ in range(100):
            entries.pop(0)

    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for index in range(400):
            found = iteration.entry(index)
            assert found is None or found.index == index
        del found
    for thread in threads:
        thread.join()
    assert [entry.index for entry in iteration.demand(399)] == list(reversed(range(300, 399)))
