"""Executes PTX, as nvcc writes it for these kernels: thread block by thread block, warp by warp.

Each lane's result is what NVIDIA's "Parallel Thread Execution ISA" defines for an instruction; what
this file does not know is an error. Lanes that part at a branch meet again at its immediate
post-dominator, and collectives want all lanes of their mask. Memory is sequentially consistent, so
missing fences are not found here (tests/cuda_emulator finds them).

    kernel = Kernel.of(text, "encode_tiles")
    counts = kernel.run(memory, parameters, blocks=1, threads=256, shared_bytes=40000)

`counts[i]` says how many warps executed line i of the text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]  # of 32 lanes: uint64, or bool for a predicate
Operation = Callable[["Warp", Lanes], None]

LANES = 32
ALL = np.ones(LANES, bool)
SHARED_AT = 1 << 40
"""Where the shared state space begins in this file's one address space."""
PARAMETERS_AT = 1 << 41

_LABEL = re.compile(r"^(\$\w+):")
_STATEMENT = re.compile(r"^\s*(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*?);\s*$")
#: nvcc's own registers, special ones, and those of inline assembly, which has them in a scope.
_REGISTER = re.compile(r"^(%[a-z]+[\d.]*[xyz]?|[a-z]\w*)$")


@dataclass
class Memory:
    """Global memory, shared memory of one thread block, and a kernel's parameters."""

    everything: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """By the address of the first byte."""
    free: int = 1 << 20

    def allocate(self, nbytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """Address and bytes of a new buffer, aligned to 128, with guards around it."""
        buffer = np.zeros(nbytes, np.uint8)
        at = self.free
        self.everything[at] = buffer
        self.free += (nbytes + 4096 + 127) // 128 * 128
        return at, buffer

    def place(self, address: int, nbytes: int) -> tuple[npt.NDArray[np.uint8], int]:
        """The buffer that has so many bytes from an address on, and where in it they begin."""
        for at, buffer in self.everything.items():
            if at <= address and address + nbytes <= at + len(buffer):
                if address % nbytes:
                    raise RuntimeError(f"{nbytes} bytes at {address:#x} are not aligned")
                return buffer, address - at
        raise RuntimeError(f"{nbytes} bytes at {address:#x} are in no buffer")


@dataclass
class _Frame:
    """A part of a warp's lanes on its way to where it meets the others."""

    at: int
    mask: Lanes
    until: int


class Warp:
    """32 lanes, in step where their paths agree."""

    def __init__(self, memory: Memory, index: int, block: int, blocks: int, threads: int) -> None:
        self.memory = memory
        self.registers: dict[str, Lanes] = {
            "%tid.x": np.arange(index * LANES, (index + 1) * LANES, dtype=np.uint64),
            "%ctaid.x": np.full(LANES, block, np.uint64),
            "%nctaid.x": np.full(LANES, blocks, np.uint64),
            "%ntid.x": np.full(LANES, threads, np.uint64),
        }

    def write(self, name: str, values: Lanes, mask: Lanes) -> None:
        known = self.registers.get(name)
        if known is None or mask.all():
            self.registers[name] = values
        else:
            self.registers[name] = np.where(mask, values, known)


@dataclass
class Kernel:
    """One entry function."""

    name: str
    lines: int
    operations: list[Operation | tuple[str, ...]]
    line_of: list[int]
    targets: dict[str, int]
    parameter_bytes: int

    @classmethod
    def of(cls, text: str, part: str, begin: int = 0) -> Kernel:
        """The first entry function whose name has `part` in it.

        Raises:
            ValueError: there is none, or it has a statement that this file does not know.
        """
        lines = text.splitlines()
        entry = next(
            (i for i in range(begin, len(lines)) if ".entry" in lines[i] and part in lines[i]), None
        )
        if entry is None:
            raise ValueError(f"no entry function's name has {part!r} in it")
        name = re.search(r"\.entry (\w+)", lines[entry])[1]  # type: ignore[index]
        declared = re.search(r"\[(\d+)\]", lines[entry + 1])
        kernel = cls(name, len(lines), [], [], {}, int(declared[1]) if declared else 0)
        for number in range(entry, len(lines)):
            line = lines[number]
            if line.startswith("}"):
                break
            label = _LABEL.match(line)
            if label:
                kernel.targets[label[1]] = len(kernel.operations)
                continue
            statement = _STATEMENT.match(line)
            if statement:
                kernel._add(statement, number + 1, name)
        return kernel

    def _add(self, statement: re.Match[str], line: int, name: str) -> None:
        negated, predicate, opcode, rest = statement.groups()
        if opcode in ("bra", "bra.uni", "ret"):
            self.operations.append((opcode, rest, predicate or "", negated))
        elif opcode == "bar.sync":
            self.operations.append((opcode,))
        else:
            operation = decode(opcode, _operands(rest), name)
            if predicate:
                operation = _guarded(operation, predicate, bool(negated))
            self.operations.append(operation)
        self.line_of.append(line)

    def run(
        self, memory: Memory, parameters: bytes, blocks: int, threads: int, shared_bytes: int
    ) -> npt.NDArray[np.int64]:
        """Run a grid. Returns, by line of the text (from 1 on), the warps that executed it."""
        if len(parameters) != self.parameter_bytes:
            raise ValueError(f"{self.name} takes {self.parameter_bytes} bytes of parameters")
        meets = self._post_dominators()
        counts = np.zeros(self.lines + 1, np.int64)
        generator = np.random.default_rng(0)
        memory.everything[PARAMETERS_AT] = np.frombuffer(parameters, np.uint8).copy()
        for block in range(blocks):
            shared = generator.integers(0, 256, shared_bytes, np.uint8)
            memory.everything[SHARED_AT] = shared
            warps = [
                self._run_warp(Warp(memory, i, block, blocks, threads), meets, counts)
                for i in range(threads // LANES)
            ]
            while warps:  # each goes on to the next barrier of the thread block
                warps = [warp for warp in warps if next(warp, None) is not None]
        del memory.everything[SHARED_AT], memory.everything[PARAMETERS_AT]
        return counts

    def _run_warp(
        self, warp: Warp, meets: list[int], counts: npt.NDArray[np.int64]
    ) -> Iterator[int]:
        end = len(self.operations)
        stack = [_Frame(0, ALL, end)]
        while stack:
            top = stack[-1]
            if top.at == top.until or top.at >= end or not top.mask.any():
                stack.pop()
                continue
            at = top.at
            operation = self.operations[at]
            counts[self.line_of[at]] += 1
            if callable(operation):
                operation(warp, top.mask)
                top.at += 1
            elif operation[0] == "bar.sync":
                if not top.mask.all():
                    raise RuntimeError("a part of a warp is at a barrier of the thread block")
                top.at += 1
                yield at
            elif operation[0] == "ret":
                top.at = end
            else:
                self._branch(warp, stack, operation, meets[at])

    def _branch(
        self, warp: Warp, stack: list[_Frame], operation: tuple[str, ...], meets: int
    ) -> None:
        top = stack[-1]
        _, label, predicate, negated = operation
        target = self.targets[label.strip()]
        taken = top.mask
        if predicate:
            holds = warp.registers[predicate]
            taken = top.mask & (~holds if negated else holds)
        if not taken.any():
            top.at += 1
        elif (taken == top.mask).all():
            top.at = target
        else:
            other = _Frame(top.at + 1, top.mask & ~taken, meets)
            top.at = meets
            stack += [other, _Frame(target, taken, meets)]

    def _post_dominators(self) -> list[int]:
        """For each operation, the nearest one that all paths from it pass; the end is one past."""
        count = len(self.operations)
        successors: list[tuple[int, ...]] = []
        for at, operation in enumerate(self.operations):
            if callable(operation) or operation[0] == "bar.sync":
                successors.append((at + 1,))
            elif operation[0] == "ret":
                successors.append((count,))
            else:
                target = self.targets[operation[1].strip()]
                successors.append((target, at + 1) if operation[2] else (target,))
        before: list[list[int]] = [[] for _ in range(count + 1)]
        for at, following in enumerate(successors):
            for one in following:
                before[one].append(at)
        # Those that reach the end, from the end on: each behind one of its successors.
        order: list[int] = []
        seen, waiting = {count}, [(count, iter(before[count]))]
        while waiting:
            at, rest = waiting[-1]
            unseen = next((one for one in rest if one not in seen), None)
            if unseen is None:
                order.append(at)
                waiting.pop()
            else:
                seen.add(unseen)
                waiting.append((unseen, iter(before[unseen])))
        order.reverse()
        rank = {at: i for i, at in enumerate(order)}
        nearest: dict[int, int] = {count: count}
        changed = True
        while changed:
            changed = False
            for at in order[1:]:
                found: int | None = None
                for one in successors[at]:
                    if one in nearest:
                        found = one if found is None else _common(found, one, nearest, rank)
                if found is not None and nearest.get(at) != found:
                    nearest[at] = found
                    changed = True
        return [nearest.get(at, count) for at in range(count)]


def _common(a: int, b: int, nearest: dict[int, int], rank: dict[int, int]) -> int:
    """Where the paths to the end from two operations meet (Cooper, Harvey and Kennedy)."""
    while a != b:
        while rank[a] > rank[b]:
            a = nearest[a]
        while rank[b] > rank[a]:
            b = nearest[b]
    return a


def _operands(rest: str) -> list[str]:
    """Operands, of which {a, b} is one."""
    return [one.strip() for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]


def _guarded(operation: Operation, predicate: str, negated: bool) -> Operation:
    def run(warp: Warp, mask: Lanes) -> None:
        holds = warp.registers[predicate]
        active = mask & (~holds if negated else holds)
        if active.any():
            operation(warp, active)

    return run


# --- operands and numbers -------------------------------------------------------------------------


def _reader(operand: str, name: str) -> Callable[[Warp], Lanes]:
    """What has an operand's value in each lane."""
    if _REGISTER.match(operand):
        return lambda warp: warp.registers[operand]
    if operand == name + "_param_0":
        value = PARAMETERS_AT
    elif re.match(r"^_Z\w+$", operand):
        value = SHARED_AT  # the only array is the dynamic one
    elif operand.startswith("0f"):
        value = int(operand[2:], 16)
    else:
        value = int(operand, 0) & (2**64 - 1)
    constant = np.full(LANES, value, np.uint64)
    return lambda warp: constant


def _bits(kind: str) -> int:
    return 32 if kind == "f32" else int(kind[1:])


def _low(values: Lanes, bits: int) -> Lanes:
    return values if bits == 64 else values & np.uint64((1 << bits) - 1)


def _signed(values: Lanes, bits: int) -> npt.NDArray[np.int64]:
    shift = np.uint64(64 - bits)
    return (values << shift).view(np.int64) >> np.int64(64 - bits)


def _unsigned(values: npt.NDArray[np.int64], bits: int) -> Lanes:
    return _low(values.astype(np.int64).view(np.uint64), bits)


def _number(values: Lanes, kind: str) -> Lanes:
    bits = _bits(kind)
    return _signed(values, bits) if kind[0] == "s" else _low(values, bits)


def _byte(values: Lanes, i: int) -> Lanes:
    return values >> np.uint64(8 * i) & np.uint64(0xFF)


def _prmt(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    both = _low(a, 32) | _low(b, 32) << np.uint64(32)
    result = np.zeros(LANES, np.uint64)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        byte = both >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result


def _dp4a(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    total = _low(c, 32)
    for i in range(4):
        total = total + _byte(a, i) * _byte(b, i)
    return _low(total, 32)


def _lop3(a: Lanes, b: Lanes, c: Lanes, table: Lanes) -> Lanes:
    result = np.zeros(LANES, np.uint64)
    for i in range(8):
        if int(table[0]) >> i & 1:
            parts = [x if i >> j & 1 else ~x for j, x in ((2, a), (1, b), (0, c))]
            result |= parts[0] & parts[1] & parts[2]
    return _low(result, 32)


def _shift(amount: Lanes, bits: int) -> tuple[Lanes, Lanes]:
    """The amount below 64, and the lanes in which everything is shifted out."""
    amount = _low(amount, 32)
    out = amount >= np.uint64(bits)
    return np.where(out, np.uint64(0), amount), out


def _left(a: Lanes, amount: Lanes, bits: int) -> Lanes:
    by, out = _shift(amount, bits)
    return np.where(out, np.uint64(0), _low(a << by, bits))


def _right(a: Lanes, amount: Lanes, kind: str) -> Lanes:
    bits = _bits(kind)
    by, out = _shift(amount, bits)
    if kind[0] == "s":
        by = np.where(out, np.uint64(bits - 1), by)
        return _unsigned(_signed(a, bits) >> by.astype(np.int64), bits)
    return np.where(out, np.uint64(0), _low(a, bits) >> by)


def _funnel(low: Lanes, high: Lanes, amount: Lanes, left: bool) -> Lanes:
    both = _low(low, 32) | _low(high, 32) << np.uint64(32)
    by = amount & np.uint64(31)
    return both << by >> np.uint64(32) if left else _low(both >> by, 32)


def _reversed(a: Lanes) -> Lanes:
    return np.array([int(f"{int(x) & 0xFFFFFFFF:032b}"[::-1], 2) for x in a], np.uint64)


def _highest(a: Lanes) -> Lanes:
    """The place of the highest bit of 32; all ones where there is none."""
    return np.array([(int(x).bit_length() - 1) & 0xFFFFFFFF for x in _low(a, 32)], np.uint64)


def _shift_to_highest(a: Lanes) -> Lanes:
    found = _highest(a)
    return np.where(found > np.uint64(31), found, np.uint64(31) - found)


def _insert(a: Lanes, b: Lanes, position: Lanes, length: Lanes, bits: int) -> Lanes:
    ones = _low((np.uint64(1) << length) - np.uint64(1), bits) << position
    return _low(b & ~ones | a << position & ones, bits)


def _halves(a: Lanes, b: Lanes, choose: Callable[[Lanes, Lanes], Lanes]) -> Lanes:
    low, high = np.uint64(0xFFFF), np.uint64(16)
    return choose(a & low, b & low) | choose(a >> high & low, b >> high & low) << high


def _product_above(a: Lanes, b: Lanes) -> Lanes:
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], np.uint64)


def _floats(a: Lanes) -> npt.NDArray[np.float32]:
    return _low(a, 32).astype(np.uint32).view(np.float32)


def _of_floats(a: npt.NDArray[np.float32]) -> Lanes:
    return a.astype(np.float32).view(np.uint32).astype(np.uint64)


def _convert(a: Lanes, to: str, source: str) -> Lanes:
    if source == "f32":
        return np.trunc(_floats(a)).astype(np.uint64)
    if to == "f32":
        return _of_floats(_number(a, source).astype(np.float32))
    return _low(_number(a, source).astype(np.int64).view(np.uint64), _bits(to))


_COMPARISONS: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _float_halves(choose: Callable[..., Any], a: Lanes, b: Lanes) -> Lanes:
    """By half a word, as float16."""
    words = [np.ascontiguousarray(one).astype(np.uint32).view(np.float16) for one in (a, b)]
    return np.asarray(choose(*words), np.float16).view(np.uint32).astype(np.uint64)


def _value(opcode: str) -> Callable[..., Lanes] | None:
    """The function of an opcode whose result depends on its operands alone."""
    name, *rest = opcode.split(".")
    kind = rest[-1] if rest else ""
    if kind == "pred":
        table: dict[str, Callable[..., Lanes]] = {
            "mov": lambda a: a.astype(bool),
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "xor": lambda a, b: a ^ b,
            "not": lambda a: ~a,
        }
        return table.get(name)
    if kind == "u16x2":
        choose = np.maximum if name == "max" else np.minimum
        return lambda a, b: _halves(a, b, choose)
    if kind == "f16x2" and name in ("max", "min"):
        return functools.partial(_float_halves, np.fmax if name == "max" else np.fmin)
    if name == "cvt":
        to, source = rest[-2], rest[-1]
        return lambda a: _convert(a, to, source)
    if name == "setp":
        compare = _COMPARISONS[rest[0]]
        return lambda a, b: compare(_number(a, kind), _number(b, kind))
    if name == "mul" and rest[0] == "wide":
        wide = 2 * _bits(kind)
        return lambda a, b: _low(
            (_number(a, kind).astype(np.int64) * _number(b, kind).astype(np.int64)).view(np.uint64),
            wide,
        )
    if name == "shf":
        return lambda low, high, by: _funnel(low, high, by, rest[0] == "l")
    if name == "dp4a":
        return _dp4a
    if not re.fullmatch(r"[busf]\d+", kind):
        return None
    bits = _bits(kind)

    def wrap(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
        return lambda *operands: _low(function(*operands), bits)

    def ordered(choose: Callable[[Lanes, Lanes], Lanes]) -> Callable[..., Lanes]:
        return lambda a, b: _low(
            choose(_number(a, kind), _number(b, kind)).astype(np.int64).view(np.uint64), bits
        )

    others: dict[str, Callable[..., Lanes]] = {
        "mov": wrap(lambda a: a),
        "and": wrap(lambda a, b: a & b),
        "or": wrap(lambda a, b: a | b),
        "xor": wrap(lambda a, b: a ^ b),
        "not": wrap(lambda a: ~a),
        "neg": wrap(lambda a: np.uint64(0) - a),
        "add": wrap(lambda a, b: a + b),
        "sub": wrap(lambda a, b: a - b),
        "mul": _product_above if "hi" in rest else wrap(lambda a, b: a * b),
        "mad": wrap(lambda a, b, c: a * b + c),
        "shl": lambda a, by: _left(a, by, bits),
        "shr": lambda a, by: _right(a, by, kind),
        "prmt": _prmt,
        "lop3": _lop3,
        "popc": lambda a: np.bitwise_count(_low(a, bits)).astype(np.uint64),
        "clz": lambda a: np.uint64(31) - _signed(_highest(a), 32).view(np.uint64),
        "brev": _reversed,
        "bfind": _shift_to_highest if "shiftamt" in rest else _highest,
        "bfi": lambda a, b, at, length: _insert(a, b, at, length, bits),
        "selp": wrap(lambda a, b, which: np.where(which, a, b)),
        "min": ordered(np.minimum),
        "max": ordered(np.maximum),
        "div": lambda a, b: _of_floats(_floats(a) / _floats(b)),
        "cvta": wrap(lambda a: a),
    }
    return others.get(name)


def decode(opcode: str, operands: list[str], name: str) -> Operation:
    """What a statement does to a warp.

    Raises:
        ValueError: a statement that this file does not know.
    """
    family = opcode.split(".")[0]
    if family in ("membar", "fence", "prefetch"):
        return lambda warp, mask: None
    if opcode == "bar.warp.sync":
        return _all_lanes
    if family in ("ld", "st"):
        return _access(opcode, operands, name)
    if family in ("atom", "red"):
        return _atomic(opcode, operands, name)
    if family in ("shfl", "vote", "redux"):
        return _collective(opcode, operands, name)
    if opcode in ("mov.b32", "mov.b64") and "{" in "".join(operands[:2]):
        return _pack(opcode, operands, name)
    function = _value(opcode)
    if function is None:
        raise ValueError(f"{opcode} {operands}: not known to {__file__}")
    target = operands[0]
    readers = [_reader(one, name) for one in operands[1:]]

    def run(warp: Warp, mask: Lanes) -> None:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            warp.write(target, function(*(read(warp) for read in readers)), mask)

    return run


def _all_lanes(warp: Warp, mask: Lanes) -> None:
    if not mask.all():
        raise RuntimeError("a part of a warp is at a collective of all its lanes")


def _names(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{}").split(",")]


def _pack(opcode: str, operands: list[str], name: str) -> Operation:
    """Halves into a register, or a register into its halves."""
    half = int(opcode[-2:]) // 2
    if operands[0].startswith("{"):
        low, high = _names(operands[0])
        read = _reader(operands[1], name)

        def unpack(warp: Warp, mask: Lanes) -> None:
            whole = read(warp)
            warp.write(low, _low(whole, half), mask)
            warp.write(high, whole >> np.uint64(half), mask)

        return unpack
    readers = [_reader(one, name) for one in _names(operands[1])]

    def pack(warp: Warp, mask: Lanes) -> None:
        low, high = (_low(read(warp), half) for read in readers)
        warp.write(operands[0], low | high << np.uint64(half), mask)

    return pack


def _address(operand: str, name: str, shared: bool) -> Callable[[Warp], Lanes]:
    inside = operand.strip("[]")
    base, _, offset = inside.partition("+")
    read = _reader(base, name)
    added = np.uint64(int(offset or "0") & (2**64 - 1))
    # Addresses of the shared state space are 32 bits.
    at = np.uint64(SHARED_AT)
    if shared:
        return lambda warp: (read(warp) + added & np.uint64(0xFFFFFFFF)) | at
    return lambda warp: read(warp) + added


def _access(opcode: str, operands: list[str], name: str) -> Operation:
    parts = opcode.split(".")
    nbytes = _bits(parts[-1]) // 8
    is_load = parts[0] == "ld"
    values, place = (operands[0], operands[1]) if is_load else (operands[1], operands[0])
    names = _names(values)
    address = _address(place, name, "shared" in parts)
    readers = [] if is_load else [_reader(one, name) for one in names]
    signed = parts[-1][0] == "s"
    whole = nbytes * len(names)

    def load(warp: Warp, mask: Lanes) -> None:
        at = address(warp)
        found = np.zeros((len(names), LANES), np.uint64)
        for lane in np.flatnonzero(mask):
            buffer, first = warp.memory.place(int(at[lane]), whole)
            for i in range(len(names)):
                begin = first + i * nbytes
                found[i, lane] = int.from_bytes(buffer[begin : begin + nbytes].tobytes(), "little")
        for i, one in enumerate(names):
            # Of 8 bits: in a register of 16, extended.
            value = _unsigned(_signed(found[i], 8 * nbytes), 64) if signed else found[i]
            warp.write(one, value, mask)

    def store(warp: Warp, mask: Lanes) -> None:
        at = address(warp)
        found = [read(warp) for read in readers]
        for lane in np.flatnonzero(mask):
            buffer, first = warp.memory.place(int(at[lane]), whole)
            for i, values_of in enumerate(found):
                begin = first + i * nbytes
                number = int(values_of[lane]) & ((1 << 8 * nbytes) - 1)
                buffer[begin : begin + nbytes] = np.frombuffer(
                    number.to_bytes(nbytes, "little"), np.uint8
                )

    return load if is_load else store


def _atomic(opcode: str, operands: list[str], name: str) -> Operation:
    parts = opcode.split(".")
    nbytes = _bits(parts[-1]) // 8
    target = operands[0] if parts[0] == "atom" else None
    place, value = operands[-2:]
    address = _address(place, name, "shared" in parts)
    read = _reader(value, name)
    change: Callable[[int, int], int] = {
        "add": lambda old, value: old + value,
        "or": lambda old, value: old | value,
        "min": min,
    }[parts[2]]

    def run(warp: Warp, mask: Lanes) -> None:
        at, values = address(warp), read(warp)
        found = np.zeros(LANES, np.uint64)
        for lane in np.flatnonzero(mask):
            buffer, first = warp.memory.place(int(at[lane]), nbytes)
            old = int.from_bytes(buffer[first : first + nbytes].tobytes(), "little")
            new = change(old, int(values[lane])) & ((1 << 8 * nbytes) - 1)
            buffer[first : first + nbytes] = np.frombuffer(new.to_bytes(nbytes, "little"), np.uint8)
            found[lane] = old
        if target is not None:
            warp.write(target, found, mask)

    return run


def _collective(opcode: str, operands: list[str], name: str) -> Operation:
    """Shuffles, votes and reductions, of all lanes: the masks of these kernels are."""
    parts = opcode.split(".")
    target, _, also = operands[0].partition("|")
    readers = [_reader(one.lstrip("!"), name) for one in operands[1:]]
    lanes = np.arange(LANES)

    def run(warp: Warp, mask: Lanes) -> None:
        _all_lanes(warp, mask)
        values = readers[0](warp)
        if parts[0] == "vote":
            holds = ~values if operands[1].startswith("!") else values
            if parts[2] == "any":
                result = np.full(LANES, holds.any())
            else:
                ballot = sum(1 << i for i in range(LANES) if holds[i])
                result = np.full(LANES, ballot, np.uint64)
        elif parts[0] == "redux":
            numbers = [int(x) & 0xFFFFFFFF for x in values]
            total = {"add": sum, "min": min, "max": max}[parts[2]](numbers) & 0xFFFFFFFF
            result = np.full(LANES, total, np.uint64)
        else:
            by = readers[1](warp).astype(np.int64)
            source = {
                "up": np.where(lanes - by >= 0, lanes - by, lanes),
                "down": np.where(lanes + by < LANES, lanes + by, lanes),
                "bfly": lanes ^ by,
                "idx": by & 31,
            }[parts[2]]
            result = values[source]
            if also:
                inside = {"up": lanes >= by, "down": lanes + by < LANES}.get(parts[2], ALL)
                warp.write(also, inside, mask)
        warp.write(target, result, mask)

    return run
