"""torch_npu's task queue: calls reach the driver later than the host made them, on other threads.

Each program runs in a process of its own for every value of TASK_QUEUE_ENABLE, under several
schedules, with the race detector.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.own_laboratory

#: Ways in which torch_npu hands calls to the driver.
WAYS = [
    {"TASK_QUEUE_ENABLE": "0"},
    {"TASK_QUEUE_ENABLE": "1"},
    {"TASK_QUEUE_ENABLE": "2"},
    {"TASK_QUEUE_ENABLE": "1", "PER_STREAM_QUEUE": "1"},  # a queue and a thread for each stream
    {"ASCEND_LAUNCH_BLOCKING": "1"},
]
PREAMBLE = """
import os
import fake_acl, torch, memswap, warnings
from simdev import SCHEDULES, laboratory
from helpers import EVERYTHING, frames_expected, same_bits, new_input, new_stack, train_step
from memswap._native import native
from memswap.engine import transfers
warnings.simplefilter("ignore")
device = torch.device("npu", 0)
native.register_codec("npu", fake_acl.machine.ascend_codec())
encodes = frames_expected(worth=float("inf"))
encodes.__enter__()
# A queue for each stream is a thread of torch_npu's that polls for each: with 25 of them on two
# cores everything takes minutes, which looked like a hang.
FEW = SCHEDULES[:2] if "PER_STREAM_QUEUE" in os.environ else SCHEDULES
"""

TRAINING = """
x = new_input(device)
reference = new_stack(device)
expected = train_step(reference, lambda: reference(x))
def run(action):
    model = new_stack(device)
    saved = memswap.saved_tensors(
        memswap.Policy(action=action, min_bytes=1),
        pool=memswap.HostPool(budget="64MiB", slab="64KiB", device=device))
    def step():
        with saved:
            return model(x)
    for _ in range(3):
        found = train_step(model, step)
        assert all(same_bits(a, b) for a, b in zip(found, expected)), "gradients differ"
    return saved.stats().moved_storages
for action in ("SWAP", "ENCODE", "ENCODE_SWAP"):
    for schedule in FEW[:5]:
        with laboratory(schedule, allow_device_growth=True, allow_pinned_growth=True):
            assert run(memswap.Action[action]) > 0
print("trained")
"""

# The kernel waits in the queue when the lane is asked to send or to encode: one that went to the
# driver directly would overtake it.
OVERTAKING = """
def run():
    lane = transfers.open_lane(device)
    pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
    for i in range(30):
        tensor = torch.empty(1000, device=device).fill_(i)
        for _ in range(20):
            tensor.add_(1)
        block = pool.native.allocate(4000)
        view = native.capture(tensor)
        departure = lane.send(native.StorageRef(tensor), block)
        del tensor
        departure.wait()
        storage, arrival = lane.fetch(block)
        arrival.wait()
        back = view.rebuild(storage, False).clone().cpu()
        assert bool((back == i + 20).all()), (i, back[:4])
        # The same with frames, by the operators and by a lane's.
        tensor = torch.empty(1000, device=device).fill_(i)
        for _ in range(20):
            tensor.add_(1)
        back = memswap.decode(memswap.encode(tensor)).cpu()
        assert bool((back == i + 20).all()), (i, back[:4])
for schedule in FEW:
    with laboratory(schedule):
        run()
print("in order")
"""

# query() must not say that a transfer has ended while it is still in the queue.
QUERIES = """
lane = transfers.open_lane(device)
pool = memswap.HostPool(budget="16MiB", slab="1MiB", device=device)
lazy = next(s for s in SCHEDULES if s.policy == "lazy")
with laboratory(lazy):
    for i in range(50):
        tensor = torch.empty(1000, device=device).fill_(i)
        block = pool.native.allocate(4000)
        departure = lane.send(native.StorageRef(tensor), block)
        while not departure.done():
            pass
        host = torch.empty(1000)
        block.read(host)
        assert bool((host == i).all()), (i, host[:4])
        del tensor
print("true")
"""

# A failure on the queue's thread reaches Python at a later call, and the process goes on living.
LATE_ERROR = """
x, model = new_input(device), new_stack(device)
saved = memswap.saved_tensors(
    EVERYTHING, pool=memswap.HostPool(budget="64MiB", slab="64KiB", device=device))
torch.npu.synchronize()
try:
    with fake_acl.faults_of("CALL", after=3):
        with saved:
            loss = model(x)
        loss.backward()
        torch.npu.synchronize()
        torch.empty(1, device=device).fill_(0)  # a later call
except RuntimeError as error:
    print("heard:", error)
import os, sys; sys.stdout.flush(); os._exit(0)
"""


def name_of(environment: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in environment.items())


@pytest.mark.parametrize("environment", WAYS, ids=name_of)
def test_the_queue_changes_nothing(run_apart, environment):
    done = run_apart(PREAMBLE + TRAINING + OVERTAKING + QUERIES, **environment)
    said = done.stdout.split("\n")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert {"trained", "in order", "true"} <= set(said), done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("queue", ["1", "2"])  # without the queue: test_faults.py
@pytest.mark.parametrize("call", ["aclrtMemcpyAsync", "launch", "aclrtRecordEvent"])
def test_a_late_failure_is_heard(run_apart, queue, call):
    done = run_apart(PREAMBLE + LATE_ERROR.replace("CALL", call), TASK_QUEUE_ENABLE=queue)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "heard:" in done.stdout, "the failure was swallowed\n" + done.stderr[-3000:]
    assert "injected" in done.stdout or "507000" in done.stdout, done.stdout
