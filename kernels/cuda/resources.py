"""What the compiled kernels take, against what they took when it was last looked at.

    python kernels/cuda/resources.py            compare with resources.json; exit status 1 if worse
    python kernels/cuda/resources.py --update   write resources.json

Registers, spills and stack frames are what ptxas says; of the last two there are none (a frame
without spills is an array that is indexed by a variable). Instructions are the size of a kernel's
machine code over 16 bytes, which an instruction takes on every architecture here: rare paths count
as much as those that every block takes, so the number is for comparison with itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASELINE = HERE / "resources.json"
SOURCES = (
    "codec",
    "decode_floats",
    "decode_others",
    "decode_sparse",
    "encode_dense",
    "encode_others",
    "encode_sparse",
)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
INSTRUCTION_BYTES = 16
#: Another patch of the compiler moves code about; a change worth a look is larger.
TOLERANCE = {"instructions": 1.05, "registers": 1.0}

Resources = dict[str, dict[str, int]]


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Sizes of the sections .text.<kernel> of a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    sections = [
        struct.unpack_from("<IIQQQQ", cubin, offset + i * entry_bytes) for i in range(count)
    ]
    names_at = sections[names_index][4]
    sizes = {}
    for name_at, _, _, _, _, size in sections:
        begin = names_at + name_at
        name = cubin[begin : cubin.index(b"\0", begin)].decode()
        if name.startswith(".text."):
            sizes[name.removeprefix(".text.")] = size
    return sizes


def short_name(mangled: str) -> str:
    """`DenseCoder<1>` for encode_tiles<DenseCoder<Dtype(1)>>."""
    found = re.search(r"_tilesINS0_\d+([A-Z][a-z]+(?:Coder|Decoder))", mangled)
    if found is None:
        return "write_header"
    parameter = re.search(r"(?:DtypeE|ILj)(\d+)E", mangled[found.end() :])
    return f"{found[1]}<{parameter[1]}>" if parameter else found[1]


def compile_source(source: str, architecture: str) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command = ["nvcc", "-std=c++17", "-O3", "-Werror=all-warnings"]
        command += [f"-arch={architecture}", f"-I{HERE.parent}/include"]
        done = subprocess.run(
            [*command, "-Xptxas=-v", "-cubin", "-o", str(cubin), str(HERE / f"{source}.cu")],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(done.stdout + done.stderr)
        sizes = code_bytes(cubin.read_bytes())
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    )
    kernels: Resources = {}
    for name, stack, stores, loads, registers in re.findall(pattern, done.stderr, re.DOTALL):
        kernels[short_name(name)] = {
            "registers": int(registers),
            "spill_bytes": int(stores) + int(loads),
            "stack_bytes": int(stack),
            "instructions": sizes[name] // INSTRUCTION_BYTES,
        }
    return kernels


def measure(architectures: tuple[str, ...] = ARCHITECTURES) -> dict[str, Resources]:
    """Per architecture and kernel."""
    measured: dict[str, Resources] = {architecture: {} for architecture in architectures}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        work = {
            pool.submit(compile_source, source, architecture): architecture
            for architecture in architectures
            for source in SOURCES
        }
        for done in concurrent.futures.as_completed(work):
            measured[work[done]].update(done.result())
    return {name: dict(sorted(kernels.items())) for name, kernels in measured.items()}


def regressions(measured: dict[str, Resources], baseline: dict[str, Resources]) -> list[str]:
    found = []
    for architecture, kernels in measured.items():
        known = baseline.get(architecture, {})
        for kernel in sorted(set(kernels) ^ set(known)):
            found.append(f"{architecture} {kernel}: is in one of sources and baseline only")
        for kernel in sorted(set(kernels) & set(known)):
            if kernels[kernel]["spill_bytes"] != 0:
                found.append(f"{architecture} {kernel}: spills registers")
            elif kernels[kernel]["stack_bytes"] != 0:
                found.append(f"{architecture} {kernel}: has an array in local memory")
            for what, factor in TOLERANCE.items():
                now, before = kernels[kernel][what], known[kernel][what]
                if now > before * factor:
                    found.append(f"{architecture} {kernel}: {what} {before} -> {now}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write resources.json")
    measured = measure()
    if parser.parse_args().update:
        BASELINE.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        return 0
    found = regressions(measured, json.loads(BASELINE.read_text(encoding="utf-8")))
    print("\n".join(found) or "no kernel takes more than it did")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
