"""``python -m memswap plan``: what a memory budget would do to each layer, and what it would cost.

Trains the demo's model for a few steps under the budget, or reads a step that was saved on another
machine, and prints the plan. With ``--config`` it trains nothing: config_plan.py.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import memswap
from memswap.cli import config_plan
from memswap.cli.arguments import file
from memswap.cli.corpus import Batches, read_corpus
from memswap.cli.gpt import GPT
from memswap.cli.model_options import add_model_arguments, check_device
from memswap.cli.step_file import load, save
from memswap.cli.training import DTYPES
from memswap.planning.budgets import parsed
from memswap.planning.cost_model import HARDWARE, hardware
from memswap.planning.planner import make_plan
from memswap.planning.step import Step

STEPS = 6  # three that learn, and three planned ones: the second of those is timed


class Planned(NamedTuple):
    """A plan and what it was made of."""

    plan: memswap.types.Plan
    step: Step
    rates: memswap.Rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_step_arguments(parser)
    config_plan.add_arguments(parser)


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of plans for a step, which report has as well."""
    parser.add_argument(
        "--budget",
        default="auto",
        help="auto, or the most bytes of saved activations on the device: 24GiB, or 60%% of them",
    )
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help="plan for a step that --save wrote; trains nothing",
    )
    parser.add_argument("--save", type=file, metavar="FILE", help="write the step that was learnt")
    parser.add_argument(
        "--machine",
        choices=tuple(HARDWARE),
        help="plan with the copy and codec rates of this hardware; compute takes as long as "
        "it took where the step was learnt",
    )
    add_model_arguments(parser)


def planned_from(arguments: argparse.Namespace) -> Planned:
    """The plan that the options ask for.

    Raises:
        SystemExit: with a sentence, where there is none.
    """
    try:
        budget = parsed(arguments.budget, "--budget")
        if arguments.load is not None:
            step, rates = load(arguments.load)
            measured = None
        else:
            check_device(arguments.device)
            step, rates, measured = learn(arguments)
        if arguments.machine is not None:
            if rates.inline_codec and arguments.machine != "CPU":
                step = on_accelerator(step)
            rates = hardware(arguments.machine).rates()
            measured = None
        plan = measured or make_plan(step, rates, budget)
    except (OSError, ValueError, memswap.BudgetError) as error:
        raise SystemExit(f"memswap {arguments.command}: {error}") from error
    if arguments.save is not None:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        save(step, rates, arguments.save)
    return Planned(plan, step, rates)


def learn(arguments: argparse.Namespace) -> tuple[Step, memswap.Rates, memswap.types.Plan | None]:
    """Train the demo's model until there is a plan."""
    torch.manual_seed(arguments.seed)
    device = torch.device(arguments.device)
    batches = Batches(read_corpus(), arguments.batch, arguments.seq, arguments.seed)
    model = GPT(arguments.layers, arguments.hidden, arguments.heads, arguments.seq).to(device)

    # A budget for another machine may be one that this one cannot meet.
    budget = arguments.budget if arguments.machine is None else "auto"
    with memswap.manage(model.layers, budget=budget) as manager:
        for _ in range(STEPS):
            train_once(model, batches, device, DTYPES[arguments.dtype])
            manager.wait_for_plan()
        if manager.learnt is None:
            raise ValueError(nothing_moved(device))
        return *manager.learnt, manager.plan


def nothing_moved(device: torch.device) -> str:
    """Why there is nothing to plan."""
    present = torch.accelerator.current_accelerator(check_available=True)
    if device.type == "cpu" and present is not None:
        return (
            f"what a CPU saves stays there beside an accelerator, found {present.type}; expected "
            f"--device {present.type}"
        )
    return "the model saved nothing that could move: try a longer --seq"


def on_accelerator(step: Step) -> Step:
    """The step of a CPU as an accelerator could treat it: what may move may go to the host."""
    swaps = (memswap.Action.SWAP, memswap.Action.ENCODE_SWAP)
    storages = tuple(
        replace(storage, actions=swaps) if storage.actions else storage for storage in step.storages
    )
    return replace(step, storages=storages)


def train_once(model: GPT, batches: Batches, device: torch.device, dtype: torch.dtype) -> None:
    """Forward and backward.

    Args:
        model: that is trained.
        batches: to draw from.
        device: to train on.
        dtype: of autocast; float32: without it.
    """
    tokens, targets = batches.draw(device)
    model.zero_grad(set_to_none=True)
    lower = dtype != torch.float32
    with torch.autocast(device.type, dtype, enabled=lower, cache_enabled=False):
        loss = model(tokens, targets)
    loss.backward()


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return the exit status."""
    if arguments.config is not None:
        return config_plan.run(arguments)
    planned = planned_from(arguments)
    print(
        f"rates of {planned.rates.device}; {len(planned.step.storages)} saved storages per step\n"
    )
    print(planned.plan)
    if arguments.save is not None:
        print(f"\nwritten: {arguments.save}")
    return 0
