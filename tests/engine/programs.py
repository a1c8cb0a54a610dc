"""Training programs made from a seed, which run the same way with and without memswap.

A program has modules of many kinds (recurrent cells, edits in place, buffers, tied, frozen and
parametrised weights, checkpoints, custom Functions, hooks of somebody else's, aliases with version
counters of their own), and does with their graphs what users do: accumulate, step between forward
and backward, run a graph twice or in part, differentiate twice, drop it, fail halfway. What
autograd refuses must be refused, and everything else must have the same bits.

`python tests/engine/programs.py --seconds 3600` runs new ones, and names the seeds that fail.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from eventually import eventually
from program_aliases import ALIASES, ALIASING_MODULES, STATEFUL
from program_functions import FLOW_MODULES, FLOWS, FLOWS_ONCE_DIFFERENTIABLE
from program_hands import ByHand, Mixed
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
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.engine import expectations

ACTIONS = (None, *memswap.Action, "mixed")
DOORS = (
    "saved_tensors", "manage", "budget", "both", "chain", "modules", "groups", "nested", "windows",
    "regions",
)  # fmt: skip
BUDGETS = ("128KiB", "8KiB", "60%", "auto")  # the smaller ones: too little for a few programs
RATES = memswap.Rates("a machine", 1e9, 1e9, 5e8, 5e8, 2e9, 3e9)
WAYS = [(door, action) for door in DOORS for action in ACTIONS]


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


# --- programs ------------------------------------------------------------------------------------


class Program:
    """What a seed decides."""

    def __init__(self, seed: int, device: torch.device) -> None:
        choose = random.Random(seed)
        self.seed, self.device = seed, device
        on_a_cpu = device.type == "cpu"
        functions = {**FUNCTIONS, **(FUNCTIONS_ON_A_CPU if on_a_cpu else {}), **ALIASES, **FLOWS}
        modules = {
            **MODULES,
            **(MODULES_ON_A_CPU if on_a_cpu else {}),
            **ALIASING_MODULES,
            **FLOW_MODULES,
        }
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
        return door != "regions" or not changes

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
        for number, events in enumerate(self.program.steps):
            for kind, microbatch in events:
                torch.manual_seed(1000 * number + microbatch)
                self.event(kind, number, microbatch)
            self.graphs.clear()
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
            if os.environ.get("TOLD"):
                print(kind, number, microbatch, error)
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


def plain(program: Program, door: str = "") -> Trace:
    """Without memswap; for checkpointed regions, with torch's own."""
    model = program.model()
    if door == "regions":
        for unit in model.units:
            unit.forward = functools.partial(
                checkpoint, type(unit).forward.__get__(unit), use_reentrant=False
            )
    return Run(program, model, contextlib.nullcontext, False).run()


def managed(
    program: Program, door: str, action: memswap.Action | str | None, pool: Any
) -> tuple[Trace, list[memswap.Stats]]:
    """The same with memswap; statistics of whatever it was, after the last graph is gone."""
    model = program.model()
    choose = random.Random(program.seed + 1)
    if action == "mixed":
        policy = memswap.Policy(min_bytes=choose.choice([1, 100]), fn=Mixed(program.seed))
    else:
        policy = memswap.Policy(min_bytes=1, action=action)
    options: dict[str, Any] = {} if pool is None else {"pool": pool}
    ahead = {"prefetch_bytes": choose.choice(["auto", "auto", 0, 256])}
    swaps: list[Any] = []
    with contextlib.ExitStack() as stack:

        def add(swap: Any) -> Any:
            swaps.append(swap)
            return stack.enter_context(swap) if hasattr(swap, "remove") else swap

        region: Callable[[], Any] = contextlib.nullcontext
        if door in ("saved_tensors", "both"):
            saver = add(memswap.saved_tensors(policy, **options, **ahead))
            region = lambda: saver  # noqa: E731
        if door in ("manage", "both", "nested"):
            add(memswap.manage(model.units, policy, **options, **ahead))
        if door == "nested":
            inner = [one for unit in model.units for one in unit if choose.random() < 0.7]
            if inner:
                add(memswap.manage(inner, memswap.Policy(min_bytes=choose.choice([1, 200]))))
        if door == "budget":
            budget = choose.choice(BUDGETS)
            add(memswap.manage(model.units, policy, budget=budget, rates=RATES, **options))
        if door == "windows":
            windows = memswap.Windows(leftovers=choose.choice(["start", "keep"]))
            add(memswap.manage(model.units, policy, windows=windows, **options))
        if door == "chain":
            add(memswap.chain(model.units, policy, distance=choose.randint(1, 3), **options))
        if door == "modules":
            only = {"only_input": choose.random() < 0.3, "prefetch": choose.random() < 0.7}
            add(memswap.swap_modules(model, "units.{*}", policy=policy, **only, **options))
        if door == "groups":
            region = add(ByHand(policy, options, choose))
        if door == "regions":
            if choose.random() < 0.7:
                budget = choose.choice([None, None, *BUDGETS])
                more: dict[str, Any] = {} if budget is None else {"budget": budget, "rates": RATES}
                add(memswap.manage(model.units, policy, **more, **options))
            regions = memswap.checkpoint_module(
                model.units,
                choose.choice([None, Mixed(program.seed).of_operator]),
                swap_inputs=choose.choice([False, True, memswap.Action.ENCODE]),
                min_bytes=1,
            )
            swaps.append(regions)
            stack.callback(regions.remove)
        trace = Run(program, model, region, choose.random() < 0.5).run()
        return trace, [swap.stats() for swap in swaps]


def difference(found: Trace, expected: Trace) -> str | None:
    """The first thing that is not the same in every bit; None: nothing."""
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one[0] != other[0]:
            return f"{place}: {one[0]} instead of {other[0]}"
        ours, theirs = one[1], other[1]
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            if not torch.equal(ours, theirs):
                return f"{place}: {one[0]} has other bits"
        elif ours is not theirs and ours != theirs:
            return f"{place}: {one[0]} is {ours} instead of {theirs}"
    return (
        None if len(found) == len(expected) else f"{len(found)} instead of {len(expected)} events"
    )


@contextlib.contextmanager
def encodes_everything() -> Iterator[None]:
    """Frames of small tensors do not pay; here they are made all the same."""
    worth, expectations.WORTH = expectations.WORTH, float("inf")
    try:
        yield
    finally:
        expectations.WORTH = worth


def came_back(pool: memswap.DiskPool) -> bool:
    """Whether no block is taken once cycles are collected and transfers have ended."""
    # After an error, a thread's queue holds nodes until its next backward.
    torch.zeros((), requires_grad=True).mul(1).backward()
    return eventually(lambda: not pool.statistics().blocks, collect=True)


def main() -> None:
    """Run new programs until the time is over; print those that fail."""
    import argparse
    import tempfile
    import traceback
    import warnings

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--door", choices=DOORS, nargs="*", default=DOORS, help="these alone")
    parser.add_argument("--one", action="store_true", help="the first seed alone, told in full")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device("cpu")
    end, seed, moved, failed = time.monotonic() + options.seconds, options.first, 0, 0
    with tempfile.TemporaryDirectory() as folder, encodes_everything():
        pool = memswap.DiskPool(folder, budget="64MiB")
        while time.monotonic() < end:
            program = Program(seed, device)
            if options.one:
                print(program)
            expected = plain(program)
            again = difference(plain(program), expected)
            if again:
                print(f"{program}\n  is not deterministic: {again}")
            for door, action in random.Random(seed).sample(WAYS, len(WAYS) if options.one else 6):
                if door not in options.door or not program.suits(door):
                    continue
                uses = action in (memswap.Action.SWAP, memswap.Action.ENCODE_SWAP, "mixed")
                try:
                    found, stats = managed(program, door, action, pool if uses else None)
                    wrong = difference(
                        found, plain(program, door) if door == "regions" else expected
                    )
                    moved += sum(s.moved_storages for s in stats)
                    if not came_back(pool):
                        wrong = f"{wrong}; {pool.statistics().blocks} blocks are left"
                        pool = memswap.DiskPool(folder, budget="64MiB")
                except memswap.BudgetError:
                    wrong = None
                except Exception:
                    wrong = traceback.format_exc()
                if wrong:
                    failed += 1
                    print(f"{program}\n  {door}, {action}: {wrong}", flush=True)
            if options.one:
                return
            seed += 1
    print(f"{seed - options.first} programs, {moved} storages moved, {failed} failures")


if __name__ == "__main__":
    main()
