"""What an optimizer's state is made of, and how one tensor of it goes away and comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memswap._native import native
from memswap._warn import UsersLine
from memswap.engine.action import ENCODE, ENCODE_SWAP, KEEP, SWAP, Action
from memswap.engine.autograd import plain_parts
from memswap.engine.transfers import OpenTransfers, Transfers, lane_to
from memswap.engine.units import format_bytes
from memswap.errors import TransferError
from memswap.inplace import AWAY_ATTRIBUTE, Away, holders_of_new, shared_pool, why_shared

if TYPE_CHECKING:
    from memswap._C import AwayForm, SavedView, StorageRef, Ticket, WeakStorage
    from memswap.engine.transfers import Pool
    from memswap.inplace import Holders


# ---------------------------------------------------------------- what state is made of
def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in a value of an optimizer's state.

    Looks into dictionaries, lists and tuples, and into tensors made of tensors: a DTensor's local
    one, the parts of a quantized one.
    """
    if isinstance(value, torch.Tensor):
        yield from plain_parts(value)
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from plain_tensors(one)


def with_tensors(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """A value of an optimizer's state with other tensors in the place of its plain ones.

    What holds no tensor that `replace` changes is the same object as before.
    """
    if isinstance(value, torch.Tensor):
        if not is_traceable_wrapper_subclass(value):
            return replace(value)
        names, context = value.__tensor_flatten__()
        parts = {name: getattr(value, name) for name in names}
        replaced = {name: with_tensors(part, replace) for name, part in parts.items()}
        if all(replaced[name] is parts[name] for name in names):
            return value
        kind: Any = type(value)
        return kind.__tensor_unflatten__(replaced, context, value.size(), value.stride())
    if isinstance(value, dict):
        items = {key: with_tensors(one, replace) for key, one in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    if isinstance(value, list | tuple):
        made = [with_tensors(one, replace) for one in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*made) if named else type(value)(made)
    return value


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements on this rank."""
    return sum(part.numel() * part.element_size() for part in plain_tensors(tensor))


# ---------------------------------------------------------------- one tensor of it
class Returning(NamedTuple):
    """Bytes on their way back."""

    storage: StorageRef
    arrival: Ticket
    departure: Ticket | None = None
    """The send of whoever had the memory before ([Note: Memory from hand to hand])."""

    def let_go(self) -> None:
        """Whoever had the memory before owns it no more."""
        if self.departure is not None:
            self.departure.wait()


@dataclass(slots=True)
class AwayState(Away):
    """The bytes of one state tensor while it has none."""

    form: AwayForm
    view: SavedView
    """How the tensor looks at its storage."""
    returning: Returning | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.view.storage_nbytes

    def bring(self) -> StorageRef:
        """The bytes again, in stream order; the away form still has them.

        Raises:
            TransferError: they cannot be read, and the send had not failed. The form is kept, so
                that they can be asked for again.
        """
        returning = self.returning or Returning(*self.form.bring())
        self.returning = None
        try:
            returning.let_go()
            return self.arrived(returning.storage, returning.arrival)
        except native.TransferError as error:
            raise TransferError(
                f"optimizer state of {self.nbytes} bytes cannot be read back: {error} It is still "
                "away; try again when the pool can be read, or load a checkpoint."
            ) from error


def away_of(tensor: torch.Tensor) -> AwayState | None:
    """Where the bytes of a state tensor wait; None: in the tensor, or `swap_out` has taken them."""
    away = getattr(tensor, AWAY_ATTRIBUTE, None)
    return away if isinstance(away, AwayState) else None


def copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory of a state tensor; itself where its bytes are not away.

    Of the device, no more memory than the tensor's own is taken, and that is free again afterwards.
    """
    away = away_of(tensor)
    if away is None:
        return tensor
    here = away.view.rebuild(away.bring(), False)
    return here if here.device.type == "cpu" else here.cpu()


class _Leaving(NamedTuple):
    """A tensor whose memory is not free yet."""

    tensor: ref[torch.Tensor]
    nbytes: int
    works_ahead: bool
    storage: WeakStorage
    """Its memory, until it is free."""


#: What a state tensor is sent as: the first that there is room for, and that is shorter.
FORMS = {
    SWAP: (native.Form.BLOCK,),
    ENCODE: (native.Form.FRAME,),
    ENCODE_SWAP: (native.Form.POOLED_FRAME, native.Form.BLOCK),
}


class StateMover:
    """Moves tensors of optimizer state, each as a whole, and says which stay and why.

    Args:
        action: how they go; None: what suits their device (`Transfers.without_recipe`).
        pool: where they go; None: one that all movers share, and `swap_out`.
        min_bytes: shorter ones stay.
    """

    def __init__(self, action: Action | None, pool: Pool | None, min_bytes: int) -> None:
        self._action = action
        self._pool = pool
        self._transfers = OpenTransfers(pool)
        self._min_bytes = min_bytes
        self._leaving: deque[_Leaving] = deque()
        self._told: set[str] = set()
        self._new: dict[torch.device, Holders] = {}
        self._line = UsersLine.here()
        #: Bytes on the device of tensors that are under way to a pool.
        self.leaving_bytes = 0
        #: Bytes sent and brought back since the mover was made.
        self.sent_bytes = 0
        self.brought_bytes = 0
        #: Bytes of what stayed since the last `begin_step`, by reason.
        self.kept: dict[str, int] = {}

    def begin_step(self) -> None:
        """The tensors are about to come and go once more."""
        self.kept = {}
        for transfers in self._transfers.all():
            transfers.learn()
            transfers.expectations.begin_iteration()
            transfers.check_decodes()
            for _, words in transfers.complaints("optimizer state, which is"):
                self._line.warn(f"memswap.manage_optimizer: {words}")

    # --- away -------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, name: str, not_these: frozenset[int] | set[int]) -> bool:
        """Start sending a tensor; its memory is free in stream order after `wait_oldest`.

        Args:
            tensor: a plain tensor of the state.
            name: which one it is, step after step.
            not_these: keys of storages that do not move (`storages_that_stay`).

        Returns:
            Whether it is away now. Otherwise it is as it was, and counted in `kept`.
        """
        if away_of(tensor) is not None:
            return True
        reason = self._why_it_stays(tensor, not_these)
        transfers = None if reason else self._transfers.to(tensor.device)
        if not reason and transfers is None:
            reason = "host memory"
        view = None if reason else native.capture(tensor)
        if not reason and view is None:
            reason = "not plain"
        if transfers is None or view is None:
            return self._keep(tensor, reason)
        action = self._action or transfers.without_recipe
        if action is KEEP:
            return self._keep(tensor, "keep")
        message = (
            f"memswap: this optimizer state ({tensor.dtype}, {list(tensor.shape)}) is away between "
            "steps (memswap.manage_optimizer); look at it inside `with managed.present():`"
        )
        storage, shell = native.take_bytes(tensor, message)
        memory = native.WeakStorage(storage)
        sent: tuple[AwayForm, Ticket] | str = "failed"
        try:
            sent = self._start(transfers, action, storage, tensor.dtype, name)
        finally:
            if isinstance(sent, str):
                native.give_bytes(tensor, shell, storage)
        if isinstance(sent, str):
            return self._keep(tensor, sent)
        form, departure = sent
        away = AwayState(departure, shell, form, view)
        setattr(tensor, AWAY_ATTRIBUTE, away)
        self.sent_bytes += away.nbytes
        if not transfers.works_ahead and departure.done():  # encoded on the spot
            self._wait_sent(tensor, away)
        else:
            self._leaving.append(_Leaving(ref(tensor), away.nbytes, transfers.works_ahead, memory))
            self.leaving_bytes += away.nbytes
        return away_of(tensor) is not None

    def may_move(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is not away is neither a counter nor too short to leave."""
        nbytes = tensor.numel() * tensor.element_size()
        return bool(tensor.numel() > 1 and nbytes >= self._min_bytes)

    @property
    def encodes(self) -> bool:
        """Whether what is away is in frames where it was."""
        transfers = self._transfers.all()
        return any((self._action or one.default_action) is ENCODE for one in transfers)

    def written_bytes(self) -> int:
        """Bytes that the pool has written to its file so far."""
        return 0 if self._pool is None else self._pool.written_bytes()

    def describe_pools(self) -> list[str]:
        """What was taken of host memory, a line for each pool."""
        return [one.describe() for one in self._transfers.pools()]

    def _why_it_stays(self, tensor: torch.Tensor, not_these: frozenset[int] | set[int]) -> str:
        if tensor.numel() <= 1:
            return "counter"
        if tensor.numel() * tensor.element_size() < self._min_bytes:
            return "small"
        if getattr(tensor, AWAY_ATTRIBUTE, None) is not None:
            return "swapped out"
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return "not plain"
        if native.storage_key(tensor) in not_these:
            return "parameter"
        if tensor.requires_grad or (tensor.device.type == "cpu" and tensor.is_shared()):
            return "shared"
        new = self._new.get(tensor.device)
        if new is None:  # once: where a step has failed for want of memory, there is none for this
            new = self._new[tensor.device] = holders_of_new(tensor.device)
        return "shared" if why_shared(tensor, new) else ""

    def _start(
        self,
        transfers: Transfers,
        action: Action,
        storage: StorageRef,
        dtype: torch.dtype,
        name: str,
    ) -> tuple[AwayForm, Ticket] | str:
        """The away form and the ticket, or the reason why the storage stays."""
        if action is not ENCODE and not transfers.copies:
            # An optimizer for each parameter is not a pool, and threads, for each parameter.
            pool = self._pool or shared_pool(transfers.device)
            transfers.use(pool, lane_to(pool, transfers.device))
        reason = ""
        for form in FORMS[action]:
            sent = transfers.send(form, storage, (name, 0, storage.nbytes, dtype))
            if not isinstance(sent, native.Refused):
                return sent
            reason = sent.reason
            if sent.why:
                self._tell(reason, storage.nbytes, sent.why)
        return reason

    def wait_oldest(self) -> bool:
        """Let go of the memory of what left first: what follows comes after its send.

        Returns:
            Whether anything was under way.
        """
        if not self._leaving:
            return False
        oldest = self._leaving.popleft()
        self.leaving_bytes -= oldest.nbytes
        tensor = oldest.tensor()
        away = None if tensor is None else away_of(tensor)
        if tensor is not None and away is not None:
            self._wait_sent(tensor, away)
        return True

    def _wait_sent(self, tensor: torch.Tensor, away: AwayState) -> None:
        try:
            away.departure.wait()
        except native.TransferError as error:
            kept = away.departure.storage()
            if kept is not None:
                away.give(tensor, kept)
                self._keep(tensor, "failed")
                self._tell("failed", away.nbytes, str(error))
                return
            raise
        away.form.wait_sent()

    def settle(self) -> None:
        """A step is over: in stream order nothing of what left is on a device any more.

        Threads that still write storages of host memory go on, and each is free when it is written.
        """
        for _ in range(len(self._leaving)):
            oldest = self._leaving[0]
            tensor = oldest.tensor()
            away = None if tensor is None else away_of(tensor)
            if oldest.works_ahead or away is None or away.departure.done():
                self.wait_oldest()
            else:
                self._leaving.rotate(-1)

    # --- and back ---------------------------------------------------------------------------------

    def returning_bytes(self, tensor: torch.Tensor) -> int:
        """Bytes of the device that `begin_return` would take for a tensor."""
        away = away_of(tensor)
        if away is None or away.returning is not None or not away.form.can_fetch_ahead:
            return 0
        return away.nbytes

    def begin_return(self, tensor: torch.Tensor) -> int:
        """Start bringing a tensor back, where that needs nobody's time. Bytes that it takes."""
        nbytes = self.returning_bytes(tensor)
        away = away_of(tensor)
        if away is not None and nbytes:
            away.returning = Returning(*away.form.bring())
        return nbytes

    def take_over(self, tensor: torch.Tensor) -> int:
        """Start bringing a tensor back into the memory of one as long that is leaving.

        [Note: Memory from hand to hand]
        By way of the allocator, memory of what left is free for what the current stream does after
        it has waited for the send; so kernels that are launched next wait for it as well, although
        they use neither. Where the fetch itself comes after the send (edge 8 of [Note: Every edge
        of a swap]), the current stream waits for the fetch alone, when its bytes are needed. Until
        then the send's ticket owns the memory too. A file that fails loses nothing: its lane keeps
        the bytes in host memory.

        Returns:
            Bytes that it takes, and the other one has no longer; 0: nobody leaves such memory.
        """
        nbytes, away = self.returning_bytes(tensor), away_of(tensor)
        if away is None or not nbytes or not isinstance(away.form, native.BlockForm):
            return 0
        for place, leaving in enumerate(self._leaving):
            last = leaving.tensor()
            gone = None if last is None else away_of(last)
            if last is None or gone is None or not leaving.works_ahead:
                continue
            if leaving.nbytes != nbytes or last.device != tensor.device:
                continue
            storage = leaving.storage.lock() if isinstance(gone.form, native.BlockForm) else None
            if storage is None:
                continue
            arrival = away.form.bring_into(storage, gone.departure)
            away.returning = Returning(storage, arrival, gone.departure)
            del self._leaving[place]
            self.leaving_bytes -= nbytes
            return nbytes
        return 0

    def cancel_return(self, tensor: torch.Tensor) -> None:
        """Let go of what is on its way back: it is not needed yet. Its away form has the bytes."""
        away = away_of(tensor)
        if away is not None and away.returning is not None:
            away.returning.let_go()
            away.returning = None

    def bring(self, tensor: torch.Tensor) -> None:
        """The tensor has its bytes again, for what the current stream does next.

        Raises:
            TransferError: they cannot be read. The tensor is still away.
            torch.OutOfMemoryError: the device has no room. The tensor is still away.
        """
        away = away_of(tensor)
        if away is None:
            return
        try:
            storage = away.bring()
        except torch.OutOfMemoryError:
            while self.wait_oldest():  # it may free memory
                pass
            storage = away.bring()
        away.give(tensor, storage)
        self.brought_bytes += away.nbytes

    # --- what is told -----------------------------------------------------------------------------

    def _keep(self, tensor: torch.Tensor, reason: str) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        self.kept[reason] = self.kept.get(reason, 0) + nbytes
        return False

    def _tell(self, reason: str, nbytes: int, why: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._line.warn(
                f"memswap.manage_optimizer: {format_bytes(nbytes)} of optimizer state stay where "
                f"they are ({reason}): {why}. Training goes on with less memory saved."
            )
