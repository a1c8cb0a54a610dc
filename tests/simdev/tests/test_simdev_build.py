"""The build cache is never stale and never raced for; the name of the device is a choice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from simdev import build

ROOT = Path(build.__file__).resolve().parent.parent


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_cache_depends_on_every_source_and_on_torch(monkeypatch, tmp_path):
    for relative in ["CMakeLists.txt", "csrc/runtime/clock.h", "csrc/ops/copies.cpp"]:
        target = tmp_path / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("one")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    seen = {build.cache_directory()}
    for relative in ["CMakeLists.txt", "csrc/runtime/clock.h", "csrc/ops/copies.cpp"]:
        (tmp_path / relative).write_text("two")
        seen.add(build.cache_directory())
    (tmp_path / "csrc/new.cpp").write_text("")
    seen.add(build.cache_directory())
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    seen.add(build.cache_directory())
    assert len(seen) == 6


def test_two_processes_that_need_a_build_share_one(tmp_path):
    """The compiler is replaced by a slow fake that counts its calls."""
    code = f"""
import pathlib, sys, time
sys.path.insert(0, {str(ROOT)!r})
import importlib.util as u
spec = u.spec_from_file_location("build_under_test", {build.__file__!r})
build = u.module_from_spec(spec); spec.loader.exec_module(build)
build.REPOSITORY = pathlib.Path({str(tmp_path)!r})
def fake(work, target, definitions):
    work.mkdir(parents=True)
    with open({str(tmp_path / "calls")!r}, "a") as log: log.write("x")
    time.sleep(1)
    import sysconfig
    (work / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))).write_text("built")
build.cmake_build = fake
print(build.ensure_built())
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert paths[0] == paths[1] and Path(paths[0]).read_text() == "built"
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize("name", ["npu", "sim"])
def test_the_device_may_have_another_name(name):
    code = f"""
import simdev, torch
assert simdev.NAME == "{name}"
def body():
    x = torch.ones(4, device="{name}", requires_grad=True)
    with torch.autocast("{name}", dtype=torch.bfloat16):
        (x @ x).backward()
    return x.grad.tolist(), x.device.type, torch.{name}.device_count(), x.is_{name}
print([simdev.run_in(schedule, body) for schedule in simdev.SCHEDULES][-1])
"""
    expected = ([2.0] * 4, name, 2, True)
    assert run_python(code, SIMDEV_NAME=name).strip() == str(expected)


def test_a_process_exits_with_work_pending_and_a_forked_child_gets_a_clear_error():
    code = """
import os, simdev, torch
x = torch.ones(4, device=simdev.NAME)
pid = os.fork()
if pid == 0:
    try:
        x.cpu()
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
simdev._C.set_policy(simdev._C.Policy.lazy, 0)
y = x + 1
print("pending")
"""
    assert run_python(code).strip() == "pending"
