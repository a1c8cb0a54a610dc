"""Everything memswap raises on its own account."""

from __future__ import annotations


class MemswapError(Exception):
    """Base class of memswap's errors. They say what was found, what was expected, what to do."""


class InplaceEditError(MemswapError, RuntimeError):
    """A saved tensor was edited in place before backward: autograd's own error, kept alive.

    PyTorch does not check versions of tensors that pass through saved-tensor hooks; memswap does.
    """


class TransferError(MemswapError, RuntimeError):
    """A transfer failed and bytes that backward needs cannot be read back."""


class EntryStateError(MemswapError, RuntimeError):
    """A saved storage was asked for a move that its state does not allow."""


class GroupError(MemswapError, RuntimeError):
    """A group was asked for something that its state does not allow; the message names it."""


class RecomputeError(MemswapError, RuntimeError):
    """A checkpointed function did something else when it was run again for backward."""


class SharedStorageError(MemswapError, RuntimeError):
    """A storage cannot be emptied in place because somebody else can see its bytes."""


class NotSwappedError(MemswapError, ValueError):
    """``swap_in`` was given a tensor that is not swapped out."""


class FrameError(MemswapError, ValueError):
    """Bytes are no frame that this version can read, or not the ones that were encoded."""


class BudgetError(MemswapError, ValueError):
    """A memory budget below what the step needs at least. The message states that size.

    Attributes:
        smallest_bytes: the smallest budget for which there is a plan.
    """

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int]]:
        """Errors of other processes arrive pickled."""
        return type(self), (str(self), self.smallest_bytes)


class SlotError(MemswapError, RuntimeError):
    """The memory of gathered weights was used by somebody whose loan of it had ended."""


class UnitStateError(MemswapError, RuntimeError):
    """Sharded weights were asked for a move that their state does not allow."""


class RankMismatchError(MemswapError, RuntimeError):
    """Ranks are set up differently and would launch different collectives: a hang, said early."""
