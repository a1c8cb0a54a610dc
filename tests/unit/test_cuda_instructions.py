"""nvcc's PTX of the CUDA kernels, executed: the CPU's frames, in no more instructions than once."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import memswap

ROOT = Path(__file__).resolve().parents[2]
HEADER_BYTES = 128
#: What differs in the header: whether positions are ordered by definition, and the capacity.
UNLIKE = [8, *range(32, 40)]

pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def instructions() -> ModuleType:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH, so CUDA sources cannot be compiled")
    path = ROOT / "kernels/cuda/instructions.py"
    spec = importlib.util.spec_from_file_location("instructions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["instructions"] = module  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


SLOW = pytest.mark.slow
ARCHITECTURES = ["sm_90", pytest.param("sm_80", marks=SLOW), pytest.param("sm_100", marks=SLOW)]


@SLOW
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_compiled_kernels_write_the_cpus_frames_and_decode_them(
    instructions: ModuleType, architecture: str
) -> None:
    if instructions.nvdisasm() is None:
        pytest.skip("nvdisasm was not found (pip install nvidia-cuda-nvdisasm)")
    dtypes = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}
    for case in instructions.CASES:
        frame = instructions.execute(case, architecture).frame  # compares what was decoded
        tensor = torch.from_numpy(case.tensor()).view(dtypes[case.dtype])
        layout = memswap.codec.Layout(case.layout).name.lower()
        expected = memswap.encode(tensor, layout=layout)._bytes.numpy()  # type: ignore[arg-type]
        found = frame[: len(expected)].copy()
        found[UNLIKE] = expected[UNLIKE]
        assert np.array_equal(found, expected), f"{case.name}: not the CPU's frame"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_issues_more_instructions_than_it_did(
    instructions: ModuleType, architecture: str
) -> None:
    if instructions.nvdisasm() is None:
        pytest.skip("nvdisasm was not found (pip install nvidia-cuda-nvdisasm)")
    baseline = json.loads(instructions.BASELINE.read_text(encoding="utf-8"))
    found = instructions.regressions(instructions.measure((architecture,)), baseline)
    said = "\n".join(found)
    assert not found, f"{said}\nif this is meant: python kernels/cuda/instructions.py --update"


def test_a_statement_that_is_not_known_is_an_error(instructions: ModuleType) -> None:
    ptx = sys.modules["ptx"]
    text = ".visible .entry some_kernel(\n\t.param .b8 some_kernel_param_0[4]\n)\n{\n"
    with pytest.raises(ValueError, match="sad"):
        ptx.Kernel.of(text + "\tsad.u32 \t%r1, %r2, %r3, %r4;\n}\n", "some_kernel")


def test_reads_outside_every_buffer_and_partial_collectives_are_errors(
    instructions: ModuleType,
) -> None:
    ptx = sys.modules["ptx"]

    def run(body: str) -> None:
        text = ".visible .entry some_kernel(\n\t.param .b8 some_kernel_param_0[4]\n)\n{\n"
        kernel = ptx.Kernel.of(text + body + "\tret;\n}\n", "some_kernel")
        kernel.run(ptx.Memory(), b"0000", 1, 32, 64)

    run("\tmov.u32 %r1, %tid.x;\n\tst.shared.u8 [%r1+32], %r1;\n")
    with pytest.raises(RuntimeError, match="are in no buffer"):
        run("\tmov.u32 %r1, %tid.x;\n\tst.shared.u8 [%r1+33], %r1;\n")
    with pytest.raises(RuntimeError, match="a part of a warp"):
        run(
            "\tmov.u32 %r1, %tid.x;\n\tsetp.lt.u32 %p1, %r1, 7;\n\t@%p1 bra $L1;\n"
            "\tbar.warp.sync -1;\n$L1:\n"
        )
