"""describe: units of a sharded model, exchanges of its attention, and what launched what."""

from __future__ import annotations

import math
from collections import Counter

from torch import nn

from memswap.hooks.module_hooks import hooks_on
from memswap.parallel.applied import AppliedContext
from memswap.parallel.schedule import ShardContext
from memswap.parallel.shard import ShardedModule

KIB = 2**10
MIB = 2**20


def describe(model: nn.Module) -> str:
    """A text table of a model's sharded units, their collectives, and its attention's exchanges.

    For each context its units, then the collectives of the last step; then the exchanges of each
    module that a :class:`ContextParallel` was applied to.

    Gathered weights in MiB (2**20 bytes) per rank while they are gathered; the shard, per rank.
    Exchanges in KiB of this rank's part.

    Raises:
        TypeError: it is no module.
        ValueError: nothing in the model is sharded, and no attention exchanges anything.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe(): found {type(model).__name__}, expected an nn.Module")
    contexts: dict[ShardContext, None] = {}
    for module in model.modules():
        if isinstance(module, ShardedModule):
            contexts.setdefault(module._memswap_hooks.context)
    applied = applied_contexts(model)
    if not contexts and not applied:
        raise ValueError(
            "describe(): found no sharded module and no ContextParallel; call "
            "memswap.parallel.shard, or apply a style, first"
        )
    texts = [_describe_context(context) for context in contexts]
    return "\n\n".join([*texts, exchange_table(applied)] if applied else texts)


def _describe_context(context: ShardContext) -> str:
    stats = context.stats()
    pool = "the caching allocator" if context.pool.count is None else f"{context.pool.count} slots"
    lines = [
        f"{len(context.units)} units in {pool}; {stats.slot_bytes / MIB:.1f} MiB of slots, "
        f"{stats.peak_lent} units gathered at most, {stats.overflows} overflows",
        f"{'unit':<28}{'parameters':>12}{'gathered':>10}{'shard':>8}  {'lane':<16}{'memory':<8}"
        f"{'gathers':>8}{'reduces':>8}",
    ]
    counts = Counter((launch.collective, launch.unit) for launch in context.last_step)
    for unit in context.units:
        count = sum(math.prod(member.shape) for member in unit.members)
        names = unit.mesh.mesh_dim_names or ("ranks",) * unit.mesh.ndim
        lane = " x ".join(f"{name} {unit.mesh.size(dim)}" for dim, name in enumerate(names))
        shard = sum(member.local.nbytes for member in unit.members)
        lines.append(
            f"{unit.name:<28}{count:>12,}{unit.nbytes / MIB:>10.1f}{shard / MIB:>8.1f}  "
            f"{lane:<16}"
            f"{'own' if unit.stay.own_memory else 'slot' if context.pool.count else 'shared':<8}"
            f"{counts['all-gather', unit.name]:>8}{counts['reduce-scatter', unit.name]:>8}"
        )
    if context.last_step:
        lines.append("last step:")
        lines += [f"  {one.collective} {one.unit}: {one.cause}" for one in context.last_step]
    return "\n".join(lines)


def applied_contexts(model: nn.Module) -> dict[str, AppliedContext]:
    """By name, what a :class:`ContextParallel` was applied to in this model."""
    found = {}
    for name, module in model.named_modules():
        for owner, _, _ in hooks_on(module):
            if isinstance(owner, AppliedContext) and owner.module is module:
                found[name or type(module).__name__] = owner
    return found


def exchange_table(applied: dict[str, AppliedContext]) -> str:
    """A text of all modules' exchanges: sizes in KiB (2**10 bytes) of what this rank gave."""
    lines = [
        f"{'attention':<28}{'exchange':<14}{'collective':<16}{'mesh':<12}{'KiB':>10}{'times':>8}"
        "  launched last by"
    ]
    for name, one in applied.items():
        if not one.calls:
            lines.append(f"{name:<28}never ran")
        elif not one.exchanges.launches:
            lines.append(f"{name:<28}nothing to exchange: one rank")
        for launch in one.exchanges.launches.values():
            lines.append(
                f"{name:<28}{launch.label:<14}{launch.collective:<16}{launch.lane:<12}"
                f"{launch.nbytes / KIB:>10.1f}{launch.times:>8}  {launch.cause}"
            )
    return "\n".join(lines)
