"""A constant of the format that is changed breaks the build, or all backends alike.

Each constant of ``kernels/include/memswap`` is changed in a copy of these headers, and the CPU's
codec, the CUDA kernels and the Ascend kernels are built with the copy, the latter two for their
emulators (``tests/format_probe``). Then either one of them does not compile, or all print the same
lines, which are not those of the unchanged headers. A backend with a number of its own in the place
of a constant would print the old lines, or others than its neighbours. Enumerators get each other's
numbers, all of an enumeration at once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest
from emulators import BUILD, ROOT

INCLUDE = ROOT / "kernels" / "include" / "memswap"
GOLDEN = ROOT / "kernels" / "tests" / "golden"
#: The codec that memswap has been built with.
BUILT = BUILD / "kernels" / "libmemswap_codec_cpu.a"
PROBES = (
    ("built_probe", "scalar"),
    ("cpu_probe", "scalar"),
    ("cpu_probe", "vector"),
    ("cpu_probe", "avx512"),
    ("cuda_probe",),
    ("ascend_probe",),
)

pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(1800)]

#: What each constant becomes. Limits become so small that golden frames reach them, and what stands
#: for an order (modes of growing width, for instance) leaves its place.
CHANGED = {
    # frame.h
    "kVersion": "2",
    "kMagic": "0x3246534d",
    "kBlockElements": "2048",
    "kTileBlocks": "4",
    "kTileElements": "kBlockElements * 4",
    "kHeaderBytes": "256",
    "kRecordBytes": "64",
    "kUnitBytes": "16",
    "kAlignmentBytes": "1u << 30",
    "kLowPlaneBytes": "kBlockElements / 2",
    "kBitmapBytes": "kBlockElements / 4",
    "kByteMapBytes": "kBitmapBytes / 4",
    "kMapsBytes": "kByteMapBytes",
    "kMaxElements": "1024",
    "kMaxBaseUnits": "0x1f",
    "kBaseInOverflow": "0x40000000",
    "kChecksumPrime": "4294967279u",
    "kLastDtype": "18",
    "kLastLayout": "4",
    "kModeCounts": "13",
    "kModes": "14",
    "kUnitsMask": "0x3ff",
    "kPackedBit": "10",
    "kModeShift": "11",
    # canonical.h
    "kClip": "15",
    "kFar": "8",
    "kSamples": "16",
    "kSampleStep": "31",
    "kMedianStep": "64",
    "kBelowMedian": "4",
    "kWindow": "16",
    "kHighestWindow": "100",
    "kLq2Eighths": "15",
    "kLq3Eighths": "27",
    "kOutlierBits": "5",
}
#: The v of a nibble: the first of twelve, that of 12, that of 13.
NIBBLES = {
    "kLq2Nibbles": ("7, 255, 254", "6, 253, 254", "6, 255, 253"),
    "kLq3Nibbles": ("9, 0, 255", "8, 1, 255", "8, 0, 254"),
}
#: Enumerators that get each other's numbers; all in turn where nothing is said.
SWAPPED = {
    "Mode": {
        **{"kLq2": 2, "kLq3": 1, "kLiteral": 11, "kZeros": 12, "kSignedZeros": 13},
        **{"kBitmap": 14, "kReference": 10},
    }
}
#: The fastest to compile first.
PROGRAMS = ("cuda_probe", "cpu_probe", "ascend_probe")

#: In the fast suite: a choice of every encoder's, and two that break the build. A backend that
#: differs from the others with the headers as they are differs from them with the first as well.
FAST = ("kLq2Eighths", "kClip", "kUnitBytes")


@dataclass(frozen=True)
class Change:
    """One text of a header in the place of another."""

    name: str
    header: str
    old: str
    new: str


def read(header: str) -> str:
    return (INCLUDE / header).read_text(encoding="utf-8")


def enumerations() -> dict[str, str]:
    """The bodies of frame.h's enumerations, by name."""
    found = re.findall(r"enum (?:class )?(\w+) : \w+ (\{.*?\});", read("frame.h"), re.S)
    return dict(found)


def with_other_numbers(kind: str, body: str) -> str:
    numbers = {name: int(number) for name, number in re.findall(r"\b(k\w+) = (\d+)", body)}
    numbers.pop("kOk", None)  # what a status is before anything is found
    names = list(numbers)
    others = SWAPPED.get(kind) or {name: numbers[names[i - 1]] for i, name in enumerate(names)}
    for name, number in others.items():
        body = re.sub(rf"\b{name} = \d+", f"{name} = {number}", body)
    return body


def changes() -> list[Change]:
    found = []
    for header in ("frame.h", "canonical.h"):
        text = read(header)
        for old, name in re.findall(r"(constexpr (?:u?int\d+_t) (k\w+) = [^;]+;)", text):
            new = f"{old[: old.index('=')]}= {CHANGED.get(name, 'missing')};"
            found.append(Change(name, header, old, new))
        for old, name in re.findall(r"(constexpr NibbleCode (k\w+)\{[^}]+\};)", text):
            for i, values in enumerate(NIBBLES.get(name, ("missing",))):
                new = f"constexpr NibbleCode {name}{{{values}}};"
                found.append(Change(f"{name}-{i}", header, old, new))
    for kind, body in enumerations().items():
        found.append(Change(kind, "frame.h", body, with_other_numbers(kind, body)))
    # A float with a bit less of an exponent, and a dtype of no float with one.
    splits = re.findall(r"case Dtype::(\w+):\s+return (\{\d, (\d), \d, \d\};)", read("frame.h"))
    for name, old, bits in splits:
        first = f"case Dtype::{name}:\n      return "
        new = old.replace(f", {bits},", f", {int(bits) - 1 if bits != '0' else 4},", 1)
        found.append(Change(f"split_of-{name}", "frame.h", first + old, first + new))
    return found


CHANGES = changes()


def test_every_constant_of_the_shared_headers_is_changed_once() -> None:
    without = [change.name for change in CHANGES if "missing" in change.new]
    assert not without, f"{without}: say in CHANGED or NIBBLES what they become"
    for change in CHANGES:
        assert read(change.header).count(change.old) == 1, f"{change.old!r} is not there once"
        assert change.new != change.old, change.name
    known = {change.name for change in CHANGES}
    assert known >= set(FAST)
    for header in ("frame.h", "canonical.h"):
        declared = re.findall(r"constexpr (?!bool)\w+ (k\w+)\s*[={]", read(header))
        assert declared, f"no constant was found in {header}"
        for name in declared:
            assert name in known or f"{name}-0" in known, f"{name} of {header} is never changed"
    assert {name for name in CHANGED if name not in known} == set()


class Backends:
    """The probes, built with a copy of the shared headers in which one text may be another.

    What the fast suite builds has a folder for each change and is kept, so that only what changed
    since is compiled again. The other changes are made in one folder after another.
    """

    def __init__(self, change: Change | None = None, programs: tuple[str, ...] = PROGRAMS) -> None:
        kept = "unchanged" if change is None else change.name if change.name in FAST else "others"
        self.folder = BUILD / "format_probe" / kept
        self.include = self.folder / "include"
        self.build = self.folder / "build"
        for header in INCLUDE.iterdir():
            text = read(header.name)
            if change is not None and change.header == header.name:
                text = text.replace(change.old, change.new)
            self.write(header.name, text)
        configure = ["cmake", "-S", str(ROOT / "tests" / "format_probe"), "-B", str(self.build)]
        configure += [f"-DMEMSWAP_FORMAT_INCLUDE={self.include}"]
        configure += [f"-DMEMSWAP_CPU_CODEC={BUILT if BUILT.exists() else ''}"]
        configure += ["-G", "Ninja"] if shutil.which("ninja") else []
        done = subprocess.run(configure, capture_output=True, text=True, check=False)
        if "GTest" in done.stderr:
            pytest.skip("GoogleTest was not found")
        assert done.returncode == 0, done.stderr
        self.said = ""
        self.lines = self.build_and_run(programs)

    def write(self, header: str, text: str) -> None:
        """Writes only what is another text: what includes the others need not be built again."""
        path = self.include / "memswap" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")

    def build_and_run(self, programs: tuple[str, ...]) -> dict[str, tuple[str, ...]] | None:
        """What each probe prints; None where one does not compile."""
        command = ["cmake", "--build", str(self.build), "--target"]
        parallel = ["--parallel", os.environ.get("MAX_JOBS", "2")]
        for program in programs:
            done = subprocess.run(
                [*command, program, *parallel], capture_output=True, text=True, check=False
            )
            if done.returncode:
                self.said = done.stdout + done.stderr
                return None
        found = {}
        for program, *arguments in (probe for probe in PROBES if probe[0] in programs):
            run = [str(self.build / program), str(GOLDEN), *arguments]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            if lines != ["not here"]:
                ended = [f"ended with {done.returncode}"] if done.returncode else []
                found[" ".join((program, *arguments))] = (*lines, *ended)
        return found


@pytest.fixture(scope="module")
def unchanged() -> tuple[str, ...]:
    """What the CPU's oracle prints with the headers as they are."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not on PATH")
    program = "built_probe" if BUILT.exists() else "cpu_probe"
    backends = Backends(programs=(program,))
    assert backends.lines is not None, backends.said[-4000:]
    lines = backends.lines[f"{program} scalar"]
    assert len(lines) > 600 and not any("ended with" in line for line in lines)
    return lines


def differences(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    pairs = [f"{a}  |  {b}" for a, b in zip(one, other, strict=False) if a != b]
    return "\n".join(pairs[:8]) + f"\n{len(one)} and {len(other)} lines"


@pytest.mark.slow
def test_all_backends_print_the_same_lines(unchanged: tuple[str, ...]) -> None:
    backends = Backends()
    assert backends.lines is not None, backends.said[-4000:]
    for probe, lines in backends.lines.items():
        assert lines == unchanged, f"{probe}: {differences(unchanged, lines)}"


def marks_of(change: Change) -> list[pytest.MarkDecorator]:
    return [] if change.name in FAST else [pytest.mark.slow]


@pytest.mark.parametrize(
    "change", [pytest.param(one, id=one.name, marks=marks_of(one)) for one in CHANGES]
)
def test_a_changed_constant_breaks_the_build_or_all_backends_alike(
    unchanged: tuple[str, ...], change: Change
) -> None:
    backends = Backends(change)
    found = backends.lines
    if found is None:
        assert re.search("static.assert", backends.said), backends.said[-4000:]
        return
    expected = found["cpu_probe scalar"]
    assert expected != unchanged, f"{change.name} was changed, and no line has"
    for probe, lines in found.items():
        assert lines == expected, (
            f"{change.name}: {probe} did not change as cpu_probe scalar did:\n"
            f"{differences(expected, lines)}"
        )
