"""A codec that writes frames' headers to the host itself, without a copy and an event beside."""

from __future__ import annotations

import pytest
from stand_in_codec import RIGHT, run

# The first import of the simulated device builds it.
pytestmark = pytest.mark.timeout(900)

TRAIN = """
import memswap
from simdev.laboratory import SCHEDULES, laboratory

torch.set_num_threads(1)

def train(action):
    torch.manual_seed(0)
    weight = torch.randn(64, 1024).to(device).requires_grad_()
    policy = memswap.Policy(action=action, min_bytes=1)
    saved = memswap.saved_tensors(policy, pool=memswap.HostPool("64MiB", device=device))
    for step in range(4):
        with saved:
            loss = ((weight * (step + 1)).exp() * weight).sin().relu().sum()
        loss.backward()
    torch.accelerator.synchronize()
    stats = saved.stats()
    return weight.grad.cpu(), stats.encoded_storages

with laboratory(SCHEDULES[0]):
    plain, _ = train(memswap.Action.KEEP)
for schedule in SCHEDULES:
    for action in (memswap.Action.ENCODE, memswap.Action.ENCODE_SWAP):
        with laboratory(schedule):  # raises for a race
            gradient, encoded = train(action)
            print(schedule, action.name, torch.equal(gradient, plain), encoded > 4)
"""


def test_training_is_right_and_silent_under_every_schedule() -> None:
    said = run(RIGHT, TRAIN, field="reports")
    lines = said.splitlines()
    assert len(lines) >= 10 and all(line.endswith("True True") for line in lines), said


LANE = """
from simdev.laboratory import SCHEDULES, laboratory

BF16, DENSE = 1, 0
lane = native.StreamCodecLane(device, max_leaving_bytes=0, arena_budget=1 << 20)
other = native.StreamCodecLane(device, max_leaving_bytes=0, arena_budget=1 << 20)
tensor = torch.randn(50000).bfloat16().to(device)
encoded, ticket = lane.encode(native.StorageRef(tensor), (BF16, DENSE, None))
ticket.wait()
torch.accelerator.synchronize()
report = encoded.report()
frame = native.encode_tensor(tensor, BF16, DENSE, False).cpu()
expected = native.read_header(frame)
print("same", [getattr(report, name) == getattr(expected, name)
               for name in ("elements", "var_used", "center_sum", "zeros", "blocks")])
try:
    other.decode(encoded)
except ValueError as error:
    print("refused:", error)
storage, arrival = lane.decode(encoded)
arrival.wait()
torch.accelerator.synchronize()
"""


def test_the_report_is_the_header_and_another_lane_refuses_the_frame() -> None:
    said = run(RIGHT, LANE, field="reports")
    assert "same [True, True, True, True, True]" in said, said
    assert "refused: memswap: the codec lane of sim:0 decodes the frames that it has" in said, said


EARLY = """
from simdev.laboratory import SCHEDULES, laboratory

for schedule in SCHEDULES:
    with laboratory(schedule):
        lane = native.StreamCodecLane(device, max_leaving_bytes=0, arena_budget=1 << 20)
        for seed in range(3):
            tensor = torch.randn(50000).bfloat16().to(device)
            encoded, ticket = lane.encode(native.StorageRef(tensor), (1, 0, None))
            early = encoded.report()
            ticket.wait()
            torch.accelerator.synchronize()
            late = encoded.report()
            expected = native.read_header(native.encode_tensor(tensor, 1, 0, False).cpu())
            print(early is None or early.var_used == expected.var_used,
                  late.var_used == expected.var_used)
            del encoded, ticket, early, late, tensor
        del lane
"""


def test_a_report_is_none_or_right_before_the_encode_has_ended() -> None:
    lines = run(RIGHT, EARLY, field="reports").splitlines()
    assert len(lines) >= 15 and set(lines) == {"True True"}, lines


UNMAPPED = """
table.maps_host = 0
pool = memswap.HostPool("1MiB", slab="1MiB", device=device, pageable=False)
lane = native.StreamCodecLane(device, arena_budget=1 << 20, arena_chunk=1 << 16,
                              arena_pool=pool.native)
tensor = torch.randn(50000).bfloat16().to(device)
encoded, ticket = lane.encode(native.StorageRef(tensor), (1, 0, 0))
ticket.wait()
arena = lane.arena_statistics()
print(arena["pinned_bytes"], arena["reserved_bytes"] > 0, encoded.overflow_nbytes > 0)
"""


def test_kernels_that_do_not_reach_host_memory_have_the_devices_for_what_overflows() -> None:
    assert run(RIGHT, "import memswap\n" + UNMAPPED).strip() == "0 True True"
