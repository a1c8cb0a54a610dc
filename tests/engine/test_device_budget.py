"""manage(budget="device:..."): everything on a device under one number, held by its allocator."""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from budget_layers import rates_for
from helpers import Block, assert_pool_empty, same_bits
from library_memory import Library, kept_bytes, scale_for
from optimizer_helpers import state_bits
from torch import nn

import memswap
from memswap import BudgetError
from memswap._native import native
from memswap.integrations.training import ManagedTraining
from memswap.optimizers import managed_optimizer
from memswap.optimizers.state import away_of, plain_tensors
from memswap.planning import checking, making
from memswap.planning.device import KINDS, DevicePlan

WIDTH, VOCABULARY, BATCH = 64, 256, 4  # each times `scale_of` the device
LIBRARY_BYTES = 1 << 20  # that a library keeps, in tests beside one
MODEL_BYTES = 4 << 20  # that this takes at its peak, on a machine where they are as they stand
POLICY = memswap.Policy(action=memswap.Action.SWAP, min_bytes=1)

accelerator = pytest.mark.accelerator


def scale_of(device: torch.device) -> int:
    """1, but where libraries keep more beside the model than it takes: then it takes more."""
    return scale_for(device, MODEL_BYTES)


class Language(nn.Module):
    """Blocks with what no layer saves around them: an embedding, logits and their loss."""

    def __init__(self, depth: int, scale: int) -> None:
        super().__init__()
        width, vocabulary = scale * WIDTH, scale * VOCABULARY
        self.enter = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.out(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def new_model(device: torch.device, depth: int = 4) -> Language:
    scale = scale_of(device)
    torch.manual_seed(0)
    return Language(depth, scale).to(device)


def tokens_of(device: torch.device, step: int, batch: int = BATCH) -> torch.Tensor:
    scale = scale_of(device)
    generator = torch.Generator().manual_seed(step)
    size = (scale * batch, 32)
    return torch.randint(0, scale * VOCABULARY, size, generator=generator).to(device)


class Trained:
    """A model, its optimizer and perhaps its manager; the device's peak in each step."""

    def __init__(self, device: torch.device, budget: Any, pool: Any = None, **options: Any) -> None:
        self.device = device
        self.model = new_model(device)
        make = options.pop("make", torch.optim.AdamW)
        self.optimizer = make(self.model.parameters())
        self.manager: memswap.types.Manager | None = None
        self.peaks: list[int] = []
        if budget is not None:
            options.setdefault("optimizer", self.optimizer)
            self.manager = memswap.manage(
                self.model, POLICY, budget=budget, pool=pool, rates=rates_for(device), **options
            )

    def step(
        self, number: int, *, forwards: int = 1, to_none: bool = True, batch: int = BATCH
    ) -> None:
        module = torch.get_device_module(self.device)
        begun = self.manager is None or not isinstance(self.manager.plan, DevicePlan)
        if begun:
            module.reset_peak_memory_stats()
        self.optimizer.zero_grad(set_to_none=to_none)
        for forward in range(forwards):
            self.model(tokens_of(self.device, 10 * number + forward, batch)).backward()
        self.optimizer.step()
        torch.accelerator.synchronize()
        self.peaks.append(module.max_memory_allocated())

    def steps(self, count: int, **options: Any) -> Trained:
        for number in range(count):
            self.step(number, **options)
        return self

    @property
    def plan(self) -> DevicePlan:
        assert self.manager is not None and isinstance(self.manager.plan, DevicePlan)
        return self.manager.plan

    def bits(self) -> list[torch.Tensor]:
        return state_bits(self.optimizer, self.model)

    def away_bytes(self) -> int:
        every = [one for value in self.optimizer.state.values() for one in plain_tensors(value)]
        return sum(away.nbytes for away in map(away_of, every) if away is not None)


def share_of(peak: int, share: float, device: torch.device) -> int:
    """So much of what training takes at its peak, and all that libraries keep beside it."""
    kept = kept_bytes(device)
    return kept + int(share * (peak - kept))


def assert_kept(trained: Trained, budget: int) -> None:
    """The allocator's peak is within the budget, and what was planned within 1 %."""
    plan = trained.plan
    measured = plan.measured_device_bytes
    assert measured is not None, "nothing was measured under the plan"
    assert measured <= budget, f"{measured - budget} bytes over the budget of {budget}"
    assert abs(plan.device_peak_bytes - measured) <= 0.01 * measured, (
        f"planned {plan.device_peak_bytes}, measured {measured}"
    )
    assert sum(nbytes for _, nbytes in plan.peak_by_kind) == plan.device_peak_bytes
    assert tuple(name for name, _ in plan.peak_by_kind) == KINDS


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected)), "a parameter or its state differs"


def plainly(
    device: torch.device, *rows: dict[str, Any], make: Any = torch.optim.AdamW, settled: int = 2
) -> tuple[int, list[torch.Tensor]]:
    """The peak of plain training once it is settled, and what it comes to.

    Args:
        rows: what each step is called with.
    """
    options = tuple(tuple(row.items()) for row in rows)
    return _trained_plainly(device, kept_bytes(device), options, make, settled)


@functools.cache
def _trained_plainly(
    device: torch.device, kept: int, rows: tuple[Any, ...], make: Any, settled: int
) -> tuple[int, list[torch.Tensor]]:
    """Once for all schedules: one stream gives the same bits, and the same peak, under each."""
    plain = Trained(device, None, make=make)
    for number, options in enumerate(rows):
        plain.step(number, **dict(options))
    return max(plain.peaks[settled:]), plain.bits()


@pytest.fixture(params=[0, LIBRARY_BYTES], ids=["alone", "beside a library"])
def library(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """Nothing, or a library that keeps memory of the simulated device; a real one has its own."""
    if request.param and device.type == "cuda":
        pytest.skip("cuBLAS is there in all tests")
    with Library(device, request.param) if request.param else nullcontext():
        yield


beside_a_library = pytest.mark.usefixtures("library")


@pytest.fixture
def peaks(device: torch.device) -> tuple[int, list[torch.Tensor]]:
    """The peak of plain training, and what it comes to."""
    return plainly(device, *[{}] * 8)


def pool_of(device: torch.device) -> memswap.HostPool:
    return memswap.HostPool(budget=scale_of(device) ** 2 << 26, slab="1MiB", device=device)


@accelerator
@pytest.mark.parametrize(
    ("library", "share"),
    [
        *((0, share) for share in (1.5, 0.95, 0.9)),
        (LIBRARY_BYTES, 0.9),
        *(pytest.param(LIBRARY_BYTES, share, marks=pytest.mark.slow) for share in (1.5, 0.95)),
    ],
    indirect=["library"],
    ids=lambda value: "alone" if value == 0 else "beside" if value == LIBRARY_BYTES else None,
)
def test_the_allocators_peak_is_within_the_budget_and_as_planned(library, device, peaks, share):
    peak, expected = peaks
    budget = share_of(peak, share, device)
    pool = pool_of(device)
    trained = Trained(device, f"device:{budget}B", pool).steps(8)
    assert_kept(trained, budget)
    assert (trained.plan.moved_bytes > 0 or trained.away_bytes() > 0) == (share < 1)
    assert_same(trained.bits(), expected)
    assert trained.manager is not None
    trained.manager.remove()
    assert trained.away_bytes() == 0, "state is still away after remove()"
    del trained
    gc.collect()
    assert_pool_empty(pool)


def smallest(device: torch.device) -> int:
    """The smallest budget, as the error states it."""
    trained = Trained(device, f"device:{scale_of(device) ** 2 * 2}MiB", pool_of(device))
    with pytest.raises(BudgetError) as raised:
        trained.steps(6)
    nbytes = raised.value.smallest_bytes
    for word in ("Weights are", "gradients", "memswap.parallel.shard", str(nbytes)):
        assert word in str(raised.value)
    return nbytes


@accelerator
@pytest.mark.few_schedules
@beside_a_library
def test_the_smallest_budget_that_an_error_names_can_be_met(device, peaks):
    nbytes = smallest(device)
    gc.collect()
    assert nbytes < share_of(peaks[0], 0.9, device)
    trained = Trained(device, f"device:{nbytes}B", pool_of(device)).steps(8)
    assert_kept(trained, nbytes)
    assert_same(trained.bits(), peaks[1])
    with pytest.raises(BudgetError):
        Trained(device, f"device:{nbytes - nbytes // 50}B", pool_of(device)).steps(6)
    gc.collect()


@accelerator
@pytest.mark.one_schedule
def test_a_budget_below_weights_and_gradients_is_refused_at_once(device):
    model = new_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetError, match=r"weights take .* gradients .*parallel\.shard"):
        memswap.manage(model, POLICY, optimizer=optimizer, budget="device:1MiB")
    assert not optimizer._optimizer_step_pre_hooks, "the optimizer is managed all the same"
    memswap.manage_optimizer(optimizer)


@accelerator
@pytest.mark.one_schedule
@beside_a_library
def test_state_stays_where_there_is_room_and_is_away_where_there_is_none(device, peaks):
    ample = Trained(device, f"device:{share_of(peaks[0], 1.5, device)}B", pool_of(device)).steps(8)
    assert ample.plan.state_stays_bytes == ample.plan.state_bytes > 0
    assert ample.away_bytes() == 0
    del ample
    gc.collect()
    nbytes = smallest(device)
    gc.collect()
    tight = Trained(device, f"device:{nbytes}B", pool_of(device)).steps(8)
    assert tight.plan.state_stays_bytes < tight.plan.state_bytes
    assert tight.away_bytes() == tight.plan.state_bytes - tight.plan.state_stays_bytes
    for text in (*KINDS, "away between steps", "the most on the device", "measured"):
        assert text in str(tight.plan), f"print(manager.plan) does not say {text!r}"
    assert "AdamW" in tight.manager.report()


@accelerator
def test_gradients_that_are_kept_are_counted(device):
    """Zeroed in place, they are there from the first save on."""
    peak, expected = plainly(device, *[{"to_none": False}] * 8)
    budget = share_of(peak, 0.95, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device)).steps(8, to_none=False)
    assert_kept(trained, budget)
    assert_same(trained.bits(), expected)


@accelerator
def test_gradients_that_appear_later_lead_to_another_plan(device):
    rows: list[dict[str, Any]] = [*[{}] * 5, *[{"to_none": False}] * 8]
    peak, expected = plainly(device, *rows)
    budget = share_of(peak, 0.97, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device))
    plans = []
    for number, options in enumerate(rows):
        trained.step(number, **options)
        plans.append(trained.manager and trained.manager.plan)
    assert isinstance(plans[4], DevicePlan) and isinstance(plans[-1], DevicePlan)
    assert plans[4].timeline[0] != plans[-1].timeline[0], "gradients are not in the plan"
    assert_kept(trained, budget)
    assert_same(trained.bits(), expected)


@accelerator
@pytest.mark.few_schedules
@beside_a_library
def test_accumulation(device):
    peak, expected = plainly(device, *[{"forwards": 3}] * 6)
    budget = share_of(peak, 0.95, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device)).steps(6, forwards=3)
    assert_kept(trained, budget)
    assert_same(trained.bits(), expected)


@accelerator
@pytest.mark.one_schedule
def test_an_optimizer_that_nobody_gave_is_counted_with_its_state(device, peaks):
    budget = share_of(peaks[0], 0.95, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device), optimizer=None).steps(8)
    assert_kept(trained, budget)
    assert trained.plan.state_bytes == 0
    assert_same(trained.bits(), peaks[1])


class EachAlone:
    """An optimizer for each parameter, which steps in backward, so that no gradient is kept."""

    def __init__(self, parameters: Any, pool: Any = None) -> None:
        self.each: list[torch.optim.Optimizer] = []
        self._handles = []
        for parameter in parameters:
            one = torch.optim.AdamW([parameter])
            if pool is not None:
                memswap.manage_optimizer(one, pool=pool, min_bytes=1)

            def step(_: Any, one: Any = one) -> None:
                one.step()
                one.zero_grad()

            self._handles.append(parameter.register_post_accumulate_grad_hook(step))
            self.each.append(one)

    def zero_grad(self, set_to_none: bool) -> None:
        """There are no gradients by now."""

    def step(self) -> None:
        """Done in backward."""

    def close(self) -> None:
        """The collector would not see the cycle."""
        for handle in self._handles:
            handle.remove()


@accelerator
@pytest.mark.one_schedule
@beside_a_library
def test_an_optimizer_for_each_parameter_within_one_number(device, peaks):
    """Its state is away, and its gradients are used up in backward."""
    runs = []
    budget = share_of(peaks[0], 0.85, device)
    for pool in (None, pool_of(device)):
        options = {
            "optimizer": None,
            "make": lambda parameters, pool=pool: EachAlone(parameters, pool),
        }
        trained = Trained(device, pool and f"device:{budget}B", pool, **options).steps(8)
        each = trained.optimizer.each
        runs.append([tensor for one in each for tensor in state_bits(one, trained.model)])
        if pool is None:
            assert min(trained.peaks[2:]) > budget
        else:
            assert_kept(trained, budget)
            assert all(managed_optimizer(one).statistics().away_bytes > 0 for one in each)
        trained.optimizer.close()
    assert_same(*runs)


@accelerator
@pytest.mark.one_schedule
def test_gradients_that_nobody_keeps_need_no_room(device):
    """A number below weights and gradients is refused at once only where they are kept."""
    model = new_model(device)
    weights = sum(4 * one.numel() for one in model.parameters())
    budget = f"device:{int(1.5 * weights)}B"
    with pytest.raises(BudgetError, match="their gradients"):
        memswap.manage(model, POLICY, budget=budget)
    alone = EachAlone(model.parameters())
    with memswap.manage(model, POLICY, budget=budget) as manager:
        assert manager.plan is None
    with pytest.raises(BudgetError, match="their gradients"):
        optimizer = torch.optim.AdamW(model.parameters())
        memswap.manage(model, POLICY, optimizer=optimizer, budget=budget)
    assert managed_optimizer(optimizer) is None
    alone.close()


@accelerator
@pytest.mark.one_schedule
def test_an_optimizer_that_steps_as_a_whole(device):
    def make(parameters: Any) -> torch.optim.Optimizer:
        class Other(torch.optim.AdamW):
            def step(self, closure: Callable[[], float] | None = None) -> Any:
                return super().step(closure)

        return Other(parameters)

    peak, expected = plainly(device, *[{}] * 8, make=make)
    budget = share_of(peak, 1.02, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device), make=make).steps(8)
    assert_kept(trained, budget)
    assert_same(trained.bits(), expected)


@accelerator
@pytest.mark.one_schedule
def test_evaluations_between_steps_change_nothing(device, peaks):
    budget = share_of(peaks[0], 0.95, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device))
    for number in range(8):
        trained.step(number)
        with torch.no_grad():
            trained.model(tokens_of(device, 99))
    assert_kept(trained, budget)
    assert_same(trained.bits(), peaks[1])


@accelerator
@pytest.mark.one_schedule
@beside_a_library
def test_memory_that_the_user_takes_later_is_made_room_for(device, peaks):
    budget = share_of(peaks[0], 1.05, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device)).steps(6)
    assert_kept(trained, budget)
    taken_bytes = share_of(peaks[0], 1.1, device) - peaks[0]
    taken = torch.zeros(taken_bytes, dtype=torch.uint8, device=device)
    for number in range(6, 12):
        trained.step(number)
    assert_kept(trained, budget)
    assert trained.plan.state_stays_bytes < trained.plan.state_bytes or trained.plan.moved_bytes
    del taken


@accelerator
@pytest.mark.one_schedule
def test_what_is_learnt_again_is_learnt_from_where_its_forward_begins(device, peaks):
    """The peak of the steps before is no part of it: a plan would count it as there at its start,
    and save what is saved first on top of that."""
    budget = share_of(peaks[0], 1.2, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device)).steps(6)
    before = trained.plan
    taken_bytes = share_of(peaks[0], 1.1, device) - peaks[0]
    taken = torch.zeros(taken_bytes, dtype=torch.uint8, device=device)
    for number in range(6, 12):
        trained.step(number)
    assert before.timeline[0] != trained.plan.timeline[0], "the step was not learnt again"
    at_first = [sum(p.timeline[0]) - p.state_stays_bytes for p in (before, trained.plan)]
    assert abs(at_first[1] - at_first[0] - taken_bytes) < 1024
    assert_kept(trained, budget)
    del taken


@accelerator
@pytest.mark.one_schedule
@beside_a_library
def test_other_shapes_learn_for_themselves_within_the_same_number(device):
    shapes = [4, 4, 4, 4, 4, 6, 6, 6, 6, 4, 6, 4, 6]
    peak, expected = plainly(device, *({"batch": batch} for batch in shapes))
    budget = share_of(peak, 0.97, device)
    trained = Trained(device, f"device:{budget}B", pool_of(device))
    for number, batch in enumerate(shapes):
        trained.step(number, batch=batch)
        if number >= 9:
            assert trained.plan.measured_device_bytes <= budget
    assert_same(trained.bits(), expected)


@accelerator
@pytest.mark.one_schedule
@beside_a_library
def test_a_recorder_that_overlooks_a_part_is_noticed_and_told(device, peaks, monkeypatch):
    """The mutation that `assert_kept` has to see, and so has whoever trains."""
    seen = making.workspace_of

    def overlooked(recorder: Any, marks: int) -> Any:
        found = seen(recorder, marks)
        less = [nbytes - (scale_of(device) ** 2 << 17) for nbytes in found.extra_nbytes]
        return native.WorkspaceRecord(less, found.gradient_nbytes, found.baseline_nbytes)

    monkeypatch.setattr(making, "workspace_of", overlooked)
    monkeypatch.setattr(checking, "workspace_of", overlooked)
    budget = share_of(peaks[0], 0.9, device)
    with pytest.warns(UserWarning, match="more than the budget"):
        trained = Trained(device, f"device:{budget}B", pool_of(device)).steps(8)
    assert trained.plan.measured_device_bytes > trained.plan.device_peak_bytes
    with pytest.raises(AssertionError, match="over the budget"):
        assert_kept(trained, budget)
    assert_same(trained.bits(), peaks[1])


@pytest.mark.one_schedule
@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("device", "expected device: and a size"),
        ("device:", "expected device: and a size"),
        ("device:none", "expected device: and a size"),
        ("device:0%", "above 0%"),
        ("device:120%", "up to 100%"),
        ("device:70", "write device:70GiB"),
        ("device:900TiB", "this device has"),
    ],
)
def test_budgets_that_cannot_be_read(device, budget, message):
    with pytest.raises(ValueError, match=message):
        memswap.manage(new_model(device), budget=budget)


@pytest.mark.one_schedule
def test_an_optimizer_without_a_device_budget_has_its_state_away(device, new_pool):
    model = new_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    with memswap.manage(model, POLICY, optimizer=optimizer, pool=new_pool()) as manager:
        model(tokens_of(device, 0)).backward()
        optimizer.step()
        assert manager.optimizer is not None
        assert manager.optimizer.statistics().away_bytes > 0
        assert "AdamW" in manager.report()
    assert not hasattr(optimizer, "_memswap_managed")


@pytest.mark.one_schedule
def test_a_stacks_training_hands_its_optimizer_on_to_a_device_budget(device):
    """Of what callbacks manage: the only optimizer, unless it was said what becomes of it."""
    model = new_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for how, handed_on in ((None, True), (True, True), (False, False), ("encode", False)):
        training = ManagedTraining(POLICY, budget="device:90%", optimizer=how)
        training.begin(model, optimizers=[optimizer])
        manager = training.manager
        assert manager is not None
        assert (manager.optimizer is not None) == handed_on, f"optimizer={how}"
        model(tokens_of(device, 0)).backward()
        optimizer.step()
        assert ("AdamW" in training.report()) == (how is not False)
        training.end()
        away = managed_optimizer(optimizer)
        assert (away is not None) == (how == "encode"), "state comes back when the training ends"
        if away is not None:
            away.remove()


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("room", "later", "action"),
    [
        pytest.param(150 << 20, 0, "swap", id="room for all"),
        pytest.param(64 << 20, 0, "swap", id="some moves", marks=pytest.mark.slow),
        pytest.param(64 << 20, 2 << 20, "swap", id="more is there later"),
        pytest.param(125 << 20, 0, "encode", id="frames while it is learnt"),
    ],
)
def test_on_a_cpu_the_process_resident_memory_is_what_counts(room, later, action):
    """In a process of its own: resident memory depends on what ran before."""
    found = trained_apart(10 << 20, room, later, action)
    assert (found["moved_bytes"] > 0) == (room < 100 << 20)
    assert found["planned_bytes"] <= found["budget_bytes"]
    assert found["measured_bytes"] <= found["budget_bytes"]
    difference = found["measured_bytes"] - found["planned_bytes"]
    assert abs(difference) <= 0.01 * found["budget_bytes"]


@pytest.mark.cpu_only
def test_on_a_cpu_frames_that_grow_by_and_by_are_planned_anew():
    """Those of the first plan would be a hundredth of the budget longer by the last step."""
    found = trained_apart(20 << 20, 134 << 20, 0, "encode")
    assert found["moved_bytes"] > 0
    assert found["measured_bytes"] <= found["budget_bytes"]
    difference = found["measured_bytes"] - found["planned_bytes"]
    assert abs(difference) <= 0.005 * found["budget_bytes"], "the plan has frames as they were"


def trained_apart(nbytes: int, room: int, later: int, action: str) -> dict[str, Any]:
    """What `resident_training` found in a process of its own."""
    program = Path(__file__).with_name("resident_training.py")
    path = [str(Path(memswap.__path__[0]).parent), str(program.parent)]
    ended = subprocess.run(
        [sys.executable, program, str(nbytes), str(room), str(later), action],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
