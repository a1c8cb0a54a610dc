"""Files of ``python -m memswap plan``: a step, and the rates of the machine that it is from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memswap.engine.action import Action
from memswap.planning.rates import Rates
from memswap.planning.step import Recipe, Region, SavedStorage, Step

FORMAT = 7


def save(step: Step, rates: Rates, file: Path) -> None:
    """Write a step and the rates of the machine that it was measured on.

    Args:
        step: that was recorded.
        rates: of that machine.
        file: where to.
    """
    content = asdict(step)
    for storage in content["storages"]:
        storage["actions"] = [action.value for action in storage["actions"]]
    written = {"memswap_step": FORMAT, "rates": rates.as_dict(), "step": content}
    file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def load(file: Path) -> tuple[Step, Rates]:
    """Read what `save` wrote.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file}: expected a step saved as JSON, found no JSON: {error}"
        ) from error
    if not isinstance(content, dict) or content.get("memswap_step") != FORMAT:
        raise ValueError(
            f"{file}: expected a step saved by `python -m memswap plan --save` of this version "
            f"(memswap_step: {FORMAT})"
        )
    try:
        return _step(content.get("step")), Rates.from_dict(content.get("rates"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _step(content: Any) -> Step:
    """The inverse of `dataclasses.asdict`."""
    try:
        storages = tuple(
            SavedStorage(
                **{
                    **saved,
                    "actions": tuple(map(Action, saved["actions"])),
                    "users": tuple(saved["users"]),
                    "recipe": _recipe(saved["recipe"]),
                }
            )
            for saved in content["storages"]
        )
        return Step(
            storages,
            tuple(map(int, content["order"])),
            tuple(map(float, content["gaps_s"])),
            float(content["tail_s"]),
            tuple(
                Region(one["unit"], tuple(map(int, one["inputs"])), int(one["other_nbytes"]))
                for one in content["regions"]
            ),
            tuple(map(int, content["extra_nbytes"])),
            tuple(map(float, content["windows_s"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no step of memswap's: {error}") from error


def _recipe(content: Any) -> Recipe | None:
    if content is None:
        return None
    sources = tuple(map(int, content["sources"]))
    words, seconds = str(content["words"]), float(content["seconds"])
    return Recipe(words, sources, seconds, int(content["made_nbytes"]))
