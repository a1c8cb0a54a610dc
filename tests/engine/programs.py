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
import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from eventually import eventually
from program_hands import ByHand, Mixed
from program_run import Program, Run, Trace
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
            try:
                expected = plain(program)
            except Exception:
                print(f"{program}\n  does not run without memswap:\n{traceback.format_exc()}")
                seed += 1
                continue
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
