"""The layers of one tag: in which order they run, who stays, and who is brought back ahead.

[Note: The turn of a tower]
The last layer of a forward stays on the device, since backward begins there. Which one that is
cannot be said for sure when contexts are made: of several models that share a tag each has its own
last layer, and contexts may be made in another order than that of the forward. So the youngest
context of a tag is only the first guess. From then on backward itself says it: a layer whose
tensors are demanded although no later layer has asked for them ahead is where backward turns, and
stays from the next forward on; one that another has asked for ahead may leave.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from memswap._native import native
from memswap.engine.autograd import NO_TASK, graph_task

if TYPE_CHECKING:
    from memswap._C import Batch
    from memswap._warn import UsersLine


class Layer(Protocol):
    """What a tower asks of its contexts."""

    layer_idx: int
    prefetch: bool
    turns: bool | None
    """Whether backward begins with it, so that it stays; None: not known yet."""
    line: UsersLine
    """Where it was made."""


class LayerSave:
    """What one context saved in one forward. Owned by its batch, which it knows weakly.

    Called when a backward pass first demands something of it.

    Args:
        tower: of the layers.
        context: that saves.
        batch: that it saves into.
        before: what the layer before has saved in this forward; None: it is the first.
    """

    __slots__ = (
        "__weakref__",
        "_asked_by",
        "_batch",
        "_before",
        "_context",
        "_line",
        "_read_by",
        "_tower",
    )

    def __init__(
        self,
        tower: Tower,
        context: Layer,
        batch: Batch,
        before: LayerSave | None,
    ) -> None:
        self._tower = tower
        self._line = context.line
        self._context = ref(context)
        self._batch = ref(batch)
        self._before = None if before is None else ref(before)
        self._asked_by = NO_TASK  # the backward pass in which the next layer asked for it
        self._read_by = NO_TASK  # the backward pass that demanded it

    @property
    def demanded(self) -> bool:
        """Whether a backward pass has begun to read it."""
        return self._read_by != NO_TASK

    def __call__(self, batch: Batch) -> None:
        task = graph_task()
        self._read_by = task
        context = self._context()
        if batch.launched:
            batch.launch_load()
        elif batch.nbytes:
            self._tower.notice_stay(context, self._line)
        if context is None:
            return
        if self._asked_by != task and context.prefetch:
            context.turns = True
        before = None if self._before is None else self._before()
        if before is not None and context.prefetch:
            before._ask(task)

    def _ask(self, task: int) -> None:
        """The next layer's backward has begun: this one comes next."""
        if self._read_by == task:
            return
        self._asked_by = task
        context, batch = self._context(), self._batch()
        if context is not None:
            context.turns = False
        if batch is not None and batch.launched:
            batch.launch_load()


class _Run(threading.local):
    """Where a thread is in its forward through a tower."""

    def __init__(self) -> None:
        self.visited: set[int] = set()
        self.last: ref[LayerSave] | None = None
        self.waiting: ref[Batch] | None = None  # launched, and not waited for yet


class Told:
    """What was said already: one for each handler."""

    def __init__(self) -> None:
        self.swaps_nothing = False


class Tower:
    """Contexts with one tag, in the order in which they were made. Does not keep them alive."""

    def __init__(self, tag: str, told: Told) -> None:
        self.tag = tag
        self._told = told
        self._swapped = False  # anything, ever
        self._contexts: list[ref[Layer]] = []
        self._run = _Run()

    def contexts(self) -> list[Layer]:
        """Those that are alive."""
        alive = [(one, one()) for one in self._contexts]
        self._contexts = [reference for reference, context in alive if context is not None]
        return [context for _, context in alive if context is not None]

    def add(self, context: Layer) -> int:
        """The next layer; its place."""
        index = self.last_index + 1
        self._contexts.append(ref(context))
        return index

    @property
    def last_index(self) -> int:
        """The place of the last layer; -1: there is none."""
        alive = self.contexts()
        return alive[-1].layer_idx if alive else -1

    def enter(self, context: Layer, batch: Batch) -> None:
        """A layer's forward begins, and saves for this batch."""
        run = self._run
        last = None if run.last is None else run.last()
        if id(context) in run.visited or last is None or last.demanded:
            run.visited.clear()  # another forward
            last = None
        run.visited.add(id(context))
        save = LayerSave(self, context, batch, last)
        batch.on_demand = save
        run.last = ref(save)

    def leave(self, context: Layer, batch: Batch) -> None:
        """A layer's forward ends: it leaves while the next one runs, and is waited for then."""
        run = self._run
        waiting = None if run.waiting is None else run.waiting()
        run.waiting = None
        stays = context.turns
        if stays is None:
            stays = context.layer_idx == self.last_index
        if not stays:
            self._swapped = True
            batch.launch_offload()
            run.waiting = ref(batch)
        if waiting is not None and waiting.phase in (
            native.Phase.OFFLOADING,
            native.Phase.OFFLOADED,
        ):
            waiting.wait_offload()

    def notice_stay(self, context: Layer | None, line: UsersLine) -> None:
        """Backward has come to a layer that stayed. Say so where none can ever leave."""
        if self._swapped or self._told.swaps_nothing:
            return
        if context is None:
            found = "was made for one forward and dropped, so it had no layer after it"
            expected = "make one context for each layer, once, before training, and keep them"
        elif len(self.contexts()) == 1:
            found = "is the only one with its tag, and the last layer of a tag stays on the device"
            expected = (
                "give the contexts of all layers one tag, with * in place of the layer's number "
                '(such as "model.layers.*")'
            )
        else:
            return
        self._told.swaps_nothing = True
        line.warn(f"memswap: TensorSwapContext({self.tag!r}) swaps nothing: it {found}; {expected}")
