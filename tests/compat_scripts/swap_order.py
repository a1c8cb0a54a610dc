"""What moved when: the calls that groups were given, in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memswap.engine.group import Generation

CALLS = {
    "launch_offload": "send",
    "wait_offload": "sent",
    "launch_load": "bring",
}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows while groups move: ``"send model.*[0]"``. Calls that change nothing are left out."""
    events: list[str] = []

    def spy(call: str, plain: Callable[[Generation], Any]) -> Callable[..., Any]:
        def called(generation: Generation, *args: Any) -> Any:
            before = generation.phase
            result = plain(generation, *args)
            if generation.phase is not before:
                events.append(f"{CALLS[call]} {generation.name}")
            return result

        return called

    for call in CALLS:
        monkeypatch.setattr(Generation, call, spy(call, getattr(Generation, call)))
    return events
