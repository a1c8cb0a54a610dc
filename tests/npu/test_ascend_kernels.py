"""memswap's AscendC kernels on torch_npu's streams.

The codec is memswap_codec_ascend(); its kernels run on the emulator, in the order of the streams
that they were launched on, and a broken rule of the device ends the process with its name. Every
other test of this folder that encodes does so with these kernels as well.
"""

from __future__ import annotations

import codec_machine as lanes
import pytest
import torch
from fake_acl.machine import kernel_launches
from helpers import Remember, collect, flush_autograd, let_sends_end, look, same_bits

import fake_acl
import memswap
from memswap._native import native

INTEGERS = [
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64,
]  # fmt: skip
FLOATS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
RAW = {torch.uint8: 8, torch.bfloat16: 16, torch.float32: 32, torch.float64: 64}
#: (dtype, layout, kernel that encodes, kernel that decodes)
FORMATS = [
    *((t, "dense", f"encode_dense_{n}", f"decode_{n}") for t, n in FLOATS.items()),
    *((t, "sparse", f"encode_sparse_{n}", f"decode_{n}") for t, n in FLOATS.items()),
    (torch.float32, "upcast", "encode_upcast", "decode_fp32"),
    (torch.bool, "bits", "encode_bits", "decode_other8"),
    *(
        (t, "ints", f"encode_{str(t).removeprefix('torch.')}", f"decode_other{8 * t.itemsize}")
        for t in INTEGERS
    ),
    *(
        (t, "raw", f"encode_raw{bits}", f"decode_{FLOATS.get(t, 'other8')}")
        for t, bits in RAW.items()
    ),
]
ELEMENTS = 8192 + 300  # two tiles


def sample(dtype: torch.dtype, layout: str) -> torch.Tensor:
    """What the layout is for, on the host."""
    generator = torch.Generator().manual_seed(3)
    if layout == "bits":
        return torch.rand(ELEMENTS, generator=generator) < 0.3
    if layout == "ints":
        low, high = (-100, 100) if dtype.is_signed else (0, 200)
        return torch.randint(low, high, (ELEMENTS,), generator=generator).to(dtype)
    values = 20 * torch.randn(ELEMENTS, generator=generator)
    if layout == "sparse":
        values = values.relu()
    if layout == "upcast":
        values = values.bfloat16()
    return values.to(dtype)


def grown(before: dict[str, int]) -> set[str]:
    return {name for name, count in kernel_launches().items() if count > before.get(name, 0)}


@pytest.mark.parametrize(
    ("dtype", "layout", "encoder", "decoder"),
    FORMATS,
    ids=[f[2].removeprefix("encode_") for f in FORMATS],
)
def test_every_kernel_encodes_and_decodes_on_streams_beside(
    device, dtype, layout, encoder, decoder
):
    host = sample(dtype, layout)
    assert native.codec_faults(device) == []  # the self-check launches kernels, too
    makes, encodes, decodes = (torch.Stream(device=device) for _ in range(3))
    before = kernel_launches()
    with makes:
        tensor = torch.empty(ELEMENTS, dtype=dtype, device=device)
        tensor.copy_(host.pin_memory(), non_blocking=True)
    encodes.wait_stream(makes)
    with encodes:
        frame = memswap.encode(tensor, layout=layout, checksum=True)
    decodes.wait_stream(encodes)
    with decodes:
        back = memswap.decode(frame)
    torch.accelerator.current_stream().wait_stream(decodes)
    assert same_bits(back, host)
    placed = set() if layout == "raw" else {"place_tiles"}  # what is raw has no payloads
    assert grown(before) == {"begin_frame", encoder, decoder} | placed
    on_host = memswap.Frame.from_bytes(frame.to_bytes())
    assert same_bits(memswap.decode(on_host), host), "the CPU does not read the NPU's frame"


TILE = 8192
NORMAL = torch.randn(48 * TILE + 300, generator=torch.Generator().manual_seed(7)).bfloat16()


@pytest.mark.own_laboratory
def test_a_frame_by_many_cores_is_as_short_as_the_portable_one(device):
    tensor = NORMAL.to(device)
    frame = memswap.encode(tensor)
    assert 1.48 < frame.ratio < 1.5
    on_host = memswap.Frame.from_bytes(frame.to_bytes())
    assert frame.nbytes == on_host.nbytes, "the cores left room between their payloads"
    assert frame.to_bytes() == memswap.encode(NORMAL).to_bytes(), "the CPU writes other bytes"
    assert same_bits(memswap.decode(frame), NORMAL)


@pytest.mark.own_laboratory
def test_encode_learns_how_little_a_tensor_of_many_tiles_needs(device):
    policy = memswap.Policy(action=memswap.Action.ENCODE, min_bytes=1)
    engine = memswap.saved_tensors(policy, prefetch_bytes=0)

    def step() -> int:
        """Bytes on the device while a tensor is encoded there."""
        seen = []
        x = torch.zeros(4, device=device, requires_grad=True)
        with engine:
            x = Remember.apply(x, seen, NORMAL[: 16 * TILE].to(device))
        resident = let_sends_end(engine, device).resident_bytes
        x.sum().backward()
        del x
        flush_autograd(device)
        collect()
        assert seen == [look(NORMAL[: 16 * TILE].to(device))]
        return resident

    first, second, third = (step() for _ in range(3))
    assert second < first, "the first capacity is a guess"
    assert third == second < 0.7 * 16 * TILE * 2


@pytest.mark.own_laboratory
@pytest.mark.parametrize("after", range(4))
def test_a_launch_that_fails_loses_nothing(after):
    """Whichever of an encode's four launches fails, frames before and after it come back."""
    room = 4 * (lanes.ONE_FRAME - 512)  # for the worst case of four frames, and not of five
    machine = lanes.Machine(arena_budget=room, arena_chunk=room)
    frames = []

    def encode(seed):
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(-(2**15), 2**15, (lanes.ELEMENTS,), generator=generator)
        tensor = bits.to(torch.int16).view(torch.bfloat16)  # payloads as long as they get
        there = tensor.to(lanes.DEVICE)
        encoding = machine.lane.encode(
            native.StorageRef(there), (lanes.BF16, lanes.DENSE, lanes.TIGHT)
        )
        if encoding is None:
            return False
        encoded, departure = encoding
        departure.wait()
        torch.accelerator.synchronize()
        assert encoded.report().overflow_used > 0, "nothing went to the arena"
        frames.append((tensor, native.capture(there), encoded))
        return True

    assert encode(0)
    with fake_acl.faults_of("launch", after=after):
        assert not encode(1)
    assert "error 507000 of the ACL runtime" in machine.lane.last_refusal
    while encode(len(frames) + 1):
        pass
    assert "the arena has no room" in machine.lane.last_refusal
    assert len(frames) in (3, 4)
    for tensor, view, encoded in frames:
        assert same_bits(machine.decode(view, encoded).cpu(), tensor)
    assert machine.lane.decode_status() == 0


@pytest.mark.own_laboratory
def test_a_device_that_does_not_tell_its_cores_is_an_error(device):
    tensor = torch.ones(1000, dtype=torch.bfloat16, device=device)
    assert native.codec_faults(device) == []
    with fake_acl.faults_of("aclGetDeviceCapability"):
        with pytest.raises(RuntimeError, match="error 507000 of the ACL runtime"):
            memswap.encode(tensor)
    frame = memswap.encode(tensor)
    with fake_acl.faults_of("aclGetDeviceCapability"):
        with pytest.raises(RuntimeError, match="error 507000 of the ACL runtime"):
            memswap.decode(frame)
    assert same_bits(memswap.decode(frame), tensor)


FIRST_USE = """
import fake_acl, torch, memswap, contextlib
from fake_acl.machine import kernel_launches, lost_launches
from memswap._native import native
device = torch.device("npu", 0)
native.register_codec("npu", fake_acl.machine.ascend_codec())
tensor = torch.randn(3000).bfloat16().to(device)
with lost_launches("KERNEL"):
    try:
        frame = memswap.encode(tensor)
        print("first:", sum(kernel_launches().values()))
        frame = memswap.encode(tensor)
        print("second:", sum(kernel_launches().values()))
        print("same:", torch.equal(memswap.decode(frame).cpu(), tensor.cpu()))
    except RuntimeError as error:
        print("refused:", error)
    try:
        broken = torch.ones(3000, dtype=BROKEN).to(device)
        memswap.encode(broken, layout="LAYOUT")
        print("encoded")
    except RuntimeError as error:
        print("refused:", error)
weight = torch.randn(300, 300).to(device).requires_grad_()
with memswap.saved_tensors(memswap.Policy(action=memswap.Action.ENCODE, min_bytes=1024)) as saved:
    loss = (weight * weight).exp().sum()
loss.backward()
print("left:", saved.stats().moved_storages)
"""


@pytest.mark.own_laboratory
def test_the_first_use_checks_every_encoder_once(run_apart):
    program = FIRST_USE.replace("KERNEL", "").replace("BROKEN", "torch.int16")
    done = run_apart(program.replace("LAYOUT", "raw"), TASK_QUEUE_ENABLE="1")
    assert "same: True" in done.stdout, done.stdout + done.stderr[-3000:]
    first, second = (
        int(line.split(":")[1])
        for line in done.stdout.splitlines()
        if line[:5] in ("first", "secon")
    )
    assert first > 4 * len(FORMATS), "the self-check did not come first"
    assert second - first == 4, "the self-check came twice"


@pytest.mark.own_laboratory
@pytest.mark.parametrize(
    ("kernel", "dtype", "layout"),
    [("encode_sparse_fp64", "float64", "sparse"), ("decode_other16", "int16", "raw")],
)
def test_a_kernel_that_does_nothing_is_found_and_the_others_are_used(
    run_apart, kernel, dtype, layout
):
    program = FIRST_USE.replace("KERNEL", kernel).replace("BROKEN", f"torch.{dtype}")
    done = run_apart(program.replace("LAYOUT", layout), TASK_QUEUE_ENABLE="1")
    said = done.stdout + done.stderr[-3000:]
    assert "same: True" in done.stdout, said
    assert (
        "refused: memswap: codec 'ascend' failed its self-check on npu:0 for "
        f"{dtype} {layout}: " in done.stdout
    ), said
    assert "left: 0" not in done.stdout, "float32 did not leave, though its kernels work: " + said
