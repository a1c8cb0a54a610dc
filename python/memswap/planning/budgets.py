"""Budgets: what a user may ask for, and how many bytes that comes to."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from memswap.engine.units import format_bytes, is_size, parse_bytes, unit_hint
from memswap.planning.search import Search

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from memswap.planning.rates import Rates
    from memswap.planning.step import Step

_DIGITS = re.compile(r"\s*([\d_.]+)\s*")
_DEVICE = re.compile(r"\s*device\s*:\s*(.+?)\s*", re.IGNORECASE)


def parsed(budget: int | str, argument: str = "") -> int | str:
    """A budget that can be planned with: bytes, ``"auto"``, or a share such as ``"70%"``.

    Raises:
        ValueError: it is none, or 0 bytes, or a text of digits alone, which could be either; the
            message names the `argument`.
    """
    if budget == "auto" or (isinstance(budget, str) and share_of(budget) is not None):
        return budget
    named = f"{argument}: " if argument else ""
    expected = (
        "expected auto or a size in bytes such as 24GiB or an int, or a share of what the step "
        "saves such as 70%, above 0% and up to 100%"
    )
    if isinstance(budget, (float, bool)):
        write = f". Write '{budget:.0%}' for this share" if 0 < budget < 1 else ""
        raise ValueError(f"{named}{expected}, found {budget!r}{write}")
    if isinstance(budget, str):
        bare = _DIGITS.fullmatch(budget)
        if bare is not None:
            raise ValueError(
                f"{named}found {budget!r}, which has no unit: write {bare[1] + '%'!r} for a share, "
                f"{bare[1] + 'GiB'!r} for a size, or an int for bytes"
            )
        if budget.rstrip().endswith("%") or not is_size(budget):
            write = unit_hint(budget)
            if ":" in budget:
                write = ". For everything that is on the device: 'device:70GiB' or 'device:90%'"
            raise ValueError(f"{named}{expected}, found {budget!r}{write}")
    nbytes = parse_bytes(budget, argument, auto=True)
    if not nbytes:
        raise ValueError(f"{named}no step trains in 0 bytes; {expected}, found {budget!r}")
    return nbytes


def share_of(budget: int | str) -> float | None:
    """The share that a budget names; None: it names none."""
    if not isinstance(budget, str) or not budget.rstrip().endswith("%"):
        return None
    try:
        share = float(budget.rstrip()[:-1]) / 100
    except ValueError:
        return None
    return share if math.isfinite(share) and 0 < share <= 1 else None


def bytes_of(budget: int | str, full: Step, rates: Rates) -> int:
    """Bytes of a budget that is not ``"auto"``.

    Args:
        budget: what :func:`parsed` returns.
        full: a step with nothing recomputed. A share is one of its peak if nothing moves.
        rates: any machine's; they make no difference to what stays.
    """
    share = share_of(budget)
    if share is None:
        return int(budget)
    return int(share * Search(full, rates).kept().found.peak_bytes)


def is_device_budget(budget: object) -> bool:
    """Whether a budget is one of the whole device: ``"device:70GiB"`` or ``"device:90%"``."""
    return isinstance(budget, str) and budget.lstrip().lower().startswith("device")


def device_bytes(budget: str, total_bytes: int) -> int:
    """Bytes of a budget of the whole device.

    Args:
        budget: ``"device:70GiB"``, or ``"device:90%"`` of all that the device has.
        total_bytes: of the device.

    Raises:
        ValueError: it cannot be read, or is more than the device has.
    """
    match = _DEVICE.fullmatch(budget)
    expected = "expected device: and a size such as device:70GiB, or a share such as device:90%"
    if match is None:
        raise ValueError(f"manage(budget=...): {expected}, found {budget!r}")
    text = match[1]
    if text.endswith("%"):
        share = share_of(text)
        if share is None:
            raise ValueError(
                f"manage(budget=...): {expected} above 0% and up to 100%, found {budget!r}"
            )
        return int(share * total_bytes)
    if text.isdigit():
        raise ValueError(
            f"manage(budget=...): found {budget!r}, which has no unit: write device:{text}GiB for "
            f"a size or device:{text}% for a share of the device"
        )
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"manage(budget=...): {expected}, found {budget!r}") from error
    if nbytes > total_bytes:
        raise ValueError(
            f"manage(budget={budget!r}): this device has {format_bytes(total_bytes)}; expected "
            "that or less"
        )
    return nbytes


def check_one_device(modules: Iterable[nn.Module]) -> None:
    """A budget is for one device's memory."""
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"manage(budget=...): the modules are on several devices ({named}), and a budget is "
            "for one; call manage() once for the modules of each"
        )
