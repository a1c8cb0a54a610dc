"""Steps of llama_operators.py on the simulated accelerator: each operator is a placeholder.

A placeholder reads, makes and saves what its operator does, and takes as long in virtual time. The
simulator's memory is the host's, so tensors are `SCALE` times smaller, and so are the rates of its
memory and of its link: times stay those of the real shapes. memswap manages the layers as it does
in training, with its own learning, plan and transfers, and knows nothing of the cost model but the
rates of the link. To be imported where the simulator has been started.

What repeats is an operator of torch, which memswap may run again. Codecs run at the rate of the
simulator's memory, which is not that of a card: a plan with frames has other times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llama_operators import BF16, Marks, Operator, Program
from torch import nn

import memswap
from memswap import Rates
from memswap.planning.cost_model import Hardware
from simdev import SCHEDULES, laboratory, virtual_time

#: How many times smaller tensors and rates are.
SCALE = 1024

#: The simulator takes what an operator writes for read as well: one that reads a tensor and makes
#: another passes three times over its memory, and twice over a card's.
PASSES = 3 / 2

#: The schedule whose host runs ahead.
LAZY = next(one for one in SCHEDULES if one.policy == "lazy")

#: Steps before one is measured: learning, planning, and the first ones under the plan.
STEPS = 8


class Machine:
    """The simulator as a card: how fast it is, and how it passes time.

    Args:
        device: the simulated one.
        card: whose rates it has, `SCALE` times slower.
        longest_s: seconds of the longest operator.
    """

    def __init__(self, device: torch.device, card: Hardware, longest_s: float) -> None:
        self.device = device
        self._bytes_per_s = memory_rate(card)
        idle_bytes = int(longest_s * self._bytes_per_s / 2) + 1
        self._idle = torch.empty(idle_bytes, dtype=torch.uint8).to(device)
        self._pattern = torch.empty(0, dtype=torch.bfloat16, device=device)

    def elements(self, nbytes: int) -> int:
        """Of a tensor of so many bytes in the model."""
        return nbytes // SCALE // BF16

    def seconds(self, *, reads: Sequence[torch.Tensor] = (), makes: torch.Tensor) -> float:
        """What an operator of torch takes."""
        nbytes = sum(one.nbytes for one in reads) + 2 * makes.nbytes
        return nbytes / self._bytes_per_s

    def wait(self, seconds: float) -> None:
        """The stream is busy for so long."""
        if (nbytes := int(seconds * self._bytes_per_s / 2)) > 0:
            self._idle[:nbytes].zero_()

    def made(self, elements: int) -> torch.Tensor:
        """What no recipe makes again: new memory, with the same values each time."""
        if len(self._pattern) < elements:
            generator = torch.Generator().manual_seed(0)
            values = torch.randn(elements, generator=generator).bfloat16()
            self._pattern = values.to(self.device)
        return self._pattern[:elements].clone()


class _Placeholder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        machine: Machine,
        operator: Operator,
        elements: int,
        *reads: torch.Tensor,
    ) -> torch.Tensor:
        if operator.repeatable:
            made = torch.add(*reads) if len(reads) == 2 else reads[0].sin()
            machine.wait(operator.seconds - machine.seconds(reads=reads, makes=made))
        else:
            made = machine.made(elements)
            machine.wait(operator.seconds - machine.seconds(makes=made))
        named = {**dict(zip(operator.reads, reads, strict=True)), operator.makes: made}
        ctx.save_for_backward(*(named[one] for one in operator.saves))
        ctx.machine, ctx.operator = machine, operator
        ctx.elements = tuple(len(one) for one in reads)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        machine, operator = ctx.machine, ctx.operator
        ctx.saved_tensors  # noqa: B018  (they are demanded)
        found = [grad.new_zeros(elements) for elements in ctx.elements]
        made_s = sum(machine.seconds(makes=one) for one in found)
        machine.wait(operator.backward * operator.seconds - made_s)
        return None, None, None, *found


class _Head(torch.autograd.Function):
    """What lies between the layers' forward and their backward."""

    @staticmethod
    def forward(ctx: Any, machine: Machine, seconds: float, x: torch.Tensor) -> torch.Tensor:
        machine.wait(seconds)
        ctx.elements = len(x)
        return x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, grad.new_ones(ctx.elements)


class _Layer(nn.Module):
    """The operators of one layer; nothing is held for longer than they read it."""

    def __init__(self, machine: Machine, program: Program, unit: str) -> None:
        super().__init__()
        self._machine = machine
        self._operators = [operator for name, operator in program.operators if name == unit]
        self._elements = {
            one.makes: machine.elements(program.nbytes[one.makes]) for one in self._operators
        }

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        last = {name: one for one in self._operators for name in one.reads}
        tensors = {self._operators[0].reads[0]: inputs.pop()}
        for operator in self._operators:
            reads = [tensors[name] for name in operator.reads]
            for name in operator.reads:
                if last[name] is operator:
                    del tensors[name]
            elements = self._elements[operator.makes]
            tensors[operator.makes] = _Placeholder.apply(self._machine, operator, elements, *reads)
            del reads
        (output,) = tensors.values()
        return output


class Stack:
    """The layers of a program on the simulator, and their steps."""

    def __init__(self, device: torch.device, card: Hardware, marks: Marks) -> None:
        program, head_s = marks.program, marks.head_s
        longest_s = max(one.backward * one.seconds for _, one in program.operators)
        self._machine = Machine(device, card, max(longest_s, head_s))
        self._head_s = head_s
        units = dict.fromkeys(unit for unit, _ in program.operators)
        self.layers = nn.ModuleList(_Layer(self._machine, program, unit) for unit in units)
        values = self._machine.made(self._machine.elements(program.nbytes["h0"]))
        self._x = values.requires_grad_()

    def step(self) -> torch.Tensor:
        """A forward and its backward. The gradient of what goes in."""
        self._x.grad = None
        handed = [self._x.clone()]
        for layer in self.layers:
            handed.append(layer(handed))
        _Head.apply(self._machine, self._head_s, handed.pop()).backward()
        assert self._x.grad is not None
        return self._x.grad


@dataclass(frozen=True)
class Executed:
    """One step under a plan, in virtual time."""

    plain_s: float
    step_s: float
    planned_s: float
    """How much longer the plan said that it would be."""
    peak: float
    """Of the bytes that are there if nothing moves."""
    actions: dict[str, int]
    """How many storages have each action."""
    same: bool
    """Whether the gradient has the bits of a plain step."""

    @property
    def slowdown(self) -> float:
        return self.step_s / self.plain_s - 1

    @property
    def planned(self) -> float:
        return self.planned_s / self.plain_s


def memory_rate(card: Hardware) -> float:
    """Bytes per second of the simulator's memory, with which its operators take a card's time."""
    return PASSES * card.memory_bytes_per_s / SCALE


def scaled_rates(card: Hardware) -> Rates:
    """Of the simulator as a card. Its copies begin at once."""
    rates = card.rates().as_dict()
    slower = {name: value / SCALE for name, value in rates.items() if name.endswith("_bytes_per_s")}
    return Rates(**{**rates, **slower, "copy_latency_s": 0.0})


def clocked(card: Hardware) -> Any:
    """The virtual clock of the simulator as a card."""
    both = 2 * card.duplex_bytes_per_s / (card.d2h_bytes_per_s + card.h2d_bytes_per_s)
    return virtual_time(
        host_us=0.01,
        launch_us=0.0,
        hbm_gb_per_s=memory_rate(card) / 1e9,
        d2h_gb_per_s=card.d2h_bytes_per_s / SCALE / 1e9,
        h2d_gb_per_s=card.h2d_bytes_per_s / SCALE / 1e9,
        duplex=min(max(both, 0.5), 1.0),
        queries_wait=False,
    )


@laboratory(LAZY)
def executed(
    device: torch.device,
    card: Hardware,
    marks: Marks,
    policy: memswap.Policy,
    budget: str,
) -> Executed:
    """Train a few steps of a program under a budget, and time one.

    Raises:
        BudgetError: it cannot be met.
    """
    with clocked(card) as clock:
        stack = Stack(device, card, marks)

        def timed() -> tuple[float, torch.Tensor]:
            began_us = clock.elapsed_us()
            found = stack.step()
            return (clock.elapsed_us() - began_us) * 1e-6, found.cpu()

        stack.step()
        plain_s, expected = timed()
        with memswap.manage(
            stack.layers, policy, budget=budget, rates=scaled_rates(card)
        ) as manager:
            for _ in range(STEPS):
                stack.step()
                manager.wait_for_plan()
            manager.reset_stats()
            step_s, found = timed()
            plan, stats = manager.plan, manager.stats()
    assert plan is not None
    kinds = Counter(one.action.value for one in plan.storages)
    return Executed(
        plain_s,
        step_s,
        plan.exposed_s,
        stats.peak_resident_bytes / plan.kept_peak_bytes,
        dict(kinds),
        torch.equal(found.view(torch.int16), expected.view(torch.int16)),
    )
