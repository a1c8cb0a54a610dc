"""The table of exchanges in describe(): what each attention module launched last, and why."""

from __future__ import annotations

from torch import nn

from memswap.parallel.applied import AppliedContext

KIB = 2**10


def applied_contexts(model: nn.Module) -> dict[str, AppliedContext]:
    """By name, what a :class:`ContextParallel` was applied to in this model."""
    found = {}
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            owner = getattr(hook, "__self__", None)
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
