"""Ledger and Stats: the accounting behind report()."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from memswap._native import native
from memswap.engine.stats import Count, snapshot
from memswap.hooks.report import MEANINGS, REASONS, report
from memswap.types import Stats


def test_snapshot_is_frozen_and_does_not_change_afterwards():
    ledger = native.Engine(0).ledger
    ledger.keep("small", 10)
    before = snapshot(ledger)
    ledger.keep("small", 5)
    ledger.offer(7)
    assert before.kept == {"small": Count(1, 10)} and before.offered_bytes == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.moved_bytes = 3
    with pytest.raises(TypeError):
        before.kept["small"] = Count()


def test_kept_tensors_and_bytes_add_up_by_reason():
    ledger = native.Engine(0).ledger
    for reason, nbytes in (("small", 1), ("pool", 100), ("small", 2), ("parameter", 0)):
        ledger.keep(reason, nbytes)
    kept = snapshot(ledger).kept
    assert kept == {"parameter": Count(1, 0), "pool": Count(1, 100), "small": Count(2, 3)}
    assert list(kept) == sorted(kept)


def test_every_counter_of_the_ledger_is_in_the_snapshot():
    class Counted:
        kept: ClassVar[dict[str, tuple[int, int]]] = {}
        counters = SimpleNamespace(
            **{
                name: value
                for value, name in enumerate(vars(native.Engine(0).ledger.counters), start=1)
            }
        )

    stats = snapshot(Counted)
    for name, value in vars(Counted.counters).items():
        assert getattr(stats, name) == value, f"{name} is counted and not reported"


def test_each_reason_is_told_once_even_after_a_reset():
    engine = native.Engine(0)
    ledger = engine.ledger
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            ledger.tell_once("pool", "no room")
            ledger.tell_once("pin", "no pinned memory")
            assert not told or len(told) == 2, "somebody was told before all was done"
            engine.tell()
            ledger.reset()
    assert [str(w.message) for w in told] == ["memswap: no room", "memswap: no pinned memory"]


def test_report_shows_every_reason_and_mebibytes():
    stats = Stats(
        offered_tensors=12,
        offered_bytes=3 << 20,
        kept={"small": Count(5, 1 << 19), "needed at once": Count(1, 2 << 20)},
        moved_storages=6,
        moved_bytes=7 << 20,
        stalls=9,
        exposed_wait_s=0.25,
    )
    lines = report(stats).splitlines()
    rows = {line[:42].strip(): line[42:].split() for line in lines}
    assert rows["offered by autograd"] == ["12", "3.0"]
    assert rows["kept: small"] == ["5", "0.5"]
    assert rows["kept: needed at once"] == ["1", "2.0"]
    assert rows["moved"] == ["6", "7.0"]
    assert rows["of these, when backward asked"] == ["9"]
    assert rows["host blocked, seconds"] == ["0.250"]
    assert len({len(line.rstrip()) for line in lines if "asked" not in line}) <= 3


def test_a_report_is_a_table_in_a_notebook_and_text_elsewhere():
    stats = Stats(offered_tensors=12, moved_storages=6, kept={"<small>": Count(5, 1 << 19)})
    found = report(stats).below("units: 2 Block & others")
    assert str(found).startswith("units: 2 Block & others\n")
    html = found._repr_html_()
    assert html.startswith("<p>units: 2 Block &amp; others</p><table>")
    assert "<td>5</td><td>0.5</td>" in html and "&lt;small&gt;" in html
    assert html.count("<tr") == html.count("</tr>") == len(found.splitlines()) - 1
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again._repr_html_() == html
    assert report(Stats())._repr_html_().startswith("<p>nothing yet")


def test_every_row_of_a_report_is_explained():
    page = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"
    told = page.read_text("utf-8").replace("`", "")
    kept = {reason: Count(5, 1 << 19) for reason in REASONS}
    stats = Stats(offered_tensors=1, recipe_storages=1, kept=kept)
    labels = [line[:42].strip() for line in report(stats).splitlines()[1:]]
    for label in labels:
        if not label.startswith("kept: "):
            assert f"| {label} | {MEANINGS[label]}" in told, f"docs/choosing.md lacks {label!r}"
    for reason, meaning in REASONS.items():
        assert f"| {reason} | {meaning} |" in told, f"it lacks {reason!r}"
    assert report(stats)._repr_html_().count('title=""') == 0, "a row has no explanation"


def test_ratio_is_that_of_raw_to_encoded_bytes():
    assert Stats(encoded_bytes=300, frame_bytes=200).ratio == 1.5
    assert Stats().ratio == 1.0
