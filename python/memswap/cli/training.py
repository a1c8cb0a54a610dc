"""One training run of the demo, in the process that calls it, with everything it measured."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
from memswap.cli.progress import ProgressBar
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
        stats: memswap's own account (memswap.Stats as a dictionary) of the steps after the first,
            in which it learns the order; for a plain run of one further step, untimed, in which
            memswap looked on and kept everything.
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

    @property
    def median_step_s(self) -> float:
        """Median of the steps after the first, which warms up allocators and caches."""
        return statistics.median(self.step_s[1:] or self.step_s)


@contextmanager
def manage_layers(model: GPT, config: TrainingConfig, result: TrainingResult) -> Iterator[Any]:
    """Put memswap on the model's layers, as the configuration says, and note the away form."""
    action = None if config.policy == "auto" else memswap.Action(config.policy)
    pool = None if config.pool_dir is None else memswap.DiskPool(config.pool_dir)
    on_cpu = config.device.startswith("cpu")
    if action is None:
        recomputes = on_cpu and pool is None
        action = memswap.Action.RECOMPUTE if recomputes else memswap.Action.SWAP
    result.away_form = describe_away(action, on_cpu)
    # Under a budget the planner chooses among all actions, unless one was asked for.
    free = config.budget is not None and config.policy == "auto"
    policy = memswap.Policy(None if free else action)
    with memswap.manage(model, policy, pool=pool, budget=config.budget) as manager:
        yield manager


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


def train(config: TrainingConfig, title: str) -> TrainingResult:
    """Train from the configuration's seed and measure.

    Sets process-wide torch options (determinism, seed), so a process should train once.
    """
    # cuBLAS needs this before it starts, to be deterministic.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Determinism would also fill every empty tensor, which costs time and changes no result here.
    torch.utils.deterministic.fill_uninitialized_memory = False
    settle_math_library()
    torch.manual_seed(config.seed)

    device = torch.device(config.device)
    batches = Batches(read_corpus(), config.batch, config.sequence, config.seed)
    model = GPT(config.layers, config.hidden, config.heads, config.sequence).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    result = TrainingResult()
    bar = ProgressBar(title, config.steps)

    def synchronize() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def forward_and_backward() -> torch.Tensor:
        tokens, targets = batches.draw(device)
        lower = DTYPES[config.dtype]
        # Every weight is used once: a cache of their casts would only hold them longer.
        lowers = lower != torch.float32
        with torch.autocast(device.type, lower, enabled=lowers, cache_enabled=False):
            loss = model(tokens, targets)
        if manager is not None:
            result.held_bytes = max(result.held_bytes, manager.stats().resident_bytes)
        loss.backward()
        return loss.detach()

    managed = nullcontext() if config.policy is None else manage_layers(model, config, result)
    with managed as manager:
        for step in range(config.steps):
            synchronize()
            began = time.perf_counter()
            loss = forward_and_backward()
            synchronize()
            elapsed_s = time.perf_counter() - began
            result.losses.append(float(loss))
            result.gradients.append(gradient_fingerprints(model))
            began = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize()
            result.step_s.append(elapsed_s + time.perf_counter() - began)
            bar.show(step + 1, f"loss {result.losses[-1]:.4f}")
            if manager is not None:
                manager.wait_for_plan()
            if manager is not None and step == 0:
                result.first_stats = stats_as_dict(manager.stats())
            if manager is not None and step + 1 in (1, LEARNING_STEPS) and step + 1 < config.steps:
                manager.reset_stats()
                result.held_bytes = 0
        result.peak_process_bytes = peak_process_bytes()
        if device.type != "cpu":
            memory = torch.get_device_module(device)
            result.peak_device_bytes = int(memory.max_memory_allocated())
        if manager is not None:
            result.stats = stats_as_dict(manager.stats())
            result.report = manager.report()
            result.learnt = manager.learnt
            result.plan = "" if manager.plan is None else str(manager.plan)
    if config.policy is None:
        look_on = memswap.Policy(action=memswap.Action.KEEP)
        with memswap.manage(model, look_on) as manager:
            forward_and_backward()
            result.stats = result.first_stats = stats_as_dict(manager.stats())
    return result
