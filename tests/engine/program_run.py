"""A program made from a seed, and one execution of it, for `programs.py`."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from program_aliases import ALIASES, ALIASING_MODULES, STATEFUL
from program_functions import FLOW_MODULES, FLOWS, FLOWS_ONCE_DIFFERENTIABLE
from program_layers import (
    FUNCTIONS,
    FUNCTIONS_ON_A_CPU,
    MODULES,
    MODULES_ON_A_CPU,
    ONCE_DIFFERENTIABLE,
    REFUSED,
    WIDTH,
    Layer,
)
from torch import nn

import memswap

#: What autograd says of edits, and of a reentrant checkpoint on the way of `autograd.grad`.
REFUSALS = (
    "inplace",
    "use_reentrant=True, torch.utils.checkpoint is incompatible",
    "Inference tensors",
    "Trying to backward an extra time",  # torch's own selective checkpointing
    "explicitly by the user",  # deepcopy of what a module computed and holds
)


#: What happens now and then before a forward.
EVENTS = ("eval", "fail", "copy", "eval mode", "load", "inference", "pair", "states")


class HaltError(Exception):
    """What a program raises in the midst of a forward."""


class Stack(nn.Module):
    """Units one after another, one of them perhaps twice."""

    def __init__(self, units: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.order = order
        self.fails_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, index in enumerate(self.order):
            if place == self.fails_at:
                raise HaltError
            x = self.units[index](x)
        return x.square().mean()

    def pair(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Two forwards, unit by unit."""
        for index in self.order:
            first, second = self.units[index](first), self.units[index](second)
        return first.square().mean() + second.sin().mean()


class Program:
    """What a seed decides."""

    def __init__(self, seed: int, device: torch.device) -> None:
        choose = random.Random(seed)
        self.seed, self.device = seed, device
        on_a_cpu = device.type == "cpu"
        functions, modules = dict(FUNCTIONS), dict(MODULES)
        if on_a_cpu:
            functions |= {**FUNCTIONS_ON_A_CPU, **ALIASES, **FLOWS}
            modules |= {**MODULES_ON_A_CPU, **ALIASING_MODULES, **FLOW_MODULES}
        kinds = [*functions, *modules]
        self.layers = [
            choose.choices(kinds, k=choose.randint(1, 3)) for _ in range(choose.randint(2, 4))
        ]
        if choose.random() < 0.1 and on_a_cpu:
            choose.choice(self.layers).append(*REFUSED)
        self.makers: dict[str, Callable[[], nn.Module]] = {
            **{name: lambda f=f: Layer(f) for name, f in {**functions, **REFUSED}.items()},
            **modules,
        }
        self.order = list(range(len(self.layers)))
        if choose.random() < 0.2:
            self.order.insert(choose.randrange(len(self.order)), choose.choice(self.order))
        self.rows = choose.choice([3, 4, 9])
        self.optimizer = choose.choice(["sgd", "adamw", "adamw foreach", "in backward"])
        self.steps = [self._events(choose) for _ in range(choose.randint(1, 4))]

    def _events(self, choose: random.Random) -> list[tuple[str, int]]:
        events: list[tuple[str, int]] = []
        alive: list[int] = []
        for microbatch in range(choose.randint(1, 3)):
            if choose.random() < 0.15:
                events.append((choose.choice(EVENTS), microbatch))
            events.append(("forward", microbatch))
            alive.append(microbatch)
            while alive and choose.random() < 0.5:
                self._end(choose, events, alive)
        while alive:
            self._end(choose, events, alive)
        return [*events, ("step", 0)]

    def _end(self, choose: random.Random, events: list[tuple[str, int]], alive: list[int]) -> None:
        microbatch = alive.pop(choose.randrange(len(alive)))
        if choose.random() < 0.05:
            events.append(("step", 0))  # autograd refuses what saved a weight
        ways = ["backward"] * 4 + [
            "twice", "part", "penalty", "thread", "drop", "inputs", "broken", "stale",
        ]  # fmt: skip
        events.append((choose.choice(ways), microbatch))

    def has(self, *names: str) -> bool:
        return any(name in names for layer in self.layers for name in layer)

    def suits(self, door: str) -> bool:
        """Whether a forward may be run again, and nothing has changed by then."""
        edits = any(
            kind in ("eval mode", "load") or (kind == "step" and place < len(events) - 1)
            for events in self.steps
            for place, (kind, _) in enumerate(events)
        )
        changes = edits or self.optimizer == "in backward" or self.has(*STATEFUL, *REFUSED)
        if self.device.type != "cpu":
            # An edit of what an operator of a region gave may meet the copy of it, which nobody
            # uses then: the detector does not know that.
            return door != "regions"
        return door != "regions" or not changes

    def edits_unseen(self) -> bool:
        """Whether weights or buffers may be edited while a graph needs them, outside of all hooks.

        Autograd allows it where it has saved a copy; a recipe says that its source was edited.
        """
        kinds = {kind for events in self.steps for kind, _ in events}
        return bool(kinds & {"load", "eval", "copy"})

    def model(self) -> Stack:
        torch.manual_seed(self.seed)
        units = [nn.Sequential(*(self.makers[name]() for name in names)) for names in self.layers]
        return Stack(units, self.order).to(self.device)

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.layers} {self.order} {self.optimizer} {self.steps}"


Trace = list[tuple[str, Any]]


def noted(trace: Trace, name: str, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        trace.append((name, None))
        return
    host = tensor.detach().to("cpu")
    host = host.to_dense() if host.layout is not torch.strided else host
    trace.append((name, host.contiguous().clone().view(-1).view(torch.uint8)))


class Run:
    """One execution; `region` surrounds every forward."""

    ENDINGS = (
        "backward", "twice", "part", "penalty", "thread", "drop", "inputs", "broken", "stale",
    )  # fmt: skip

    def __init__(
        self, program: Program, model: Stack, region: Callable[[], Any], swaps_states: bool
    ) -> None:
        self.program, self.model, self.region = program, model, region
        self.swaps_states = swaps_states
        self.trace: Trace = []
        self.graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.stales: list[torch.Tensor] = []
        self.away: list[torch.Tensor] = []
        trained = [p for p in model.parameters() if p.requires_grad]
        kind = program.optimizer
        self.optimizers: list[torch.optim.Optimizer] = []
        self.hooks: list[Any] = []
        if kind == "in backward":
            for parameter in trained:
                own = torch.optim.SGD([parameter], lr=0.01)
                self.optimizers.append(own)
                hook = parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
                self.hooks.append(hook)
        elif kind == "sgd":
            self.optimizers.append(torch.optim.SGD(trained, lr=0.01, momentum=0.9))
        else:
            self.optimizers.append(torch.optim.AdamW(trained, lr=0.01, foreach="foreach" in kind))

    def run(self) -> Trace:
        torch.manual_seed(self.program.seed + 1)
        try:
            for number, events in enumerate(self.program.steps):
                for kind, microbatch in events:
                    torch.manual_seed(1000 * number + microbatch)
                    self.event(kind, number, microbatch)
                self.graphs.clear()
        finally:
            for hook in self.hooks:
                hook.remove()  # a parameter that owns its optimizer would never be freed
        for name, tensor in self.model.state_dict().items():
            noted(self.trace, name, tensor)
        return self.trace

    def event(self, kind: str, number: int, microbatch: int) -> None:
        if kind in self.ENDINGS and microbatch not in self.graphs:
            return  # its forward was refused
        try:
            getattr(self, kind.replace(" ", "_"))(number, microbatch)
        except HaltError:
            self.trace.append((kind, "fault"))
        except RuntimeError as error:
            if "but the policy says" in str(error):
                raise memswap.BudgetError(str(error), 0) from error  # torch would recompute it
            if not any(words in str(error) for words in REFUSALS):
                raise
            self.trace.append((kind, "refused"))
        if kind not in ("forward", "step"):
            for name, parameter in self.model.named_parameters():
                noted(self.trace, f"{kind} {number}: {name}.grad", parameter.grad)

    def input(self, number: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * number + microbatch)
        x = torch.randn(self.program.rows, WIDTH, generator=generator).to(self.program.device)
        return x.requires_grad_(microbatch % 2 == 1)

    def forward(self, number: int, microbatch: int) -> None:
        x = self.input(number, microbatch)
        with self.region():
            loss = self.model(x * 1 if microbatch == 0 else x)
        self.graphs[microbatch] = loss, x
        noted(self.trace, "loss", loss)

    def fail(self, number: int, microbatch: int) -> None:
        self.model.fails_at = len(self.program.order) - 1
        try:
            self.forward(number, microbatch)
        finally:
            self.model.fails_at = -1

    def eval(self, number: int, microbatch: int) -> None:
        with torch.no_grad(), self.region():
            noted(self.trace, "eval", self.model(self.input(number, microbatch)))

    def eval_mode(self, number: int, microbatch: int) -> None:
        """Half an epoch in eval(), with gradients."""
        self.model.train(not self.model.training)

    def copy(self, number: int, microbatch: int) -> None:
        twin = copy.deepcopy(self.model)
        noted(self.trace, "copy", twin(self.input(number, microbatch)))

    def backward(self, number: int, microbatch: int) -> None:
        loss, x = self.graphs.pop(microbatch)
        if not loss.requires_grad:
            return
        loss.backward()
        noted(self.trace, "x.grad", x.grad)

    def twice(self, number: int, microbatch: int) -> None:
        loss, _ = self.graphs[microbatch]
        if loss.requires_grad:
            loss.backward(retain_graph=True)
        self.backward(number, microbatch)

    def thread(self, number: int, microbatch: int) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            # A new thread hears of `set_num_threads` when it first asks. Until then MKL's
            # transforms use more threads, which gives other bits. A decode asks.
            torch.get_num_threads()
            try:
                self.backward(number, microbatch)
            except BaseException as error:
                errors.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        if errors:
            raise errors[0]

    def drop(self, number: int, microbatch: int) -> None:
        del self.graphs[microbatch]

    def stale(self, number: int, microbatch: int) -> None:
        """Nobody runs it, and somebody holds it until the end."""
        self.stales.append(self.graphs.pop(microbatch)[0])

    def broken(self, number: int, microbatch: int) -> None:
        """A hook in the middle of backward raises."""
        loss, _ = self.graphs.pop(microbatch)

        def halt(gradient: torch.Tensor) -> None:
            raise HaltError

        wanted = self.trained()
        hook = wanted[len(wanted) // 2].register_hook(halt) if wanted else None
        try:
            if loss.requires_grad and not self.program.has("reentrant"):
                loss.backward()
        finally:
            if hook is not None:
                hook.remove()

    def inference(self, number: int, microbatch: int) -> None:
        with torch.inference_mode(), self.region():
            noted(self.trace, "inference", self.model(self.input(number, microbatch)))

    def pair(self, number: int, microbatch: int) -> None:
        x = self.input(number, microbatch)
        with self.region():
            loss = self.model.pair(x * 2, x * 1)
        noted(self.trace, "pair", loss)
        if loss.requires_grad:
            loss.backward()

    def load(self, number: int, microbatch: int) -> None:
        state = {name: tensor * 0.9 for name, tensor in self.model.state_dict().items()}
        state = {name: t.to(self.model.state_dict()[name].dtype) for name, t in state.items()}
        self.model.load_state_dict(state)

    def states(self, number: int, microbatch: int) -> None:
        """What optimizers hold goes away until their next step."""
        if not self.swaps_states or self.program.optimizer == "in backward" or self.away:
            return
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, torch.Tensor) and memswap.swap_out(tensor):
                        self.away.append(tensor)

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def part(self, number: int, microbatch: int) -> None:
        """The gradient of the last parameters, then everything."""
        loss, _ = self.graphs[microbatch]
        if loss.requires_grad and not self.program.has("reentrant"):
            wanted = self.trained()[-2:]
            for gradient in torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True):
                noted(self.trace, "part", gradient)
        self.backward(number, microbatch)

    def inputs(self, number: int, microbatch: int) -> None:
        """Backward into some parameters only; the graph is dropped."""
        loss, _ = self.graphs.pop(microbatch)
        wanted = self.trained()[::2]
        if loss.requires_grad and wanted and not self.program.has("reentrant"):
            loss.backward(inputs=wanted)

    def penalty(self, number: int, microbatch: int) -> None:
        """A gradient penalty: backward through a backward, some of it inside the region."""
        loss, x = self.graphs.pop(microbatch)
        wanted = [*self.trained(), *([x] if x.requires_grad else [])]
        if not loss.requires_grad or self.program.has(
            *ONCE_DIFFERENTIABLE, *FLOWS_ONCE_DIFFERENTIABLE
        ):
            return
        with self.region() if microbatch == 1 else contextlib.nullcontext():
            found = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            norm = sum((g.square().sum() for g in found if g is not None and g.requires_grad), loss)
        norm.backward()

    def step(self, number: int, microbatch: int) -> None:
        while self.away:
            memswap.swap_in(self.away.pop())
        if self.program.optimizer != "in backward":
            self.optimizers[0].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
