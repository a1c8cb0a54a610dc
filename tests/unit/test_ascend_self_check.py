"""A codec that no hardware has confirmed proves itself on a device before it is trusted there.

Each case runs in a process of its own: which codec serves a device type is settled once.
"""

from pathlib import Path

import pytest
from stand_in_codec import RIGHT, run

# The first import of the simulated device builds it.
pytestmark = pytest.mark.timeout(900)

# Where the job has its frame and its output (kernels/include/memswap/codec.h).
ENCODES_WRONG = """
def flip(jobs):
    ctypes.cast(pointer(jobs, 24) + 5000, ctypes.POINTER(ctypes.c_uint8))[0] ^= 4
def wrong(table): replace(table, "encode", flip)
"""
DECODES_WRONG = """
def flip(jobs):
    ctypes.cast(pointer(jobs, 32) + 700, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1
def wrong(table): replace(table, "decode", flip)
"""

USE = """
import memswap
tensor = torch.randn(50000, dtype=torch.float32).bfloat16().to(device)
print("faults:", native.codec_faults(device))
print("again:", native.codec_faults(device) == native.codec_faults(device))
try:
    frame = memswap.encode(tensor)
    print("encoded", torch.equal(memswap.decode(frame).cpu(), tensor.cpu()))
except RuntimeError as error:
    print("refused:", error)
kept = memswap.saved_tensors(memswap.Policy(action=memswap.Action.ENCODE, min_bytes=1024))
weight = torch.randn(300, 300).to(device).requires_grad_()
with kept as saved:
    loss = (weight * weight).exp().sum()
loss.backward()
stats = saved.stats()
print("left:", stats.moved_storages > 0, "stayed:", "codec failed its check" in stats.kept)
"""


def test_a_right_codec_is_trusted() -> None:
    said = run(RIGHT, USE)
    assert "faults: []" in said and "again: True" in said, said
    assert "encoded True" in said and "left: True" in said, said


@pytest.mark.parametrize("wrong", [ENCODES_WRONG, DECODES_WRONG], ids=["encode", "decode"])
def test_a_wrong_kernel_is_found_and_nothing_is_encoded(wrong: str) -> None:
    said = run(wrong, USE)
    assert "failed its self-check on" in said and "bfloat16 dense" in said, said
    assert "refused: memswap: codec" in said and "Nothing of that dtype and layout" in said, said
    assert "left: False stayed: True" in said, said


# memswap_decode_job has the dtype 48 bytes from its beginning.
DECODES_FLOAT64_WRONG = """
def flip(jobs):
    dtype = ctypes.cast(jobs + 48, ctypes.POINTER(ctypes.c_uint8))[0]
    if dtype == native.dtype_code(torch.float64):
        ctypes.cast(pointer(jobs, 32) + 700, ctypes.POINTER(ctypes.c_uint8))[0] ^= 1
def wrong(table): replace(table, "decode", flip)
"""


def test_what_is_found_names_every_dtype_and_layout_that_failed() -> None:
    said = run(DECODES_FLOAT64_WRONG, 'print("faults:", native.codec_faults(device))')
    assert "for float64 dense, float64 sparse, float64 ints, float64 raw: " in said, said
    assert "bfloat16" not in said, said


def test_what_works_is_encoded_and_what_does_not_stays_or_is_swapped_and_is_told_once() -> None:
    """Float64 alone fails. Bits are those of a training without memswap."""
    said = run(
        DECODES_FLOAT64_WRONG,
        """
        import warnings
        import memswap
        pool = memswap.HostPool("64MiB", device=device)

        def train(dtype, **options):
            torch.manual_seed(0)
            weight = torch.randn(300, 300, dtype=dtype).to(device).requires_grad_()
            policy = memswap.Policy(min_bytes=1024, **options)
            with memswap.saved_tensors(policy, pool=pool) as saved:
                loss = ((weight * weight).exp() * 2).sin().sum()
            loss.backward()
            return weight.grad.cpu(), saved.stats()

        for dtype in (torch.float64, torch.float32):
            plain, _ = train(dtype, action=memswap.Action.KEEP)
            for action in (memswap.Action.ENCODE, memswap.Action.ENCODE_SWAP):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    gradient, stats = train(dtype, action=action)
                told = [str(warning.message) for warning in caught]
                print(dtype, action.name, "same", torch.equal(gradient, plain), "encoded",
                      stats.encoded_storages > 0, "moved", stats.moved_storages > 0, "stayed",
                      "codec failed its check" in stats.kept, "told",
                      sum("is not encoded" in message for message in told))
        for layout in ("dense", "sparse"):
            for dtype in (torch.float64, torch.bfloat16):
                try:
                    tensor = torch.randn(5000, dtype=dtype).relu().to(device)
                    back = memswap.decode(memswap.encode(tensor, layout=layout))
                    print(dtype, layout, torch.equal(back.cpu(), tensor.cpu()))
                except RuntimeError as error:
                    print(dtype, layout, "refused:", error)
        """,
    )
    lines = said.splitlines()
    assert lines[:4] == [
        "torch.float64 ENCODE same True encoded False moved False stayed True told 1",
        "torch.float64 ENCODE_SWAP same True encoded False moved True stayed False told 1",
        "torch.float32 ENCODE same True encoded True moved True stayed False told 0",
        "torch.float32 ENCODE_SWAP same True encoded True moved True stayed False told 0",
    ], said
    for line, layout in ((lines[4], "dense"), (lines[6], "sparse")):
        assert line.startswith(f"torch.float64 {layout} refused: memswap: codec"), said
        assert f"for float64 {layout}: what it encoded and decoded is not" in line, said
    assert lines[5] == "torch.bfloat16 dense True" and lines[7] == "torch.bfloat16 sparse True", (
        said
    )


def test_info_says_what_failed() -> None:
    said = run(DECODES_FLOAT64_WRONG, "from memswap.cli import info; print(info.describe_faults())")
    assert "failed its self-check on" in said and "for float64 dense, float64 sparse" in said, said


# A frame of layout sparse that its encoder spoils: dense ones are right.
ENCODES_SPARSE_WRONG = """
def flip(jobs):
    layout = ctypes.cast(jobs + 17, ctypes.POINTER(ctypes.c_uint8))[0]
    if layout == 1:
        ctypes.cast(pointer(jobs, 24) + 5000, ctypes.POINTER(ctypes.c_uint8))[0] ^= 4
def wrong(table): replace(table, "encode", flip)
"""


def test_a_tensor_that_would_turn_to_a_layout_that_failed_stays_in_its_own() -> None:
    """Most elements are zeros: the second frame of such a tensor is sparse elsewhere."""
    program = """
        import memswap
        print("faults:", native.codec_faults(device))
        tensor = torch.randn(64, 1024).relu().mul(torch.rand(64, 1024) < 0.5).to(device)
        saved = memswap.saved_tensors(memswap.Policy(action=memswap.Action.ENCODE, min_bytes=1024))
        for step in range(3):
            weight = tensor.clone().requires_grad_()
            with saved:
                loss = (weight * tensor).exp().sum()
            loss.backward()
            torch.accelerator.synchronize()
        stats = saved.stats()
        print("left:", stats.encoded_storages, sorted(stats.kept))
        """
    said, right = run(ENCODES_SPARSE_WRONG, program), run(RIGHT, program)
    assert "float32 sparse" in said and " dense" not in said, said
    assert "left: 0" not in said, said
    assert said.partition("left:")[2] == right.partition("left:")[2], (said, right)


BUDGET = """
import memswap
from memswap.planning import profile
profile.COPY_BYTES = profile.CODEC_BYTES = 1 << 20
rates = memswap.profile(device)
print("copies", rates.copies, "encodes", rates.encodes)
print("remembered", profile.remembered(device))
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
                              for _ in range(4))).to(device)
policy = memswap.Policy(min_bytes=1)
pool = memswap.HostPool("64MiB", device=device)
manager = memswap.manage(model, policy, pool=pool, budget="60%", rates=rates)
x = torch.randn(512, 64).to(device)
for _ in range(8):
    model(x).sum().backward()
print("planned", manager.plan is not None, "over", manager.plan.over_budget_bytes)
"""


def test_without_a_codec_that_is_trusted_a_budget_is_kept_by_swapping(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = run(DECODES_WRONG, BUDGET)
    assert "copies True encodes False" in said and "remembered None" in said, said
    assert "planned True over 0" in said, said


def test_a_check_that_found_no_memory_is_made_again() -> None:
    said = run(
        RIGHT,
        """
        from simdev import _C
        from simdev.laboratory import DEFAULT_CAPACITY_BYTES
        _C.set_capacity(0, 1024)
        print("first:", native.codec_fault(device, 1, 0), native.codec_faults(device))
        _C.set_capacity(0, DEFAULT_CAPACITY_BYTES)
        print("then:", native.codec_fault(device, 1, 0) or native.codec_faults(device) or "none")
        """,
    )
    assert "found no memory on" in said and "then: none" in said, said


# Where a decode's job has its hint.
HINTS = """
hints = []
def note(jobs): hints.append(ctypes.cast(jobs + 50, ctypes.POINTER(ctypes.c_uint8))[0])
def wrong(table): replace(table, "decode", note)
"""


def test_the_decode_operator_names_the_layout_to_the_codec() -> None:
    """Which makes one launch of it (tests/cuda_emulator counts them)."""
    said = run(
        HINTS,
        """
        x = torch.randn(5000).bfloat16().to(device)
        frame = torch.ops.memswap.encode(x, 1, 1)
        torch.accelerator.synchronize()
        hints.clear()
        for layout in ((1,), ()):
            back = torch.ops.memswap.decode(frame, x.shape, x.dtype, *layout)
            assert torch.equal(back.cpu(), x.cpu())
        print("hints:", hints)
        """,
    )
    assert "hints: [2, 0]" in said, said
