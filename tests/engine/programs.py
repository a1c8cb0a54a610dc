"""Training programs made from a seed, which run the same way with and without memswap.

A program has modules of many kinds (recurrent cells, edits in place, buffers, tied, frozen and
parametrised weights, checkpoints, custom Functions, hooks of somebody else's, aliases with version
counters of their own), and does with their graphs what users do: accumulate, step between forward
and backward, run a graph twice or in part, differentiate twice, drop it, fail halfway. What
autograd refuses must be refused, and everything else must have the same bits.

`python tests/engine/programs.py --seconds 3600` runs new ones, on a CPU or with `--device sim`, and
names the seeds that fail.
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
from helpers import flush_autograd, frames_expected
from program_hands import ByHand, Mixed
from program_run import Program, Run, Trace
from torch.utils.checkpoint import checkpoint

import memswap
from memswap.engine import recipes

ACTIONS = (
    None,
    *(one for one in memswap.Action if one is not memswap.Action.RECOMPUTE),
    "mixed",
)
DOORS = (
    "saved_tensors", "manage", "budget", "both", "chain", "modules", "groups", "nested", "windows",
    "regions",
)  # fmt: skip
BUDGETS = ("128KiB", "8KiB", "60%", "auto")  # the smaller ones: too little for a few programs
RATES = memswap.Rates("a machine", 1e9, 1e9, 5e8, 5e8, 2e9, 3e9)
WAYS = [(door, action) for door in DOORS for action in ACTIONS]
#: What single operators made is run again. (In checkpointed regions it means the default action.)
RECOMPUTING = [(door, memswap.Action.RECOMPUTE) for door in DOORS]


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
) -> tuple[Trace, list[memswap.types.Stats]]:
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
            engine = add(memswap.saved_tensors(policy, **options, **ahead))
            region = lambda: engine  # noqa: E731
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


def is_refused_where_it_differs(found: Trace, expected: Trace) -> bool:
    """Whether the first thing that is not the same is an error that says so."""
    for one, other in zip(found, expected, strict=False):
        if difference([one], [other]) is not None:
            return one[1] == "refused"
    return False


@contextlib.contextmanager
def encodes_everything() -> Iterator[None]:
    """Frames of small tensors do not pay; here they are made all the same."""
    with frames_expected(worth=float("inf")):
        yield


@contextlib.contextmanager
def proofs(count: int) -> Iterator[None]:
    """How often a recipe has to give the same bits before it is used."""
    before, recipes.PROOFS = recipes.PROOFS, count
    try:
        yield
    finally:
        recipes.PROOFS = before


def examined(
    program: Program,
    door: str,
    action: memswap.Action | str | None,
    expected: Trace,
    new_pool: Callable[[], Any],
) -> tuple[str | None, int]:
    """What is wrong with a program by one way, if anything, and how many storages moved."""
    uses = action in (memswap.Action.SWAP, memswap.Action.ENCODE_SWAP, "mixed")
    pool = new_pool() if uses else None
    try:
        with encodes_everything(), proofs(0 if program.seed % 4 else recipes.PROOFS):
            found, stats = managed(program, door, action, pool)
    except memswap.BudgetError:
        return None, 0
    wrong = difference(found, plain(program, door) if door == "regions" else expected)
    # The nodes of a second backward are numbered by autograd's thread, for an accelerator another
    # one: whether they come before the forward's, and so the order of sums, depends on what has run
    # before. Torch itself has other bits then.
    if wrong is not None and difference(found, plain(program, door)) is None:
        wrong = None
    # A recipe refuses what was edited behind its back, where autograd has saved a copy. What comes
    # after that cannot be compared.
    recomputes = action in (memswap.Action.RECOMPUTE, "mixed", None)
    if wrong is not None and recomputes and program.edits_unseen():
        wrong = None if is_refused_where_it_differs(found, expected) else wrong
    flush_autograd(program.device)
    if pool is not None and not eventually(lambda: not pool.statistics().blocks, collect=True):
        wrong = f"{wrong}; {pool.statistics().blocks} blocks are left"
    return wrong, sum(one.moved_storages for one in stats)


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
    parser.add_argument("--device", choices=("cpu", "sim", "npu"), default="cpu")
    parser.add_argument("--schedule", help="of a simulated device: this one alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    schedules: list[Any]
    end, seed, moved, failed = time.monotonic() + options.seconds, options.first, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cpu":
            device, schedules = torch.device("cpu"), [None]
            new_pool: Callable[[], Any] = lambda: memswap.DiskPool(folder, budget="64MiB")  # noqa: E731
        else:
            import simulator

            simulator.start(options.device)
            from simdev import SCHEDULES

            device = torch.device(options.device, 0)
            schedules = [one for one in SCHEDULES if options.schedule in (None, str(one))]
            new_pool = lambda: memswap.HostPool(budget="64MiB", slab="1MiB", device=device)  # noqa: E731
        while time.monotonic() < end:
            program, choose = Program(seed, device), random.Random(seed)
            if options.one:
                print(program)
            schedule = choose.choice(schedules)
            try:
                expected = run_under(schedule, plain, program)
            except Exception:
                print(f"{program}\n  does not run without memswap:\n{traceback.format_exc()}")
                seed += 1
                continue
            for door, action in [
                *choose.sample(WAYS, len(WAYS) if options.one else 6),
                choose.choice(RECOMPUTING),
            ]:
                if door not in options.door or not program.suits(door):
                    continue
                try:
                    wrong, storages = run_under(
                        schedule, examined, program, door, action, expected, new_pool
                    )
                    moved += storages
                except Exception:
                    wrong = traceback.format_exc()
                if wrong:
                    failed += 1
                    print(f"{program}\n  {door}, {action}, {schedule}: {wrong}", flush=True)
            if options.one:
                return
            seed += 1
    print(f"{seed - options.first} programs, {moved} storages moved, {failed} failures")


def run_under(schedule: Any, body: Callable[..., Any], *args: Any) -> Any:
    """What it returns: in a laboratory under the schedule, if there is one."""
    if schedule is None:
        return body(*args)
    from simdev import run_in

    return run_in(schedule, body, *args)


if __name__ == "__main__":
    main()
