"""Steps as files, and the replay of simple ones against what can be worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from steps import ALL, RATES, saved, stack

from memswap import Action, Rates
from memswap.cli.step_file import load, save
from memswap.planning.replay import replay, timetable
from memswap.planning.step import Recipe, Step
from memswap.reports.step_report import trace


def with_recipes(step: Step, sources: dict[int, tuple[int, ...]], seconds: float = 1e-4) -> Step:
    """The same step where some storages are made of others by an operator."""
    storages = list(step.storages)
    for index, read in sources.items():
        storages[index] = replace(
            storages[index],
            actions=(*storages[index].actions, Action.RECOMPUTE),
            recipe=Recipe("silu of gate", read, seconds),
        )
    return replace(step, storages=tuple(storages))


def test_a_step_survives_its_file(tmp_path):
    step, file = with_recipes(stack([10, 20, 30], actions=ALL), {2: (0, 1)}), tmp_path / "step.json"
    save(step, RATES, file)
    assert load(file) == (step, RATES)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"memswap_step": 1}', '{"memswap_step": 6, "step": {}, "rates": {}}'],
)
def test_a_file_that_is_no_step_is_refused_by_its_name(tmp_path, content):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json"):
        load(file)


@pytest.mark.parametrize(
    ("order", "gaps", "words"),
    [
        ((0, 0), 4, "once"),
        ((0, 5), 4, "once"),
        ((1, 0), 3, "4 marks"),
        ((0, 1), 4, "first demanded at mark"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(order, gaps, words):
    storages = (saved(1, 1, 3), saved(1, 2, 2))
    with pytest.raises(ValueError, match=words):
        Step(storages, order, (0.0,) * gaps)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nbytes": -1}, "-1 bytes"),
        ({"nbytes": 1 << 62}, "bytes"),
        ({"held_until": -2}, "mark -2"),
        ({"gaps_s": float("nan")}, "seconds"),
        ({"gaps_s": float("inf")}, "seconds"),
    ],
)
def test_a_step_of_numbers_that_no_step_has_is_not_replayed(change, words):
    """Steps stand in files that others wrote."""
    step = stack([1000, 1000, 1000])
    if "gaps_s" in change:
        step = replace(step, gaps_s=(change["gaps_s"], *step.gaps_s[1:]))
    else:
        step = replace(step, storages=(replace(step.storages[0], **change), *step.storages[1:]))
    with pytest.raises(ValueError, match=words):
        replay(step, RATES, {0: Action.SWAP}, 2000)


def test_a_storage_that_is_kept_beyond_the_last_mark_is_there_to_the_end():
    step = stack([1000, 1000, 1000])
    late = replace(step.storages[0], kept_until=2**31 - 1)
    assert replay(replace(step, storages=(late, *step.storages[1:])), RATES, {}).peak_bytes == 3000


def test_one_swap_by_hand():
    """1000 bytes take 1 ms each way; layers 1 ms forward and 2 ms backward."""
    step = stack([1000, 1000, 1000])
    found = replay(step, RATES, {0: Action.SWAP}, 2000)
    # Saved at 1 ms, sent until 2 ms; room for the third is needed when the second is saved, at 2.
    assert found.releases == [(1, 0)] and found.total_exposed_s == 0
    assert found.peak_bytes == 2000
    assert found.fetches == [(1, 0)], "half the speed needs the two milliseconds before its use"
    slow = Rates("slow", 2.5e5, 2.5e5, 2.5e5, 2.5e5, copy_latency_s=0.0)
    found = replay(step, slow, {0: Action.SWAP}, 2000)
    # 4 ms each way: sent until 5 ms, 3 ms too late; back 4 ms after its fetch.
    assert found.exposed_s[0] == pytest.approx(3e-3 + 2e-3)


def test_copies_by_the_processors_that_compute_are_not_free():
    """A third of a copy's millisecond is taken from compute, each way, though nobody waits."""
    rates = replace(RATES, copy_share=1 / 3)
    found = replay(stack([1000, 1000, 1000]), rates, {0: Action.SWAP}, 2000)
    assert found.exposed_s == [pytest.approx(2e-3 / 3), 0, 0]
    # A wait is no compute: 4 ms each way, of which compute works beside for what it has to do.
    slow = replace(RATES, d2h_bytes_per_s=2.5e5, h2d_bytes_per_s=2.5e5)
    waiting = replay(stack([1000, 1000, 1000]), slow, {0: Action.SWAP}, 2000)
    shared = replay(stack([1000] * 3), replace(slow, copy_share=1 / 4), {0: Action.SWAP}, 2000)
    assert waiting.total_exposed_s == pytest.approx(5e-3)
    assert shared.total_exposed_s == pytest.approx(5e-3), "a second was counted twice"


def test_what_is_recomputed_takes_no_bytes_and_the_time_of_its_recipe():
    step = with_recipes(stack([1000] * 3), {1: (0,)})
    found = replay(step, RATES, {1: Action.RECOMPUTE}, 2000)
    # Gone when the third is saved; back at its own demand, when the third has gone.
    assert found.resident_bytes == [1000, 2000, 2000, 2000, 2000, 1000]
    assert found.total_exposed_s == pytest.approx(1e-4)
    assert found.pooled_bytes == 0 and found.moved_bytes == 1000


def test_what_a_recipe_reads_is_back_when_it_runs_and_until_its_own_last_use():
    """0 is swapped, and comes back two demands early, for the recipe of 2, which reads 1 too."""
    step = with_recipes(stack([1000] * 4), {2: (0, 1), 1: (0,)})
    actions = {0: Action.SWAP, 1: Action.RECOMPUTE, 2: Action.RECOMPUTE}
    found = replay(step, RATES, actions, 2000)
    assert found.resident_bytes[:4] == [1000, 2000, 2000, 2000]
    # Demand of 3; of 2, which needs 0, 1 and itself; of 1; of 0.
    assert found.resident_bytes[4:] == [1000, 3000, 2000, 1000]
    assert found.fetches == [], "it comes back when it is needed, which is before its own demand"
    assert [index for index, seconds in enumerate(found.exposed_s) if seconds] == [0, 1, 2]


def test_what_stays_is_its_graphs_for_as_long_as_the_recipe_that_reads_it():
    """Backward uses 1 before 2, whose recipe reads 1 once more."""
    step = with_recipes(stack([1000] * 3), {2: (1,)})
    storages = (
        step.storages[0],
        replace(step.storages[1], last_demand=3),
        replace(step.storages[2], last_demand=5),
    )
    step = replace(
        step, storages=(replace(storages[0], last_demand=4), *storages[1:]), order=(1, 0, 2)
    )
    assert replay(step, RATES, {}, 3000).resident_bytes[3:] == [3000, 2000, 1000]
    found = replay(step, RATES, {2: Action.RECOMPUTE}, 3000)
    assert found.resident_bytes[3:] == [2000, 2000, 2000], "1 went although 2 needs it"


def test_recipes_that_lead_back_to_themselves_or_nowhere_are_refused():
    step = stack([1000] * 3)
    for sources, words in (({1: (2,), 2: (1,)}, "cycle"), ({1: (1,)}, "cycle")):
        with pytest.raises(ValueError, match=words):
            replay(with_recipes(step, sources), RATES, {})
    with pytest.raises(ValueError, match="indices of"):
        with_recipes(step, {1: (7,)})
    with pytest.raises(ValueError, match="no recipe"):
        replay(step, RATES, {1: Action.RECOMPUTE})


def test_codec_time_is_computes_and_frames_count():
    step = stack([1000, 1000], actions=ALL, held_frame=0.6)
    found = replay(step, RATES, {0: Action.ENCODE}, 1600)
    assert found.exposed_s[0] == pytest.approx(2e-4)
    assert found.peak_bytes == 1600 and found.resident_bytes[0] == 1600


def test_room_for_overflows_is_there_all_the_time_and_once_for_all_encodes():
    step = stack([1000] * 80, actions=ALL, held_frame=0.5, overflow=0.2)
    for count, counted in ((0, 0), (1, 1), (4, 4), (20, 4), (80, 5)):
        found = replay(step, RATES, dict.fromkeys(range(count), Action.ENCODE))
        assert found.arena_bytes == (200 * counted + 128 if counted else 0)
        assert min(found.resident_bytes) >= found.arena_bytes
    assert replay(step, RATES, {0: Action.SWAP}).arena_bytes == 0


def test_a_frame_in_transit_counts_until_compute_has_waited_for_its_copy():
    step = stack([1000] * 4, actions=ALL, held_frame=0.5)
    found = replay(step, RATES, {0: Action.ENCODE_SWAP}, 2600)
    # 1000 raw and 500 of the frame; the raw bytes go for the third storage, the frame for the last.
    assert found.resident_bytes[:4] == [1500, 2500, 2500, 3000]
    assert found.releases == [(1, 0)] and found.departures == [(2, 0)]


def test_codec_work_is_free_in_windows_and_costs_what_is_left_of_it_elsewhere():
    step = replace(
        stack([1000] * 3, actions=ALL, held_frame=0.5), windows_s=(0.0, 6e-5) + (0.0,) * 4
    )
    found = replay(step, RATES, {0: Action.ENCODE}, 2600)
    assert found.exposed_s[0] == pytest.approx(4e-5 + 1e-4)  # the rest of an encode, and a decode
    roomy = replace(step, windows_s=(1.0,) * 6)
    assert replay(roomy, RATES, {0: Action.ENCODE}, 2600).total_exposed_s == 0


def test_a_trace_has_a_lane_for_everything_and_counts_bytes():
    step = with_recipes(stack([1000] * 6, actions=ALL), {3: (2,)})
    actions = {0: Action.SWAP, 1: Action.ENCODE_SWAP, 2: Action.ENCODE, 3: Action.RECOMPUTE}
    replays = {
        "plain": timetable(step, RATES, {}),
        "memswap": timetable(step, RATES, actions, 4500),
    }
    content = json.loads(json.dumps(trace(replays)))
    events = content["traceEvents"]
    lanes = {
        event["args"]["name"]: event["tid"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == 2
    }
    assert {"compute", "codec", "recomputing", "copies away", "copies back"} <= lanes.keys()
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == 2 * 12
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    away = [e for e in spans if e["pid"] == 2 and e["tid"] == lanes["copies away"]]
    again = [e["name"] for e in spans if e["pid"] == 2 and e["tid"] == lanes["recomputing"]]
    assert again == ["silu of gate (3 #3)"], "what is run again has a lane of its own, by name"
    assert len(away) == 2, "the copies away are missing"
