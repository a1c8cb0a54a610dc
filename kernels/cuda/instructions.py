"""Instructions that the kernels issue for each element, by pipe, as machine code has them.

    python kernels/cuda/instructions.py            compare with instructions.json; 1 if worse
    python kernels/cuda/instructions.py --update   write instructions.json

nvcc's PTX of a kernel is executed (ptx.py) on a tensor of its kind, eight tiles by one thread
block, the frame decoded again, and every bit compared. That says how often a warp executes each
line of the PTX; ptxas says which line each instruction of the machine code comes from, and nvdisasm
lists them (from the toolkit, or `pip install nvidia-cuda-nvdisasm`). All instructions of a basic
block are issued equally often: as often as most of them by their lines. Numbers are issue slots for
each element, of which a processor has 128 a clock: an instruction of a warp takes 32, whether or
not its lanes were active.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from ptx import Kernel, Memory  # noqa: E402

BASELINE = HERE / "instructions.json"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
#: Another patch of the compiler moves code about; a change worth a look is larger.
TOLERANCE = 1.03
TILES, BLOCKS, ELEMENTS = 8, 64, 8 * 8192
SHARED_BYTES = 100 * 1024
THREADS = 256

#: Of compute capability 8.0 to 10.0 (CUDA C++ Programming Guide, "Arithmetic Instructions"): each
#: of a processor's four parts issues one warp instruction a clock; the integer pipe takes one every
#: second clock, and so does that of products; the narrow one takes one every eighth.
PIPES = {
    "alu": r"LOP3|PLOP3|LOP|SHF|SHL|SHR|IADD3|IADD|ISETP|PRMT|LEA|SEL|FSEL|VIMNMX3?|IMNMX|IABS|"
    r"FSETP|FMNMX|HMNMX2|P2R|R2P|BMSK|SGXT|VABSDIFF|VOTE|ISCADD|MOV|CS2R|VIADD|VIADDMNMX",
    "fma": r"IMAD|IDP|IMUL|FADD2?|FMUL2?|FFMA2?|IDP4A",
    "lsu": r"LDC?U?|LDG|LDS|LDL|ST|STG|STS|STL|ATOM|ATOMS|ATOMG|RED|REDG|SHFL|CCTLL?|MEMBAR|"
    r"(CGA)?ERRBAR",
    "narrow": r"POPC|FLO|BREV|MUFU|I2FP?|F2I|F2F|I2I|C?REDUX|S2U?R|B2R",
    "uniform": r"U[A-Z0-9]+|R2UR|VOTEU",
    "control": r"BRA|BRX|JMP|BSSY|BSYNC|BREAK|EXIT|RET|CALL|WARPSYNC|BAR|NOP|YIELD|DEPBAR|"
    r"NANOSLEEP|ELECT|KILL|BMOV|PREEXIT|[A-Z]*COLLECTIVE",
}


class EncodeJob(ctypes.Structure):
    """jobs.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("input", "frame", "records", "var", "overflow")),
        *((name, ctypes.c_uint64) for name in ("overflow_cursor", "report", "counters")),
        ("elements", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("var_capacity", "var_limit")),
        *((name, ctypes.c_uint32) for name in ("overflow_capacity", "blocks", "tiles")),
        ("slab_bytes", ctypes.c_uint32),
        *((name, ctypes.c_uint8) for name in ("dtype", "layout", "fast", "center", "checked")),
        ("is_counted_apart", ctypes.c_uint8),
    ]


class DecodeJob(ctypes.Structure):
    """jobs.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("frame", "overflow", "output", "status")),
        *((name, ctypes.c_uint64) for name in ("frame_bytes", "elements")),
        *((name, ctypes.c_uint32) for name in ("overflow_capacity", "tiles")),
        *((name, ctypes.c_uint8) for name in ("dtype", "verify", "is_alone")),
        ("slab_bytes", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Case:
    """A kind of tensor, and the kernels of its frames."""

    name: str
    dtype: int
    layout: int
    width: int
    slab_bytes: int
    longest: int
    """Units of a block's payload."""
    encoder: tuple[str, str]
    """Source, and what is in the kernel's name and in no other's of the source."""
    decoder: tuple[str, str]
    zeros: float = 0.0

    def tensor(self) -> npt.NDArray[np.uint8]:
        """The elements' bytes: N(0, 1), with zeros where the case has them."""
        generator = np.random.default_rng(7)
        values = generator.standard_normal(ELEMENTS).astype(np.float32)
        values[generator.random(ELEMENTS) < self.zeros] = 0.0
        if self.dtype == 1:
            words = values.view(np.uint32)
            rounded = words + np.uint32(0x7FFF) + (words >> np.uint32(16) & np.uint32(1))
            return (rounded >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        if self.dtype == 2:
            return values.astype(np.float16).view(np.uint8)
        return values.view(np.uint8)


def _float(coder: str, dtype: int) -> str:
    return f"{coder}ILNS_5frame5DtypeE{dtype}E"


CASES = (
    Case(
        "bfloat16 dense",
        *(1, 0, 2, 1280, 96),
        ("encode_dense", _float("DenseCoder", 1)),
        ("decode_floats", _float("FloatDecoder", 1)),
    ),
    Case(
        "float16 dense",
        *(2, 0, 2, 1664, 48),
        ("encode_dense", _float("DenseCoder", 2)),
        ("decode_floats", _float("FloatDecoder", 2)),
    ),
    Case(
        "float32 dense",
        *(3, 0, 4, 3328, 96),
        ("encode_dense", _float("DenseCoder", 3)),
        ("decode_floats", _float("FloatDecoder", 3)),
    ),
    Case(
        "bfloat16 half zeros",
        *(1, 1, 2, 0, 256),
        ("encode_sparse", _float("SparseCoder", 1)),
        ("decode_sparse", _float("SparseDecoder", 1)),
        zeros=0.5,
    ),
)


@dataclass(frozen=True)
class Compiled:
    """A source's PTX, and by entry function the machine code's instructions with their lines."""

    ptx: str
    code: dict[str, list[list[tuple[str, int]]]]


def nvdisasm() -> str | None:
    """Where nvdisasm is; None: nowhere."""
    found = shutil.which("nvdisasm")
    if found is None and importlib.util.find_spec("nvidia") is not None:
        for folder in importlib.util.find_spec("nvidia").submodule_search_locations or ():  # type: ignore[union-attr]
            found = next((str(one) for one in Path(folder).glob("*/bin/nvdisasm")), found)
    return found


@functools.cache
def compile_source(source: str, architecture: str) -> Compiled:
    """nvcc's PTX, ptxas' machine code of it, and what nvdisasm says of that."""
    disassembler = nvdisasm()
    if disassembler is None:
        raise SystemExit("nvdisasm is not on PATH: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernels.ptx", Path(folder) / "kernels.cubin"
        command = ["nvcc", "-std=c++17", "-O3", f"-I{HERE.parent}/include"]
        command += [f"-arch={architecture}", "--ptx", "-o", str(ptx), str(HERE / f"{source}.cu")]
        ptxas = shutil.which("ptxas") or str(Path(shutil.which("nvcc") or "").parent / "ptxas")
        assemble = [ptxas, f"-arch={architecture}", "-lineinfo", "-o", str(cubin), str(ptx)]
        for one in (command, assemble):
            done = subprocess.run(one, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(done.stdout + done.stderr)
        listing = subprocess.run(
            [disassembler, "-gp", "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        return Compiled(ptx.read_text(encoding="utf-8"), blocks_of(listing))


def blocks_of(listing: str) -> dict[str, list[list[tuple[str, int]]]]:
    """By entry function: basic blocks of (opcode, line of the PTX).

    Left out are those that a warp reaches only where its lanes have parted before a collective
    (BRA.DIV): these kernels' never have.
    """
    functions: dict[str, list[_Block]] = {}
    blocks: list[_Block] = []
    line = 0
    for text in listing.splitlines():
        section = re.match(r"\.text\.(\w+):", text)
        place = re.search(r'//## File ".nv_debug_ptx_txt", line (\d+)', text)
        label = re.match(r"(\.L_\w+):", text)
        found = re.match(
            r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)([\w.]*)\s*(.*);", text
        )
        if section:
            blocks = functions[section[1]] = [_Block()]
        elif place:
            line = int(place[1])
        elif label and blocks:
            blocks.append(_Block(label[1]))
        elif found:
            predicate, opcode, modifiers, operands = found.groups()
            blocks[-1].instructions.append((opcode, line))
            targets = re.findall(r"\.L_\w+", operands)
            if opcode in ("BRA", "BRX", "CALL"):
                if ".DIV" not in modifiers:
                    blocks[-1].targets += targets
                # A branch may also depend on a predicate that is an operand.
                always = not predicate and not re.match(r"!?U?P\w", operands)
                blocks[-1].falls_through = opcode == "CALL" or ".DIV" in modifiers or not always
                blocks.append(_Block())
            elif opcode in ("EXIT", "RET") and not predicate:
                blocks[-1].falls_through = False
                blocks.append(_Block())
    return {name: _reached(blocks) for name, blocks in functions.items()}


@dataclass
class _Block:
    """A basic block, and where it leads."""

    label: str = ""
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True
    instructions: list[tuple[str, int]] = field(default_factory=list)


def _reached(blocks: list[_Block]) -> list[list[tuple[str, int]]]:
    """The instructions of the blocks that the first one leads to."""
    places = {block.label: i for i, block in enumerate(blocks) if block.label}
    reached, waiting = set(), [0]
    while waiting:
        at = waiting.pop()
        if at in reached or at >= len(blocks):
            continue
        reached.add(at)
        waiting += [places[target] for target in blocks[at].targets]
        if blocks[at].falls_through:
            waiting.append(at + 1)
    return [block.instructions for i, block in enumerate(blocks) if i in reached]


def pipe_of(opcode: str) -> str:
    """Which pipe an instruction is issued to."""
    for pipe, pattern in PIPES.items():
        if re.fullmatch(pattern, opcode):
            return pipe
    raise SystemExit(f"{opcode}: in none of PIPES of {__file__}")


def slots(blocks: list[list[tuple[str, int]]], counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """Issue slots by pipe, from how often each line was executed."""
    total: Counter[str] = Counter()
    for block in blocks:
        if block:
            often = statistics.median_high(int(counts[line]) for _, line in block)
            for opcode, _ in block:
                total[pipe_of(opcode)] += often
    by_pipe = {pipe: 32 * total[pipe] / ELEMENTS for pipe in PIPES}
    return {"issue": sum(by_pipe.values()), **by_pipe}


@dataclass
class Run:
    """What executing both directions left behind."""

    frame: npt.NDArray[np.uint8]
    encode: npt.NDArray[np.int64]
    decode: npt.NDArray[np.int64]


def execute(case: Case, architecture: str, fast_center: int | None = None) -> Run:
    """Encode and decode a tensor of the case; an error where its bits change."""
    memory = Memory()
    tensor = case.tensor()
    input_at, source = memory.allocate(len(tensor))
    source[:] = tensor
    records = 128 + case.slab_bytes * BLOCKS
    var = records + 32 * TILES
    capacity = case.longest * BLOCKS
    frame_at, frame = memory.allocate(var + 8 * capacity)
    workspace_at, _ = memory.allocate(128)
    encode_job = EncodeJob(
        input=input_at, frame=frame_at, records=frame_at + records, var=frame_at + var,
        counters=workspace_at, elements=ELEMENTS, var_capacity=capacity, var_limit=capacity,
        blocks=BLOCKS, tiles=TILES, slab_bytes=case.slab_bytes, dtype=case.dtype,
        layout=case.layout, fast=fast_center is not None, center=fast_center or 0,
        is_counted_apart=1,
    )  # fmt: skip
    encoder, decoder = (
        Kernel.of(compile_source(source_name, architecture).ptx, part)
        for source_name, part in (case.encoder, case.decoder)
    )
    encode = encoder.run(memory, bytes(encode_job), 1, THREADS, SHARED_BYTES)
    output_at, output = memory.allocate(len(tensor))
    status_at, status = memory.allocate(4)
    decode_job = DecodeJob(
        frame=frame_at, output=output_at, status=status_at, frame_bytes=len(frame),
        elements=ELEMENTS, tiles=TILES, dtype=case.dtype, is_alone=1, slab_bytes=case.slab_bytes,
    )  # fmt: skip
    decode = decoder.run(memory, bytes(decode_job), 1, THREADS, SHARED_BYTES)
    if status.any() or not np.array_equal(output, tensor):
        raise SystemExit(f"{case.name} on {architecture}: the decoded tensor is another one")
    return Run(frame, encode, decode)


def measure(architectures: tuple[str, ...] = ARCHITECTURES) -> dict[str, dict[str, float]]:
    """Issue slots for each element, by architecture, case and direction."""
    measured: dict[str, dict[str, float]] = {}
    for architecture in architectures:
        for case in CASES:
            run = execute(case, architecture)
            for direction, kernel, counts in (
                ("encode", case.encoder, run.encode),
                ("decode", case.decoder, run.decode),
            ):
                compiled = compile_source(kernel[0], architecture)
                name = Kernel.of(compiled.ptx, kernel[1]).name
                found = slots(compiled.code[name], counts)
                key = f"{architecture} {case.name} {direction}"
                measured[key] = {pipe: round(value, 2) for pipe, value in found.items()}
    return measured


def regressions(
    measured: dict[str, dict[str, float]], baseline: dict[str, dict[str, float]]
) -> list[str]:
    """What takes more issue slots than it did."""
    compared = {key.split()[0] for key in measured}
    baseline = {key: pipes for key, pipes in baseline.items() if key.split()[0] in compared}
    found = [f"{key}: is in one of cases and baseline only" for key in measured.keys() ^ baseline]
    for key in sorted(measured.keys() & baseline):
        now, before = measured[key]["issue"], baseline[key]["issue"]
        if now > before * TOLERANCE:
            found.append(f"{key}: {before} -> {now} issue slots for each element")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write instructions.json")
    arguments = parser.parse_args()
    measured = measure()
    for key, pipes in measured.items():
        print(key, " ".join(f"{pipe} {value:g}" for pipe, value in pipes.items()))
    if arguments.update:
        lines = [f"{json.dumps(key)}: {json.dumps(pipes)}" for key, pipes in measured.items()]
        BASELINE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return 0
    found = regressions(measured, json.loads(BASELINE.read_text(encoding="utf-8")))
    print("\n".join(found) or "no kernel issues more than it did")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
