"""The runtime's own test program: plain, and under the sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from simdev import build


def compiler_lacks(flags: list[str], directory: Path) -> str | None:
    """Why a program built with the flags does not run here, or None."""
    source, probe = directory / "probe.cpp", directory / "probe"
    source.write_text("int main() { return 0; }\n")
    compiler = os.environ.get("CXX", "c++")
    for command in ([compiler, *flags, source, "-o", probe], [probe]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return f"there is no compiler {compiler}"
        if done.returncode:
            return f"{compiler} {' '.join(flags)}: {done.stderr[-200:]}"
    return None


@pytest.mark.parametrize(
    ("sanitizer", "flags"),
    [("", []), ("thread", ["-fsanitize=thread"]), ("address", ["-fsanitize=address,undefined"])],
    ids=["plain", "thread", "address_and_undefined"],
)
@pytest.mark.timeout(300)
def test_the_runtime_keeps_its_promises(sanitizer, flags, tmp_path):
    reason = compiler_lacks(flags, tmp_path)
    if reason:
        pytest.skip(reason)
    # Kept between runs: compiling it takes longer than running it.
    folder = build.REPOSITORY / "build" / f"simdev-runtime-{sanitizer or 'plain'}"
    build.cmake_build(
        folder, "simdev_runtime_test", {"SIMDEV_EXTENSION": "OFF", "SIMDEV_SANITIZE": sanitizer}
    )
    program = folder / "simdev_runtime_test"
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    assert done.stdout.count("ok ") == 20
