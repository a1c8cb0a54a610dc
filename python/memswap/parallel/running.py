"""Which sharded module runs now: an exchange inside it can say that it has arrived.

What runs is a matter of the thread's call stack, so it is kept as one is: nothing is known here
between forward calls, and two models never meet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

#: The innermost module last: who it is, and what to call.
_calls: ContextVar[tuple[tuple[object, Callable[[], None]], ...]] = ContextVar("calls", default=())


def enter(who: object, on_exchange: Callable[[], None]) -> None:
    """A forward call begins; ``on_exchange()`` is called for each exchange that arrives in it."""
    _calls.set((*_calls.get(), (who, on_exchange)))


def leave(who: object) -> None:
    """The call has ended, and with it those inside that were cut short."""
    calls = _calls.get()
    for place in reversed(range(len(calls))):
        if calls[place][0] is who:
            _calls.set(calls[:place])
            return


def exchange_arrived() -> None:
    """Tell the innermost running module."""
    calls = _calls.get()
    if calls:
        calls[-1][1]()
