"""Rates are measured once per machine, and a file that is not ours is measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memswap
from memswap import Rates
from memswap.planning import profile as module
from memswap.planning import sharing

CPU = torch.device("cpu")
LINK_RATES = [f"{way}_bytes_per_s" for way in ("d2h", "h2d", "duplex_d2h", "duplex_h2d")]


@pytest.fixture
def count(monkeypatch, tmp_path):
    """A cache of its own, and a measurement that is counted instead of made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[torch.device] = []

    def measure(device: torch.device, folder: Path) -> Rates:
        made.append(device)
        return Rates("counted", 1e9, 1e9, 5e8, 5e8, 2e9, 3e9, inline_codec=True)

    monkeypatch.setattr(module, "measure", measure)
    return made


def test_a_cpu_is_measured_disk_and_codec(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("COPY_BYTES", "CODEC_BYTES", "DISK_BYTES"):
        monkeypatch.setattr(module, name, 1 << 20)
    monkeypatch.setattr(module, "ROUNDS", 1)
    rates = memswap.profile("cpu")
    assert rates.encodes and rates.copies and rates.inline_codec
    assert 0 <= rates.copy_share <= 1
    assert 1e6 < rates.encode_bytes_per_s < 1e12 and 1e6 < rates.d2h_bytes_per_s < 1e12
    assert memswap.profile("cpu") == rates, "the second call measured again"


def test_what_is_remembered_of_a_gpu_names_its_driver(monkeypatch):
    monkeypatch.setattr(module, "name_of", lambda device: "a GPU")
    found = module.describe(torch.device("cuda", 0))
    assert found["driver"] == [torch.version.cuda, module.cuda_driver()]


class Busy:
    """A lane whose copies, and what is computed beside them, take so many times as long."""

    def __init__(self, monkeypatch, slower: float) -> None:
        self.now = self.until = 0.0
        self.slower = slower
        monkeypatch.setattr(sharing, "open_lane", lambda device: self)
        monkeypatch.setattr(sharing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(sharing.torch, "mm", self.compute)

    def send(self, storage, block) -> None:
        self.until = self.now + 20e-3 * self.slower

    def fetch(self, block):
        return None, self

    def synchronize(self) -> None:
        self.now = self.until = self.now + 20e-3

    def done(self) -> bool:
        return self.now >= self.until - 1e-9

    def compute(self, left, right, out) -> None:
        self.now += 1e-3 * (1.0 if self.done() else self.slower)


@pytest.mark.parametrize(("slower", "found"), [(1.0, 0.0), (1.25, 0.25), (3.0, 1.0)])
def test_what_copies_take_from_compute_is_what_compute_takes_longer_beside_them(
    monkeypatch, slower, found
):
    """20 ms of copies that take 25 ms beside compute, which does the work of 20 ms meanwhile."""
    Busy(monkeypatch, slower)
    assert sharing.measure_copy_share() == pytest.approx(found)


def test_a_step_that_was_measured_beside_copies_is_shorter_without_them():
    rates = Rates("shared", *(1e6,) * 4, copy_latency_s=0.0, copy_share=0.5)
    assert sharing.taken_s([1000, 1000], rates, 1.0) == pytest.approx(0.5 * 4e-3)
    # Copies that take longer than the step take no more of it than while they run.
    assert sharing.taken_s([1000, 1000], rates, 3e-3) == pytest.approx(1e-3)
    assert sharing.taken_s([1000], replace(rates, copy_share=0.0), 1.0) == 0.0


def test_what_was_measured_is_remembered(count):
    assert memswap.profile("cpu") == memswap.profile("cpu")
    assert len(count) == 1
    memswap.profile("cpu", refresh=True)
    assert len(count) == 2
    content = json.loads(module.cache_file(CPU).read_text())
    assert content["measured_on"]["torch"] == torch.__version__, "the file does not say of what"


def test_each_folder_of_a_disk_pool_has_rates_of_its_own(count, tmp_path):
    """Two folders may be two disks; measuring one must not say anything about the other."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other, one, None):
        memswap.profile("cpu", folder=folder)
    assert len(count) == 3


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        b"\xff\xfe",
        lambda content: content["measured_on"].update(torch="1.0"),
        lambda content: content["measured_on"].update(host="another"),
        lambda content: content["rates"].pop("device"),
        lambda content: content["rates"].update(d2h_bytes_per_s="fast"),
        lambda content: content["rates"].update(d2h_bytes_per_s=-1.0),
        lambda content: content["rates"].update(extra=1),
    ],
    ids=range(12),
)
def test_a_file_that_is_damaged_or_of_another_machine_is_measured_again(count, broken):
    memswap.profile("cpu")
    file = module.cache_file(CPU)
    if isinstance(broken, str | bytes):
        file.write_bytes(broken.encode() if isinstance(broken, str) else broken)
    else:
        content = json.loads(file.read_text())
        broken(content)
        file.write_text(json.dumps(content))
    memswap.profile("cpu")
    assert len(count) == 2
    memswap.profile("cpu")
    assert len(count) == 2, "the new measurement was not remembered"


def test_a_cache_that_cannot_be_written_is_told_and_does_no_harm(count, monkeypatch, tmp_path):
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
        assert memswap.profile("cpu").device == "counted"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="d2h_bytes_per_s"):
        Rates("x", value, 1, 1, 1)


def test_a_device_with_little_memory_is_measured_with_what_there_is(monkeypatch):
    """A training whose memory is full must not end because memswap wants to know a rate."""
    asked = []

    def measured(most: int) -> str:
        asked.append(most)
        if most > 2 << 20:
            raise torch.OutOfMemoryError("no room")
        return "rates"

    assert module.within_memory(measured, 64 << 20) == "rates"
    assert asked[-1] == 2 << 20 and asked[0] == 64 << 20

    def never(most: int) -> str:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        module.within_memory(never, 64 << 20)


def test_measuring_a_codec_takes_as_much_memory_as_there_is(monkeypatch):
    randn, sizes = torch.randn, []

    def scarce(count, **options):
        sizes.append(count)
        if count > 1 << 20:
            raise torch.OutOfMemoryError("no room")
        return randn(count, **options)

    monkeypatch.setattr(torch, "randn", scarce)
    monkeypatch.setattr(module, "measure_disk", lambda folder: dict.fromkeys(LINK_RATES, 1e9))
    monkeypatch.setattr(module, "measure_copy_share", lambda folder: 0.0)
    rates = module.measure(torch.device("cpu"))
    assert rates.encodes and len(sizes) > 1


def test_an_accelerators_bytes_that_go_on_to_a_file_are_as_slow_as_the_slower_way() -> None:
    link = Rates("an accelerator", 25e9, 20e9, 24e9, 19e9, 1e12, 1e12, copy_latency_s=1e-5)
    disk = Rates("a disk", 2e9, 30e9, 1e9, 15e9, 1e9, 1e9, copy_latency_s=5e-5, copy_share=0.2)
    found = module.by_way_of(link, disk)
    assert (found.d2h_bytes_per_s, found.h2d_bytes_per_s) == (2e9, 20e9)
    assert (found.duplex_d2h_bytes_per_s, found.duplex_h2d_bytes_per_s) == (1e9, 15e9)
    assert found.encode_bytes_per_s == 1e12, "the device encodes, not the processor"
    assert found.copy_latency_s == pytest.approx(6e-5)
    assert found.copy_share == 0.0, "the device's compute shares nothing with the disk"
