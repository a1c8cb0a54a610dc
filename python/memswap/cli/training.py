"""One training run of the demo, a step at a time, with everything it measured."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import memswap
from memswap.cli.corpus import Batches, read_corpus
from memswap.cli.gpt import GPT
from memswap.cli.measure import (
    gradient_fingerprints,
    peak_process_bytes,
    settle_math_library,
    stats_as_dict,
)
from memswap.planning.step import Step

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LEARNING_RATE = 3e-4

#: Frames are learnt in the first step; which storages are recomputed, in four: what stays is chosen
#: after the first, and proven twice.
LEARNING_STEPS = 4


@dataclass(frozen=True)
class TrainingConfig:
    """What a run depends on; two runs of one configuration must agree in every bit.

    Attributes:
        policy: name of the memswap.Action for every saved tensor; "auto" leaves it to memswap;
            None trains without memswap.
        pool_dir: directory of the DiskPool's file; None leaves the pool to memswap.
        budget: most bytes of saved activations on the device; None plans nothing.
    """

    device: str
    steps: int
    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    dtype: str
    seed: int
    policy: str | None
    pool_dir: str | None
    budget: int | None = None


@dataclass
class TrainingResult:
    """What a run gave.

    Attributes:
        losses: nats per byte, one per step.
        gradients: the fingerprint of each gradient by parameter name, one dictionary per step.
        step_s: seconds of forward, backward and optimizer, one per step; hashing is not in it.
        peak_process_bytes: largest resident set of the process up to the last step.
        peak_device_bytes: most memory torch had allocated on the accelerator; None on a CPU.
        away_form: where the activations went, and as what.
        stats: memswap's own account (memswap.types.Stats as a dictionary) of the steps after the
            first, in which it learns the order; for a plain run of one further step, untimed, in
            which memswap looked on and kept everything.
        first_stats: the same account of the first step.
        held_bytes: saved activations on the device between forward and backward, the most of the
            steps that `stats` counts.
        report: the same account as memswap prints it.
        plan: the plan under a budget, as memswap prints it.
        learnt: the step and the rates that it was made of.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, str]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    peak_process_bytes: int = 0
    peak_device_bytes: int | None = None
    away_form: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    first_stats: dict[str, Any] = field(default_factory=dict)
    held_bytes: int = 0
    report: str = ""
    plan: str = ""
    learnt: tuple[Step, memswap.Rates] | None = None

    def median_step_s(self, learning: bool = False) -> float:
        """Median time of a step, in seconds: of those that learn, or of those after them."""
        return statistics.median(_counted(self.step_s, learning))

    def step_ratio(self, plain: TrainingResult, learning: bool = False) -> float:
        """How many times as long as the plain run's a step took: the median over the same steps."""
        ratios = [one / other for one, other in zip(self.step_s, plain.step_s, strict=True)]
        return statistics.median(_counted(ratios, learning))


def _counted(steps: list[float], learning: bool) -> list[float]:
    """The steps of a run that a median is taken of. The first warms up allocators and caches."""
    if learning:
        return steps[1:LEARNING_STEPS]
    return steps[LEARNING_STEPS:] or steps[1:] or steps


def describe_away(action: memswap.Action, on_cpu: bool) -> str:
    """Where an action puts what leaves, in words."""
    pool = "a DiskPool, a file without a name" if on_cpu else "a HostPool of pinned memory"
    return {
        memswap.Action.KEEP: "none",
        memswap.Action.ENCODE: "lossless frames on the device",
        memswap.Action.SWAP: f"as they are, in {pool}",
        memswap.Action.ENCODE_SWAP: f"lossless frames in {pool}",
        memswap.Action.RECOMPUTE: "recipes, and lossless frames on the device"
        if on_cpu
        else "recipes, and as they are, in a HostPool of pinned memory",
    }[action]


class Training:
    """A model, its optimizer and its batches, and what is measured while they train.

    It sets process-wide torch options (determinism, seed), so a process should hold one.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._device = torch.device(config.device)
        self._manager: Any = None
        self._result = TrainingResult()

    def begin(self) -> None:
        """Make model and optimizer from the configuration's seed, and put memswap on them."""
        # cuBLAS needs this before it starts, to be deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Determinism would also fill every empty tensor, which takes time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False
        settle_math_library()
        config = self._config
        torch.manual_seed(config.seed)

        self._batches = Batches(read_corpus(), config.batch, config.sequence, config.seed)
        model = GPT(config.layers, config.hidden, config.heads, config.sequence)
        self._model = model.to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        if config.policy is not None:
            self._manage(config.policy)

    def _manage(self, policy: str) -> None:
        """Put memswap on the model, as the configuration says, and note the away form."""
        config = self._config
        action = None if policy == "auto" else memswap.Action(policy)
        pool = None if config.pool_dir is None else memswap.DiskPool(config.pool_dir)
        on_cpu = self._device.type == "cpu"
        if action is None:
            recomputes = on_cpu and pool is None
            action = memswap.Action.RECOMPUTE if recomputes else memswap.Action.SWAP
        self._result.away_form = describe_away(action, on_cpu)
        # Under a budget the planner chooses among all actions, unless one was asked for.
        free = config.budget is not None and policy == "auto"
        chosen = memswap.Policy(None if free else action)
        self._manager = memswap.manage(self._model, chosen, pool=pool, budget=config.budget)

    def step(self) -> float:
        """Train one step, and note what it took; return its loss."""
        result, manager = self._result, self._manager
        self._synchronize()
        began = time.perf_counter()
        loss = self._forward_and_backward()
        self._synchronize()
        elapsed_s = time.perf_counter() - began
        result.losses.append(float(loss))
        result.gradients.append(gradient_fingerprints(self._model))
        began = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._synchronize()
        result.step_s.append(elapsed_s + time.perf_counter() - began)
        if manager is not None:
            done = len(result.losses)
            manager.wait_for_plan()
            if done == 1:
                result.first_stats = stats_as_dict(manager.stats())
            if done in (1, LEARNING_STEPS) and done < self._config.steps:
                manager.reset_stats()
                result.held_bytes = 0
        return result.losses[-1]

    def _forward_and_backward(self) -> torch.Tensor:
        tokens, targets = self._batches.draw(self._device)
        lower = DTYPES[self._config.dtype]
        # Every weight is used once: a cache of their casts would only hold them longer.
        lowers = lower != torch.float32
        with torch.autocast(self._device.type, lower, enabled=lowers, cache_enabled=False):
            loss = self._model(tokens, targets)
        if self._manager is not None:
            held_bytes = self._manager.stats().resident_bytes
            self._result.held_bytes = max(self._result.held_bytes, held_bytes)
        loss.backward()
        return loss.detach()

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def finish(self) -> TrainingResult:
        """What all steps gave. No step can follow."""
        result = self._result
        result.peak_process_bytes = peak_process_bytes()
        if self._device.type != "cpu":
            memory = torch.get_device_module(self._device)
            result.peak_device_bytes = int(memory.max_memory_allocated())
        if self._manager is None:
            self._look_on()
            return result
        with self._manager as manager:
            result.stats = stats_as_dict(manager.stats())
            result.report = manager.report()
            result.learnt = manager.learnt
            result.plan = "" if manager.plan is None else str(manager.plan)
        return result

    def _look_on(self) -> None:
        """Count what a plain run saves, in one more step."""
        keep = memswap.Policy(action=memswap.Action.KEEP)
        with memswap.manage(self._model, keep) as self._manager:
            self._forward_and_backward()
            stats = stats_as_dict(self._manager.stats())
        self._result.stats = self._result.first_stats = stats
