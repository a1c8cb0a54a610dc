"""What stands in for CUDA's intrinsics and for PTX statements is what NVIDIA defines these to be.

Two things execute the CUDA kernels without a GPU: the emulator (``tests/cuda_emulator``), whose
stand-ins for intrinsics are compared with definitions in its ``intrinsics_test.cpp``, and
``kernels/cuda/ptx.py``, whose statements are compared with definitions here. Both know all that the
kernels use, or a test fails.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(
    path for path in (ROOT / "kernels/cuda").iterdir() if path.suffix in (".cu", ".cuh", ".h")
)
DEFINED = ROOT / "tests/cuda_emulator/intrinsics_test.cpp"
#: Taken away one by one by this file, which wants the emulator to notice.
BARRIERS = {"__syncwarp", "__syncthreads", "__threadfence"}
#: What the compiler is told, and does not execute.
DECLARATIONS = {"__align__", "__launch_bounds__", "__builtin_assume", "__isGlobal"}
#: Of compiled kernels alone: stand-ins have no state spaces, and ptx.py has one for all of them.
DECLARATIONS |= {"__cvta_generic_to_shared", "__cvta_shared_to_generic"}
WORD = 2**32
TRIES = 300

pytestmark = pytest.mark.cpu_only


def code_of(path: Path) -> str:
    """A source without its comments."""
    return re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))


def intrinsics() -> dict[str, str]:
    """Every intrinsic that the kernels call, and a file that does."""
    return {
        name: path.name
        for path in KERNELS
        for name in re.findall(r"\b(__\w+|atomic[A-Z]\w*)\s*\(", code_of(path))
        if name not in DECLARATIONS
    }


def statements() -> dict[str, str]:
    """Every opcode of PTX in the kernels' inline assembly, and a file that has it."""
    found = {}
    for path in KERNELS:
        for body in re.findall(r"\basm\b[^;]*?\((.*?)\);\n", code_of(path), re.S):
            text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', body.split(":")[0]))
            for line in re.split(r"\\n\\t|;", text):
                opcode = re.match(r"\s*(?:@\w+\s+)?([a-z]\w*(?:\.\w+)+)", line)
                if opcode and not line.strip().startswith(".reg"):
                    found[opcode[1]] = path.name
    return found


def test_every_intrinsic_of_the_kernels_has_a_stand_in_that_is_compared() -> None:
    used = intrinsics()
    assert {"__popc", "__dp4a", "__shfl_up_sync", "atomicAdd"} <= used.keys(), used
    compared = set(re.findall(r"\b(?:__\w+|atomic[A-Z]\w*)", code_of(DEFINED)))
    missing = {name: file for name, file in used.items() if name not in compared | BARRIERS}
    assert not missing, f"{missing}: compare them with their definitions in {DEFINED.name}"


# --- kernels/cuda/ptx.py --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ptx() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("ptx_of_test", ROOT / "kernels/cuda/ptx.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def operands(count: int, bits: int = 32) -> list[list[int]]:
    """For each operand, a number for each of 32 lanes: any bits, few bits, and the extremes."""
    generator = random.Random(count * bits)
    whole = 2**bits - 1

    def one() -> int:
        kind = generator.randrange(8)
        number = generator.getrandbits(bits)
        bit = 1 << generator.randrange(bits)
        return {
            0: 0,
            1: whole,
            2: bit,
            3: whole ^ bit,
            4: number & generator.getrandbits(bits),
        }.get(kind, number)

    return [[one() for _ in range(32)] for _ in range(count)]


def execute(ptx: ModuleType, statement: str, *values: list[int]) -> dict[str, list[int]]:
    """The registers after a statement on %a, %b, ... , which get these values by lane."""
    opcode, rest = statement.split(None, 1)
    warp = ptx.Warp(ptx.Memory(), 0, 0, 1, 32)
    for name, lanes in zip("abcd", values, strict=False):
        warp.registers[f"%{name}"] = np.array(lanes, np.uint64)
    ptx.decode(opcode, ptx._operands(rest), "kernel")(warp, ptx.ALL)
    return {name: [int(one) for one in lanes] for name, lanes in warp.registers.items()}


def bits_of(word: int, bits: int = 32) -> list[int]:
    return [word >> i & 1 for i in range(bits)]


def byte(word: int, i: int) -> int:
    return word >> 8 * i & 255


def prmt(a: int, b: int, selectors: int) -> int:
    eight = [byte(a, i) for i in range(4)] + [byte(b, i) for i in range(4)]
    result = 0
    for i in range(4):
        selector = selectors >> 4 * i & 15
        found = eight[selector % 8]
        if selector > 7:
            found = 255 if found > 127 else 0
        result += found << 8 * i
    return result


def lop3(table: int) -> Callable[[int, int, int], int]:
    def of(a: int, b: int, c: int) -> int:
        rows = zip(bits_of(a), bits_of(b), bits_of(c), strict=True)
        return sum((table >> (4 * x + 2 * y + z) & 1) << i for i, (x, y, z) in enumerate(rows))

    return of


def half(word: int, i: int) -> int:
    return word >> 16 * i & 0xFFFF


def leading_zeros(a: int) -> int:
    return next((i for i in range(32) if a >> (31 - i) & 1), 32)


#: A statement with its result in %r, and the definition in "PTX ISA" by lane.
OF_A_LANE: dict[str, Callable[..., int]] = {
    "prmt.b32 %r, %a, %b, %c": prmt,
    "lop3.b32 %r, %a, %b, %c, 0xca": lop3(0xCA),
    "lop3.b32 %r, %a, %b, %c, 0x96": lop3(0x96),
    "lop3.b32 %r, %a, %b, %c, 0x1e": lop3(0x1E),
    "popc.b32 %r, %a": lambda a: sum(bits_of(a)),
    "clz.b32 %r, %a": leading_zeros,
    "bfind.u32 %r, %a": lambda a: 31 - leading_zeros(a) if a else WORD - 1,
    "bfind.shiftamt.u32 %r, %a": lambda a: leading_zeros(a) if a else WORD - 1,
    "brev.b32 %r, %a": lambda a: sum(bit << (31 - i) for i, bit in enumerate(bits_of(a))),
    "shf.l.wrap.b32 %r, %a, %b, %c": lambda a, b, c: (b * WORD + a) * 2 ** (c % 32) // WORD % WORD,
    "shf.r.wrap.b32 %r, %a, %b, %c": lambda a, b, c: (b * WORD + a) // 2 ** (c % 32) % WORD,
    "dp4a.u32.u32 %r, %a, %b, %c": lambda a, b, c: (
        (c + sum(byte(a, i) * byte(b, i) for i in range(4))) % WORD
    ),
    "max.u16x2 %r, %a, %b": lambda a, b: sum(
        max(half(a, i), half(b, i)) << 16 * i for i in range(2)
    ),
    "min.u16x2 %r, %a, %b": lambda a, b: sum(
        min(half(a, i), half(b, i)) << 16 * i for i in range(2)
    ),
    "add.u32 %r, %a, %b": lambda a, b: (a + b) % WORD,
    "add.s64 %r, %a, %b": lambda a, b: (a + b) % 2**64,
    "sub.s32 %r, %a, %b": lambda a, b: (a - b) % WORD,
    "mad.lo.s32 %r, %a, %b, %c": lambda a, b, c: (a * b + c) % WORD,
    "mad.lo.u32 %r, %a, %b, %c": lambda a, b, c: (a * b + c) % WORD,
    "mul.wide.u32 %r, %a, %b": lambda a, b: a * b,
    "shl.b32 %r, %a, %b": lambda a, b: a * 2 ** min(b, 32) % WORD,
    "shr.u32 %r, %a, %b": lambda a, b: a // 2 ** min(b, 32),
    "shr.s32 %r, %a, %b": lambda a, b: (a - WORD * (a >> 31)) // 2 ** min(b, 32) % WORD,
}


@pytest.mark.parametrize("statement", OF_A_LANE)
def test_a_statement_of_one_lane_is_what_it_is_defined_to_be(
    ptx: ModuleType, statement: str
) -> None:
    definition = OF_A_LANE[statement]
    count = sum(f"%{name}" in statement for name in "abc")
    lanes = operands(count)
    if re.match(r"shl|shr", statement):
        lanes[1] = [*range(30), 32, 2**31 + 3]  # by more than a word has: all is shifted out
    found = execute(ptx, statement, *lanes)["%r"]
    assert found == [definition(*one) for one in zip(*lanes, strict=True)]


def test_halves_compare_as_floats_as_bytes_do(ptx: ModuleType) -> None:
    """Numbers below 256 are float16's subnormals, which max.f16x2 and min.f16x2 keep."""
    lanes = [[x % 256 | (x >> 8) % 256 << 16 for x in one] for one in operands(2)]
    for name, choose in (("max", max), ("min", min)):
        found = execute(ptx, f"{name}.f16x2 %r, %a, %b", *lanes)["%r"]
        assert found == [
            choose(half(a, 0), half(b, 0)) | choose(half(a, 1), half(b, 1)) << 16
            for a, b in zip(*lanes, strict=True)
        ]


def test_words_are_equal_where_all_their_bits_are(ptx: ModuleType) -> None:
    first, second = operands(2)
    second = [
        a if lane % 3 == 0 else b for lane, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    found = execute(ptx, "setp.eq.u32 %p, %a, %b", first, second)["%p"]
    assert [bool(one) for one in found] == [a == b for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("by", [0, 1, 5, 16, 31])
def test_shuffles_take_from_the_lanes_that_they_name(ptx: ModuleType, by: int) -> None:
    (values,) = operands(1)
    from_below = [lane - by if lane >= by else lane for lane in range(32)]
    from_above = [lane + by if lane + by < 32 else lane for lane in range(32)]
    for mode, clamp, sources in (
        ("up", 0, from_below),
        ("down", 31, from_above),
        ("bfly", 31, [lane ^ by for lane in range(32)]),
        ("idx", 31, [by] * 32),
    ):
        after = execute(ptx, f"shfl.sync.{mode}.b32 %r|%p, %a, {by}, {clamp}, -1", values)
        assert after["%r"] == [values[source] for source in sources], mode
        if mode in ("up", "down"):
            inside = [source != lane or by == 0 for lane, source in enumerate(sources)]
            assert [bool(one) for one in after["%p"]] == inside, mode


def test_votes_and_reductions_are_of_all_lanes(ptx: ModuleType) -> None:
    for values in ([0] * 32, [1] * 32, operands(1)[0]):
        after = execute(ptx, "redux.sync.add.u32 %r, %a, -1", values)
        assert after["%r"] == [sum(values) % WORD] * 32
        assert execute(ptx, "redux.sync.min.u32 %r, %a, -1", values)["%r"] == [min(values)] * 32
        assert execute(ptx, "redux.sync.max.u32 %r, %a, -1", values)["%r"] == [max(values)] * 32
        holds = [value % 2 for value in values]
        for statement, expected in (
            ("vote.sync.ballot.b32 %r, %p, -1", sum(bit << i for i, bit in enumerate(holds))),
            ("vote.sync.any.pred %r, %p, -1", int(any(holds))),
        ):
            opcode, rest = statement.split(None, 1)
            warp = ptx.Warp(ptx.Memory(), 0, 0, 1, 32)
            warp.registers["%p"] = np.array(holds, bool)
            ptx.decode(opcode, ptx._operands(rest), "kernel")(warp, ptx.ALL)
            assert [int(one) for one in warp.registers["%r"]] == [expected] * 32, statement


def test_atomics_return_what_those_before_have_left(ptx: ModuleType) -> None:
    changes: dict[str, Callable[[int, int], int]] = {
        "add": lambda old, value: (old + value) % 2**64,
        "min": min,
        "or": lambda old, value: old | value,
    }
    for name, change in changes.items():
        for bits, kind in ((32, "b32" if name == "or" else "u32"), (64, "u64")):
            if name == "or" and bits == 64:
                continue
            (values,) = operands(1, bits)
            memory = ptx.Memory()
            at, buffer = memory.allocate(bits // 8)
            first = 3 << bits - 2 if name == "min" else 5
            buffer[:] = np.frombuffer(first.to_bytes(bits // 8, "little"), np.uint8)
            warp = ptx.Warp(memory, 0, 0, 1, 32)
            warp.registers["%a"] = np.array(values, np.uint64)
            warp.registers["%at"] = np.full(32, at, np.uint64)
            operation = ptx.decode(f"atom.global.{name}.{kind}", ["%r", "[%at]", "%a"], "kernel")
            operation(warp, ptx.ALL)
            now, found = first, [int(one) for one in warp.registers["%r"]]
            for value, returned in zip(values, found, strict=True):
                assert returned == now, name
                now = change(now, value) % 2**bits
            assert int.from_bytes(buffer.tobytes(), "little") == now, name


def test_every_statement_that_the_kernels_write_themselves_is_compared() -> None:
    written = statements()
    assert {"prmt.b32", "lop3.b32", "shfl.sync.up.b32"} <= written.keys(), written
    compared = {statement.split()[0] for statement in OF_A_LANE}
    compared |= {"max.f16x2", "min.f16x2", "shfl.sync.up.b32", "prefetch.global.L2"}  # apart
    compared |= {"setp.eq.u32", "atom.global.add.u32"}
    missing = {name: file for name, file in written.items() if name not in compared}
    assert not missing, f"{missing}: compare them with their definitions here"


def test_a_prefetch_changes_nothing(ptx: ModuleType) -> None:
    warp: Any = ptx.Warp(ptx.Memory(), 0, 0, 1, 32)
    before = dict(warp.registers)
    ptx.decode("prefetch.global.L2", ["[%a]"], "kernel")(warp, ptx.ALL)
    assert warp.registers == before
