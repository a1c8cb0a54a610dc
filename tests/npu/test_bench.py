"""The standalone benchmark, with what it finds here: not how fast a device is, but that it runs."""

from __future__ import annotations

import json
import subprocess

import pytest
from fake_acl.build import directory

pytestmark = pytest.mark.own_laboratory


def test_the_standalone_benchmark_measures_every_case_and_compares_every_bit():
    done = subprocess.run(
        [directory() / "memswap_ascend_bench", "--small"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["device"] == "Ascend910B1" and report["processors"] > 0
    results = {one["case"]: one for one in report["results"]}
    assert {"bf16 dense", "fp32 upcast", "e4m3 dense", "int64 ints"} <= set(results)
    for one in report["results"]:
        assert one["ratio"] > 1, one
        assert one["copy_gb_s"] > 0 and one["encode_gb_s"] > 0 and one["decode_of_copy"] > 0, one
    assert 1.3 < results["bf16 dense"]["ratio"] < 1.5
    assert any(one["max_processors"] == 4 for one in report["results"])


def test_the_benchmark_says_what_failed():
    done = subprocess.run(
        [directory() / "memswap_ascend_bench", "--fast"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "usage:" in done.stderr
