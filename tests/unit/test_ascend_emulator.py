"""The emulator of an Ascend vector core: right kernels run, wrong ones are rejected by name."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from emulators import EmulatorRuns, build_emulator

FOLDER = Path(__file__).resolve().parents[1] / "ascend_emulator"
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{FOLDER}"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator is compiled with g++")


def compile_source(source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the host compiler on one file and return what it said."""
    assert COMPILER is not None
    command = [COMPILER, *FLAGS, *flags, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(900)
def test_rules_hold_at_run_time(emulator_runs: EmulatorRuns) -> None:
    ran = emulator_runs.run(build_emulator("ascend_emulator") / "emulator_test")
    assert ran.returncode == 0, f"a promise of the emulator is broken:\n{ran.stdout[-4000:]}"


def test_impossible_calls_do_not_compile() -> None:
    source = FOLDER / "rejected_types.cpp"
    said = compile_source(
        source, "-fsyntax-only", "-fmax-errors=0", "-fno-diagnostics-color"
    ).stderr
    said = said.replace("\u2018", "'").replace("\u2019", "'")
    # A message belongs to the line of this file that it names last: an assertion inside the
    # headers is preceded by "required from here" in this file.
    messages: dict[int, str] = {}
    line = 0
    for text in said.splitlines():
        here = re.match(rf"{re.escape(str(source))}:(\d+):", text)
        line = int(here.group(1)) if here else line
        messages[line] = messages.get(line, "") + text + "\n"
    accepted = []
    mark, found = "", ""
    for number, text in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        comment = text.strip()
        if comment.startswith("// REJECT ") or comment == "// END":
            if mark and mark not in found:
                accepted.append(f"before line {number}: no message '{mark}'")
            mark, found = comment.removeprefix("// REJECT "), ""
        found += messages.get(number, "")
    assert mark == "// END", "the last statement has no end mark"
    assert not accepted, "calls that the chip does not have compile:\n" + "\n".join(accepted)
