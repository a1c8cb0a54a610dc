"""SlotPool: where gathered weights live: a few fixed slots, or torch's caching allocator.

Fixed slots bound the memory of gathered weights, never fragment it, and have addresses that do not
change. Any unit takes any free slot, so units of different sizes share them and no rule says which
unit belongs where. Every loan has an owner and an epoch; what is used or returned under a loan that
has ended is an error that names both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from memswap.errors import SlotError

#: What freed weights are filled with in debug mode: NaN in every floating-point type.
POISON = 0xFF


@dataclass(slots=True)
class _Slot:
    """Memory that is lent to one unit after another."""

    memory: torch.Tensor
    epoch: int = 0
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Memory that is lent to one owner until it is released."""

    owner: str
    memory: torch.Tensor
    """Bytes (uint8), at least as many as were asked for."""
    slot: _Slot | None = field(repr=False)
    """None: from the caching allocator."""
    epoch: int

    def check(self) -> None:
        """Raises SlotError unless the memory is still this owner's."""
        slot = self.slot
        if slot is not None and (slot.epoch != self.epoch or slot.owner != self.owner):
            raise SlotError(
                f"unit {self.owner!r} uses its slot under loan {self.epoch}, but the slot is at "
                f"loan {slot.epoch} and belongs to {slot.owner!r}: it was returned and used again "
                "while somebody still held it. This is a bug in memswap; please report it"
            )


@dataclass
class SlotStats:
    """Counters of a :class:`SlotPool`."""

    slots: int = 0
    """Slots that were allocated."""
    slot_bytes: int = 0
    """Bytes of these slots."""
    allocations: int = 0
    """Times the pool asked the allocator for memory."""
    overflows: int = 0
    """Loans that found no free slot and came from the allocator instead."""
    lent: int = 0
    """Loans now."""
    peak_lent: int = 0
    """Most loans at once."""


class SlotPool:
    """Lends memory for gathered weights, in stream order.

    A loan is taken and returned by the thread that launches, on the compute stream: a slot's next
    writer is a collective launched there, behind everything that read it.

    Args:
        slots: how many; None: every loan comes from the caching allocator.
        debug: fill what is returned with NaN, and check that nobody wrote to a free slot.
    """

    def __init__(self, slots: int | None = None, *, debug: bool = False) -> None:
        if slots is not None and slots < 1:
            raise ValueError(f"slots={slots}: found no slot, expected 1 or more, or None")
        self.count = slots
        self.debug = debug
        self.stats = SlotStats()
        self._slot_bytes = 0
        self._slots: dict[torch.device, list[_Slot]] = {}

    def reserve(self, nbytes: int) -> None:
        """Make slots at least this large: a unit of ``nbytes`` will use them."""
        self._slot_bytes = max(self._slot_bytes, nbytes)

    def take(self, owner: str, nbytes: int, device: torch.device) -> Lease | None:
        """Lend a slot.

        Args:
            owner: name of the unit, for messages.
            nbytes: that it needs.
            device: where.

        Returns:
            The loan, of a slot or, in a pool without slots, of memory of the allocator's; None if
            every slot is lent.

        Raises:
            SlotError: in debug mode, somebody wrote to a free slot.
        """
        if self.count is None:
            return self.allocate(owner, nbytes, device)
        self.reserve(nbytes)
        slots = self._slots.setdefault(device, [])
        slot = next((one for one in slots if one.owner is None), None)
        if slot is None:
            if len(slots) == self.count:
                return None
            slot = _Slot(self._new(self._slot_bytes, device))
            slots.append(slot)
            self.stats.slots += 1
        elif slot.memory.numel() < nbytes:  # a bigger unit came later
            slot.memory = self._new(self._slot_bytes, device)
        elif self.debug:
            self._check_untouched(slot, owner)
        self.stats.slot_bytes = sum(s.memory.numel() for all in self._slots.values() for s in all)
        slot.owner = owner
        slot.epoch += 1
        return self._lent(Lease(owner, slot.memory, slot, slot.epoch))

    def allocate(self, owner: str, nbytes: int, device: torch.device) -> Lease:
        """Lend memory beside the slots.

        Args:
            owner: name of the unit, for messages.
            nbytes: that it needs.
            device: where.
        """
        return self._lent(Lease(owner, self._new(nbytes, device), None, 0))

    def release(self, lease: Lease) -> None:
        """The owner, and everything launched so far, needs the memory no longer."""
        lease.check()
        if self.debug:
            lease.memory.fill_(POISON)
        if lease.slot is not None:
            lease.slot.owner = None
        self.stats.lent -= 1

    def _lent(self, lease: Lease) -> Lease:
        self.stats.lent += 1
        self.stats.peak_lent = max(self.stats.peak_lent, self.stats.lent)
        return lease

    def _new(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.stats.allocations += 1
        with torch.inference_mode(False):  # training uses it too
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return memory.fill_(POISON) if self.debug else memory

    def _check_untouched(self, slot: _Slot, owner: str) -> None:
        if not bool((slot.memory == POISON).all()):
            raise SlotError(
                f"slot for unit {owner!r}: somebody wrote to it after loan {slot.epoch} was "
                "returned. Was a gathered weight edited through a raw pointer or another stream?"
            )
