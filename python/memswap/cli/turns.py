"""Trainings of the demo beside each other: each in a process of its own, a step at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.managers import BaseManager
from typing import TYPE_CHECKING

from memswap.cli.progress import ProgressBar
from memswap.cli.training import Training, TrainingConfig, TrainingResult


class TrainingProcess(BaseManager):
    """A process of its own, so that the peak of a training's memory is its own."""

    if TYPE_CHECKING:

        def training(self, config: TrainingConfig) -> Training:
            """A training in that process."""


TrainingProcess.register("training", Training, exposed=("begin", "step", "finish"))


def train_in_turns(configs: Mapping[str, TrainingConfig]) -> dict[str, TrainingResult]:
    """Train all configurations, a step of each in turn.

    Whatever else the machine does, and however fast it is just then, meets all of them alike: their
    times can be compared step by step. All live at once, each with its model.

    Args:
        configs: by what they are called. All train as many steps.

    Returns:
        What they gave, by the same names.

    Raises:
        Whatever a training raises.
    """
    # Left to itself the GNU C library keeps what was freed, in pieces, and the peak of a process
    # says little about what it used. With a fixed threshold freed blocks go back to the system.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(256 << 10))
    # OpenMP's threads spin while they wait for each other, which on a busy machine takes the cores
    # from the threads they wait for: a step then lasts several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    (steps,) = {config.steps for config in configs.values()}
    bar = ProgressBar(" | ".join(configs), steps)
    with ExitStack() as processes:
        trainings = {}
        for title, config in configs.items():
            process = TrainingProcess(ctx=multiprocessing.get_context("spawn"))
            trainings[title] = processes.enter_context(process).training(config)
            trainings[title].begin()
        for step in range(steps):
            losses = {title: training.step() for title, training in trainings.items()}
            bar.show(step + 1, "loss " + " | ".join(f"{loss:.4f}" for loss in losses.values()))
        return {title: training.finish() for title, training in trainings.items()}
