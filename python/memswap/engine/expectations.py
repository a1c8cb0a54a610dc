"""Expectations: what a tensor's frame will be like, from what it was like the last time.

How much a tensor shrinks is known only after it was encoded, and nobody waits to learn it. So the
next encode of the same tensor (same unit, same place in the scope, same size and dtype) goes by
what the encoder reported about the last one, whenever that report arrived. A wrong expectation
costs bytes, never an error: what does not fit a frame's capacity goes to an overflow that was set
aside before.

On a CPU a tensor that was not seen before gets the shape that a sample of its blocks chooses
(kernels/include/memswap/sample.h), and so it does now and then, and where its frame's length has
changed. On an accelerator nobody waits for a sample: the first frame has the shape of the dtype,
dense for a float, and what its encoder counts decides on the shape of the next one.

Nothing here touches a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from memswap.codec import Shape, dtype_code

if TYPE_CHECKING:
    import torch

#: A frame longer than this share of the raw bytes is not worth its time.
WORTH = 0.95

#: Encodes of one tensor between two looks at whether it shrinks by now, or in another shape.
RETRY_AFTER = 64

#: How much a tensor's frame gets longer or shorter, relative to the last one, before its shape is
#: chosen anew from a sample.
CHANGED = 0.05

#: Of the bytes that one iteration encodes, those whose shape is a mere trial.
TRIAL_SHARE = 1 / 32

#: Capacity beyond what was needed last time, and for small frames. Measured: over 200 steps of
#: training, what a tensor needed grew by at most 7 %.
MARGIN, MARGIN_UNITS = 1.10, 16

#: Capacity of the first dense frame, bits per element: escapes of N(0, 1) take half of it.
FIRST_BITS = 1.5

#: What a bitmap takes that is not packed, bits per element. Of a mask that is not random it is far
#: less, as the second frame knows.
BITMAP_BITS = 1.0

#: Share of zeros from which on they are left out, and below which that ends again.
SPARSE_FROM, SPARSE_UNTIL = 0.20, 0.12

#: Share of blocks that must be in mode LQ2 for one centre to serve the whole tensor, and what the
#: frame may be longer by with it.
ONE_CENTER_FROM, ONE_CENTER_COST = 0.90, 1.01

#: Tensors that are remembered. The sizes of a mixture of experts change from step to step, and
#: every size is a tensor of its own.
MOST_KEYS = 16384

CANONICAL, FAST = 0, 1  # codec.h: memswap_profile
LQ2, FW2, UNIT_BITS = 1, 3, 64  # docs/format.md sections 1 and 3
UNIT_NBYTES = UNIT_BITS // 8

# Codes of docs/format.md section 2: what a float has in the slab of a dense frame, bits per element
# (R and L0), and the bytes of an element.
_SLAB_BITS = {1: 10, 2: 13, 3: 26, 4: 6, 5: 5, 6: 58}
_FLOAT32, _BOOL = 3, 7
_WIDTHS = {1: 2, 2: 2, 3: 4, 6: 8, 10: 2, 11: 2, 12: 4, 13: 4, 14: 8, 15: 8, 17: 2, 18: 4, 19: 8}

NameT = TypeVar("NameT")
ValueT = TypeVar("ValueT")


class Key(NamedTuple):
    """Which tensor it is, step after step. The same program makes the same keys."""

    unit: str
    ordinal: int
    """Place among the storages that one scope of the unit considered."""
    nbytes: int
    dtype: torch.dtype


class Layout(Protocol):
    """Sizes of a frame (`native.frame_layout`)."""

    @property
    def fixed_nbytes(self) -> int: ...
    @property
    def max_var_units(self) -> int: ...
    def most_overflow_units(self, var_capacity: int, spare_tiles: int) -> int: ...


class Report(Protocol):
    """What an encoder found (`native.FrameReport`)."""

    @property
    def elements(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def frame_nbytes(self) -> int: ...
    @property
    def var_used(self) -> int: ...
    @property
    def overflow_used(self) -> int: ...
    @property
    def zeros(self) -> int: ...
    @property
    def center_sum(self) -> int: ...
    @property
    def status(self) -> int: ...
    @property
    def shape(self) -> int: ...
    def mode_count(self, mode: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Expectation:
    """How to encode one tensor now, and whether to."""

    key: Key
    pays: bool
    dtype: int
    shape: int | None
    """None: the one that a sample chooses. In host memory alone."""
    var_capacity: int | None
    """Units of 8 bytes; None: the worst case, where what is left over is given back at once."""
    profile: int = CANONICAL
    center: int = 0
    trial: bool = False
    """Whether the shape is a guess. `Expectations.settled` has the one that is known."""
    most_nbytes: int | None = None
    """Bytes that a plan has for the frame; None: there is no plan."""
    fault: str = ""
    """Why the codec must not encode such a tensor, in words for the user; empty where it may."""

    @property
    def options(self) -> tuple[int, int | None, int | None, int, int]:
        """What a `FrameSender` is told of the frame."""
        return self.dtype, self.shape, self.var_capacity, self.profile, self.center


class FrameSizes(NamedTuple):
    """Bytes of a tensor's frame, as it was last seen."""

    used: int
    held: int
    """With the capacity that the next one gets: on the device, on the link and in a pool."""
    overflow: int
    """What the next one sets aside for elements that are not like the last ones."""


class _Known:
    """What is known of one tensor."""

    __slots__ = (
        "bits",
        "canonical",
        "center",
        "encodes",
        "flat",
        "one_center",
        "rests",
        "sample",
        "shape",
        "share",
    )

    def __init__(self, shape: int, bits: float) -> None:
        self.shape = shape
        self.bits = bits  # of var, per element
        self.share: float | None = None  # of the raw bytes that the frame took; None: not seen yet
        self.center = 0
        self.one_center = False  # whether `center` serves all blocks
        self.canonical = 0.0  # share of the last canonical frame
        self.sample = True  # whether a sample chooses the next frame's shape, in host memory
        self.flat = False  # whether the exponents of each block lie within four: a constant?
        self.encodes = 0
        self.rests = 0  # times that it was not encoded, since it did not shrink

    def copy(self) -> _Known:
        other = _Known(self.shape, self.bits)
        other.share, other.center = self.share, self.center
        other.one_center, other.canonical = self.one_center, self.canonical
        other.flat = self.flat
        return other


class Expectations:
    """What is expected of the tensors of one device.

    Args:
        layout: sizes of a frame of (dtype, shape, elements).
        worst_case: whether frames get their worst case and are cut afterwards (in host memory).
        most_keys: how many tensors are remembered, the latest.
        spare_tiles: of the device's codec (kernels/include/memswap/codec.h).
        fault: why the device's codec must not encode a dtype in a layout, or "". It may wait for
            the device where it has not said "" yet of the two.
    """

    def __init__(
        self,
        layout: Callable[[int, int, int], Layout],
        worst_case: bool = False,
        most_keys: int = MOST_KEYS,
        spare_tiles: int = 0,
        fault: Callable[[int, int], str] = lambda dtype, layout: "",
    ) -> None:
        self._layout = layout
        self._fault = fault
        self._trusted: set[tuple[int, int]] = set()
        self._spare_tiles = spare_tiles
        self._worst_case = worst_case
        self._most_keys = most_keys
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        #: The last tensor of any size in the same place: its statistics are per element.
        self._alike: OrderedDict[tuple[str, int, torch.dtype], Key] = OrderedDict()
        self._trial_bytes = 0
        self._iteration_bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def begin_iteration(self) -> None:
        """What follows belongs to a new forward."""
        share = int(self._iteration_bytes * TRIAL_SHARE)
        self._trial_bytes = min(self._trial_bytes + share, self._iteration_bytes)
        self._iteration_bytes = 0

    def of(
        self,
        unit: str,
        ordinal: int,
        nbytes: int,
        dtype: torch.dtype,
        most_nbytes: int | None = None,
    ) -> Expectation:
        """What to do with a tensor that is about to leave.

        `most_nbytes`: what a plan has for the frame. Where its fixed part alone takes more, it does
        not pay. (In host memory nothing bounds a frame but what is in it.)
        """
        key = Key(unit, ordinal, nbytes, dtype)
        code = dtype_code(dtype)
        known = self._known.get(key)
        if known is None:
            known = self._remember(key, code)
        else:
            self._known.move_to_end(key)
        share = known.share
        if share is not None and share > WORTH:
            known.rests += 1
            if known.rests < RETRY_AFTER or share == inf:
                return Expectation(key, False, code, known.shape, 0)
            known.rests = 0
        if fault := self._fault_of(code, known.shape):
            return Expectation(key, False, code, known.shape, 0, fault=fault)
        known.encodes += 1
        self._iteration_bytes += nbytes
        if self._worst_case:
            sampled = known.sample or known.encodes % RETRY_AFTER == 0
            return Expectation(key, True, code, None if sampled else known.shape, None)
        other = self._worth_trying(key, known, code)
        if other is not None:
            bits = first_bits(code, other)
            tried = self._expectation(key, code, other, bits, trial=True, most_nbytes=most_nbytes)
            if tried.pays:
                return tried
        # A centre that was given says nothing about the one that would fit: ask now and then.
        fast = known.one_center and known.encodes % RETRY_AFTER != 0
        return self._expectation(
            key,
            code,
            known.shape,
            known.bits,
            profile=FAST if fast else CANONICAL,
            center=known.center if fast else 0,
            most_nbytes=most_nbytes,
        )

    def sizes(self, key: Key) -> FrameSizes | None:
        """Bytes of a tensor's frame, present and next. None: none has been seen, of any size."""
        place = (key.unit, key.ordinal, key.dtype)
        known = self._known.get(key) or self._known.get(self._alike.get(place, key))
        if known is None or known.share is None or known.share == inf:
            return None
        used = ceil(known.share * key.nbytes)
        if self._worst_case:
            return FrameSizes(used, used, 0)
        code = dtype_code(key.dtype)
        elements = key.nbytes // width_of(code)
        layout = self._layout(code, known.shape, elements)
        capacity = capacity_of(layout, elements, known.bits)
        overflow = layout.most_overflow_units(capacity, self._spare_tiles)
        return FrameSizes(
            used, layout.fixed_nbytes + capacity * UNIT_NBYTES, overflow * UNIT_NBYTES
        )

    def settled(self, trial: Expectation) -> Expectation:
        """What to do instead of a trial for which there is no room."""
        known = self._known.get(trial.key)
        if known is None:
            known = self._remember(trial.key, trial.dtype)
        return self._expectation(
            trial.key, trial.dtype, known.shape, known.bits, most_nbytes=trial.most_nbytes
        )

    def learn(self, expectation: Expectation, report: Report) -> None:
        """The encoder's report about a frame that was made as expected."""
        key = expectation.key
        known = self._known.get(key)
        if known is None or report.elements == 0 or report.status != 0:
            return
        share = report.frame_nbytes / key.nbytes
        if self._worst_case:
            seen = known.share if known.share is not None and known.share != inf else share
            # What a sample has just chosen is not chosen anew.
            known.sample = expectation.shape is not None and abs(share - seen) > CHANGED * seen
            known.shape, known.share = report.shape, share
            return
        shape = known.shape if expectation.shape is None else expectation.shape
        if expectation.trial and known.share is not None and share > WORTH * known.share:
            return  # the other shape was no better
        if shape != known.shape:
            known.one_center = False
        known.shape, known.share = shape, share
        known.bits = (report.var_used + report.overflow_used) * UNIT_BITS / report.elements
        if expectation.profile == CANONICAL:
            known.canonical = share
            in_lq2 = report.mode_count(LQ2)
            known.one_center = shape == Shape.DENSE and in_lq2 >= ONE_CENTER_FROM * report.blocks
            known.flat = shape == Shape.DENSE and report.mode_count(FW2) == report.blocks
            if in_lq2:
                known.center = round(report.center_sum / report.blocks) % 256
        elif share > ONE_CENTER_COST * known.canonical:
            known.one_center = False
        zeros = report.zeros / report.elements
        if shape == Shape.DENSE and zeros > SPARSE_FROM:
            # Everything stands in var: the bitmap, and all of what is not zero.
            if not self._fault_of(expectation.dtype, Shape.SPARSE):
                survivor_bits = _SLAB_BITS[expectation.dtype] + FIRST_BITS
                self._turn(known, Shape.SPARSE, BITMAP_BITS + (1 - zeros) * survivor_bits)
        elif shape == Shape.SPARSE and zeros < SPARSE_UNTIL:
            self._turn(known, Shape.DENSE, FIRST_BITS)

    # --- what it goes by --------------------------------------------------------------------------

    def _fault_of(self, code: int, layout: int) -> str:
        """Why the codec must not encode a dtype in a layout; empty where it may."""
        if (code, layout) in self._trusted:
            return ""
        fault = self._fault(code, layout)
        if not fault:
            self._trusted.add((code, layout))
        return fault

    def _turn(self, known: _Known, shape: int, bits: float) -> None:
        """The next frame has another shape. Of that one nothing has been seen yet."""
        known.shape, known.bits, known.one_center, known.flat = shape, bits, False, False
        known.share = min(known.share or 1.0, WORTH)  # it is tried, whatever this one was like

    def _remember(self, key: Key, code: int) -> _Known:
        place = (key.unit, key.ordinal, key.dtype)
        alike = self._known.get(self._alike.get(place, key))
        if alike is not None and alike.share != inf:
            known = alike.copy()
        else:
            shape = first_shape(code)
            known = _Known(shape, first_bits(code, shape))
            fixed = self._layout(code, shape, key.nbytes // width_of(code)).fixed_nbytes
            if fixed > WORTH * key.nbytes or key.nbytes % width_of(code):
                known.share = inf  # too few elements, or bytes that are no elements: for good
        self._put(self._known, key, known)
        self._put(self._alike, place, key)
        return known

    def _put(self, memory: OrderedDict[NameT, ValueT], name: NameT, value: ValueT) -> None:
        memory[name] = value
        if len(memory) > self._most_keys:
            memory.popitem(last=False)

    def _worth_trying(self, key: Key, known: _Known, code: int) -> int | None:
        """Another shape that statistics of the present one cannot speak about, now and then."""
        if known.share is None or known.shape != Shape.DENSE or known.encodes % RETRY_AFTER != 2:
            return None
        if not known.flat and code != _FLOAT32:
            return None
        other = Shape.INTS if known.flat else Shape.UPCAST
        if self._fault_of(code, other):
            return None
        if self._trial_bytes < key.nbytes:
            known.encodes -= 1  # another time, in its turn
            return None
        self._trial_bytes -= key.nbytes
        return other

    def _expectation(
        self,
        key: Key,
        code: int,
        shape: int,
        bits: float,
        profile: int = CANONICAL,
        center: int = 0,
        trial: bool = False,
        most_nbytes: int | None = None,
    ) -> Expectation:
        elements = key.nbytes // width_of(code)
        layout = self._layout(code, shape, elements)
        capacity = capacity_of(layout, elements, bits)
        pays = True
        if most_nbytes is not None:
            pays = layout.fixed_nbytes <= most_nbytes
            capacity = min(capacity, max(most_nbytes - layout.fixed_nbytes, 0) // UNIT_NBYTES)
        return Expectation(key, pays, code, shape, capacity, profile, center, trial, most_nbytes)


def capacity_of(layout: Layout, elements: int, bits: float) -> int:
    """Units of var for so many bits per element, with a margin."""
    wanted = ceil(elements * bits * MARGIN / UNIT_BITS) + MARGIN_UNITS
    return min(wanted, layout.max_var_units)


def first_shape(code: int) -> int:
    """The shape for a dtype of which nothing else is known."""
    if code in _SLAB_BITS:
        return Shape.DENSE
    return Shape.BITS if code == _BOOL else Shape.INTS


def first_bits(code: int, shape: int) -> float:
    """Bits of var per element for a frame of a shape that was not seen yet."""
    if shape == Shape.INTS:
        return 4.0 * width_of(code)  # half of it
    return BITMAP_BITS if shape == Shape.BITS else FIRST_BITS


def width_of(code: int) -> int:
    """Bytes of an element, as frames count them."""
    return _WIDTHS.get(code, 1)
