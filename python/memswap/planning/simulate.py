"""Replay of one step: when everything happens, and how many bytes are where.

[Note: The model]
Four lanes: compute, the codec, copies away, copies back. What holds:

1. Compute does the gap before each mark, then the mark. It stands still only where it waits.
2. A send starts when its bytes are there, behind the sends before it. It is *released* where room
   is needed and nowhere else: at the mark before the save that needs the room, oldest send first,
   compute waits for the end of the send and the storage goes. So memory in program order depends on
   the plan alone. A copy that is slower than predicted costs a wait at its release; it never costs
   a byte more. What is encoded on its way is released twice: the storage when it has been encoded
   (these first: that has been paid for), and the frame when it has been copied.
3. Fetches are started at demands, in the order of the demands, not before there is room, and not
   before a link of half the speed (`LEAD`) would have to start them.
4. A storage is resident from its save until it was released and the forward has let go of it, and
   again from its fetch through the mark of its last demand. A frame on the device is resident from
   the save on, with all its capacity; one on its way to a pool until it was released, and again
   from the fetch of its storage through the first demand. That counts a little more than the
   ledger does, never less.
5. Codec time is compute's: encoding beside compute takes its processors. (On a CPU the calling
   thread does it, and the raw bytes go at once.) Where operators open windows (`Step.windows_s`),
   work waits for them, in its order, decodes first, and costs nothing there; it costs what is left
   of it where room is needed, at the end of the forward, or at its demand. (What has to be copied
   before it is decoded waits for no window.)
6. Copies in both directions at once run at the duplex rates. Where those who copy share compute's
   processors (`Rates.copy_share`), compute loses that share of a copy's time, when the copy starts.
7. What recomputed units save again is there whatever the plan says (`Step.extra_nbytes`), and so is
   the time that they take.
8. What elements that are not like the last ones may need beyond their frames' capacity lies in one
   room that is there all the time (`arena_nbytes`). What finds no credit there, or would need a
   longer frame than planned, is swapped as it is: that takes less of the device at any mark.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf

from memswap.engine.action import Action
from memswap.planning.link import Link
from memswap.planning.rates import Rates
from memswap.planning.step import Step

LEAD = 2.0

MOVES = (Action.SWAP, Action.ENCODE_SWAP)
CODED = (Action.ENCODE, Action.ENCODE_SWAP)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a lane did, in seconds from the begin of the step."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass
class Replay:
    """What a plan makes of a step."""

    resident_bytes: list[int] = field(default_factory=list)
    """At each mark, the most of it."""
    mark_s: list[float] = field(default_factory=list)
    """When each mark was over."""
    exposed_s: dict[int, float] = field(default_factory=dict)
    """Seconds that compute stood still for a storage, or worked for its codec."""
    arena_bytes: int = 0
    """Of these, for what does not fit frames."""
    releases: dict[int, list[int]] = field(default_factory=dict)
    """Mark -> storages whose sends are released there."""
    departures: dict[int, list[int]] = field(default_factory=dict)
    """Mark -> storages whose frames are released there, on their way to a pool."""
    fetches: dict[int, list[int]] = field(default_factory=dict)
    """Demanded storage -> storages that start back at its first demand."""
    idle: list[int] = field(default_factory=list)
    """Storages that moved although nobody needed their room."""
    spans: list[Span] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return max(self.resident_bytes, default=0)

    @property
    def total_exposed_s(self) -> float:
        return sum(self.exposed_s.values())


def replay(
    step: Step,
    rates: Rates,
    actions: Mapping[int, Action],
    budget_bytes: float = inf,
    spans: bool = False,
) -> Replay:
    """Replay a step under a plan.

    Args:
        actions: what is done with a storage, by its index; the others are kept.
        budget_bytes: how many resident bytes to stay below, if waiting makes it possible.
        spans: whether to note what every lane does when.
    """
    return _Run(step, rates, actions, budget_bytes, spans).run()


#: The host may be ahead of the device by a share of a step's encodes, and by so many at least.
LEAD_SHARE, LEAST_LEAD = 1 / 16, 4

#: What an arena takes beside the room in it (csrc/codec/arena.h).
ARENA_HEADER_BYTES = 128


def arena_nbytes(step: Step, actions: Mapping[int, Action]) -> int:
    """Bytes of the device for what elements that are not like the last ones need beyond frames.

    An encode sets its worst case aside until the host has seen what it took, and a host that finds
    no room for the next one waits. So there is room for the largest of a share of them.
    """
    aside = sorted(
        (step.storages[i].overflow_nbytes for i, action in actions.items() if action in CODED),
        reverse=True,
    )
    room = sum(aside[: max(LEAST_LEAD, ceil(len(aside) * LEAD_SHARE))])
    return room + ARENA_HEADER_BYTES if room else 0


class _Run:
    def __init__(
        self,
        step: Step,
        rates: Rates,
        actions: Mapping[int, Action],
        budget_bytes: float,
        spans: bool,
    ) -> None:
        self.step, self.rates, self.budget_bytes = step, rates, budget_bytes
        self.actions = {i: action for i, action in actions.items() if action is not Action.KEEP}
        self.noting = spans
        self.found = Replay()
        self.link = Link(rates)
        self.clock = 0.0
        self.resident = self.found.arena_bytes = arena_nbytes(step, self.actions)
        self.saves = len(step.storages)
        self.marks = self.saves + len(step.order)
        self.sends: deque[tuple[int, Action]] = deque()  # on the link, not released
        self.encoded: deque[tuple[int, float]] = deque()  # not released, and when that ended
        self.windows = () if rates.inline_codec else step.windows_s
        self.waiting: deque[tuple[int, float]] = deque()  # encodes, and what is left of them
        self.decoding: dict[int, float] = {}  # decodes, the same
        self.sent_frames: set[int] = set()  # on the link, not released
        self.away: set[int] = set()
        self.gone_at: dict[int, list[int]] = {}  # mark -> bytes that go before it
        self.extra = step.extra_nbytes or (0,) * self.marks
        #: The most of them from a mark on.
        self.extra_ahead = list(accumulate(reversed(self.extra), max))[::-1]

    def run(self) -> Replay:
        for index in range(self.saves):
            self._advance(index)
            self._save(index)
            self.found.mark_s.append(self.clock)
        while self.waiting:
            self._encode_now()
        self._make_room_for_backward()
        self._start_by = self._latest_starts()
        # What the calling thread decodes comes back when it is demanded, and needs its room then.
        inline = [i for i in self.away if self.rates.inline_codec and self.actions[i] in CODED]
        self._reserve = max((self.step.storages[index].nbytes for index in inline), default=0)
        self._pending = deque(i for i in self.step.order if i in self.away and i not in inline)
        self._returning: set[int] = set()
        for place, index in enumerate(self.step.order):
            self._advance(self.saves + place)
            self._demand(self.saves + place, index)
            self.found.mark_s.append(self.clock)
        self.found.idle = [
            *(index for index, action in self.sends if action is Action.SWAP),
            *(index for index, _ in self.encoded),
        ]
        if self.noting:
            self._note_copies()
        return self.found

    def _advance(self, mark: int) -> None:
        """The gap before a mark, and what goes with it."""
        gap_s = self.step.gaps_s[mark]
        if self.noting and gap_s > 0:
            storages, order = self.step.storages, self.step.order
            forward = mark < self.saves
            unit = (
                storages[mark].unit
                if forward
                else storages[order[max(mark - self.saves - 1, 0)]].unit
            )
            self._note("compute", f"{'forward' if forward else 'backward'} {unit}", gap_s)
        self.clock += gap_s
        self.resident -= sum(self.gone_at.pop(mark, ()))
        if self.windows:
            self._use_windows(self.windows[mark])

    def _use_windows(self, left_s: float) -> None:
        """Do what waits, for as long as windows last."""
        for index in [*self.decoding]:
            done_s = min(left_s, self.decoding[index])
            self.decoding[index] -= done_s
            left_s -= done_s
        while self.waiting and left_s > 0:
            index, needs_s = self.waiting.popleft()
            if needs_s > left_s:
                self.waiting.appendleft((index, needs_s - left_s))
                return
            left_s -= needs_s
            self._has_encoded(index)

    def _encode_now(self) -> None:
        """What waits first starts in no window."""
        index, left_s = self.waiting.popleft()
        self._codec(index, left_s, "encode")
        self._has_encoded(index)

    def _has_encoded(self, index: int) -> None:
        self.encoded.append((index, self.clock))
        if self.actions[index] is Action.ENCODE_SWAP:
            self._copy(0, index, self._framed(index))
            self.sends.append((index, Action.ENCODE_SWAP))
            self.sent_frames.add(index)

    def _save(self, index: int) -> None:
        storage = self.step.storages[index]
        self.resident += storage.nbytes
        peak = self.resident
        action = self.actions.get(index)
        if action is Action.SWAP:
            self._copy(0, index, storage.nbytes)
            self.sends.append((index, action))
        elif action is not None:
            self.resident += self._framed(index)
            peak = self.resident
            if action is Action.ENCODE:
                self._gone_after(storage.gone_after, storage.held_frame_nbytes)
            self.waiting.append((index, self.rates.encode_s(storage.nbytes)))
            if self.rates.inline_codec:
                self._encode_inline()
            elif not self.windows:
                self._encode_now()
        else:
            self._gone_after(storage.gone_after, storage.nbytes)
        self.found.resident_bytes.append(peak + self.extra[index])
        self._make_room(index)

    def _encode_inline(self) -> None:
        """The calling thread encodes, and writes: the raw bytes go at once."""
        index, seconds = self.waiting.popleft()
        self._codec(index, seconds, "encode")
        if self.actions[index] is Action.ENCODE_SWAP:
            self._copy(0, index, self.step.storages[index].held_frame_nbytes)
            self._wait(index, self.link.end_s(0, index), "write")
        self._release(index, index)

    @property
    def _can_release(self) -> bool:
        return bool(self.sends or self.encoded or self.waiting)

    def _make_room(self, mark: int) -> None:
        """Release sends until the next save fits."""
        coming = 0
        if mark + 1 < self.saves:
            storage = self.step.storages[mark + 1]
            coming = storage.nbytes + self._framed(mark + 1) + self.extra[mark + 1]
        going = sum(self.gone_at.get(mark + 1, ()))
        while self._can_release and self.resident - going + coming > self.budget_bytes:
            self._release_oldest(mark)
            going = sum(self.gone_at.get(mark + 1, ()))

    def _make_room_for_backward(self) -> None:
        """After the last save, release what has to go for the bytes that come back."""
        mark = self.saves - 1
        while self._can_release and self._backward_peak() > self.budget_bytes:
            self._release_oldest(mark)

    def _backward_peak(self) -> int:
        """The most that is resident in backward if nothing comes back before it is demanded."""
        gone = {mark: sum(sizes) for mark, sizes in self.gone_at.items()}
        resident, peak = self.resident, 0
        for place, index in enumerate(self.step.order):
            mark = self.saves + place
            resident -= gone.get(mark, 0)
            storage = self.step.storages[index]
            if index in self.away:
                resident += storage.nbytes
            if self.actions.get(index) is Action.ENCODE_SWAP:
                frame_nbytes = self._framed(index)
                if index in self.away:
                    resident += frame_nbytes
                frames = (index in self.away) + (index in self.sent_frames)
                gone[mark + 1] = gone.get(mark + 1, 0) + frames * frame_nbytes
            if index in self.actions and storage.last_demand is not None:
                after = storage.last_demand + 1
                gone[after] = gone.get(after, 0) + storage.nbytes
            peak = max(peak, resident + self.extra[mark])
        return peak

    def _release_oldest(self, mark: int) -> None:
        waits = self.waiting and (not self.sends or self.waiting[0][0] < self.sends[0][0])
        if waits and not self.encoded:
            self._encode_now()
        if self.encoded:
            index, ended_s = self.encoded.popleft()
            self._wait(index, ended_s, "wait for room")
            self._release(index, mark)
            return
        index, action = self.sends.popleft()
        self._wait(index, self.link.end_s(0, index), "wait for room")
        if action is Action.SWAP:
            self._release(index, mark)
        else:
            self.sent_frames.discard(index)
            self.resident -= self._framed(index)
            self.found.departures.setdefault(mark, []).append(index)

    def _release(self, index: int, mark: int) -> None:
        storage = self.step.storages[index]
        self.away.add(index)
        self.found.releases.setdefault(mark, []).append(index)
        held_until = self.saves if storage.held_until is None else storage.held_until
        self._gone_at(held_until, storage.nbytes, mark)

    def _demand(self, mark: int, index: int) -> None:
        storage = self.step.storages[index]
        if index in self.away:
            action = self.actions[index]
            if index not in self._returning:
                self._fetch(index)
            if action in MOVES:
                self._wait(index, self.link.end_s(1, index), "wait for bytes")
            if action in CODED:
                decode_s = self.rates.decode_s(storage.nbytes)
                self._codec(index, self.decoding.pop(index, decode_s), "decode")
            self._gone_after(storage.last_demand, storage.nbytes)
            if action is Action.ENCODE_SWAP:  # whoever has the bytes comes after all copies
                frames = 1 + (index in self.sent_frames)
                self._gone_after(mark, frames * self._framed(index))
        elif index in self.actions:
            self._gone_after(storage.gone_after, storage.nbytes)  # nobody needed its room
        peak = self.resident
        while self._pending:
            coming = self._pending[0]
            nbytes = self.step.storages[coming].nbytes
            if coming in self._returning:
                self._pending.popleft()
                continue
            following = mark + 1
            early = following >= self.marks or self._nominal[following] <= self._start_by[coming]
            nbytes += self._framed(coming) if self.actions[coming] is Action.ENCODE_SWAP else 0
            reserve = max(self._reserve, self.extra_ahead[mark])
            if early or self.resident + nbytes + reserve > self.budget_bytes:
                break
            self._pending.popleft()
            self._fetch(coming)
            self.found.fetches.setdefault(index, []).append(coming)
            peak = max(peak, self.resident)
        self.found.resident_bytes.append(peak + self.extra[mark])

    def _fetch(self, index: int) -> None:
        storage = self.step.storages[index]
        self._returning.add(index)
        self.resident += storage.nbytes
        action = self.actions[index]
        if self.windows and action is Action.ENCODE:
            self.decoding[index] = self.rates.decode_s(storage.nbytes)
        if action is Action.ENCODE_SWAP:
            self.resident += self._framed(index)
        if action in MOVES:
            self._copy(1, index, storage.away_nbytes(action))

    def _latest_starts(self) -> dict[int, float]:
        """Until when a fetch must start on a link of half the speed, by undisturbed time."""
        step, rates = self.step, self.rates
        nominal = 0.0
        self._nominal: dict[int, float] = {}
        for mark in range(self.saves, self.marks):
            nominal += step.gaps_s[mark]
            self._nominal[mark] = nominal
        starts: dict[int, float] = {}
        latest = inf
        for place in reversed(range(len(step.order))):
            index = step.order[place]
            if index not in self.away:
                continue
            storage, action = step.storages[index], self.actions[index]
            seconds = 0.0
            if action is Action.SWAP:
                seconds = rates.fetch_s(storage.nbytes)
            elif action is Action.ENCODE_SWAP:
                seconds = rates.fetch_s(storage.held_frame_nbytes)
            if action in CODED:
                seconds += 0.0 if rates.inline_codec else rates.decode_s(storage.nbytes)
            latest = min(latest, self._nominal[self.saves + place]) - LEAD * seconds
            starts[index] = latest
        return starts

    # --- small change ---------------------------------------------------------------------------

    def _framed(self, index: int) -> int:
        """Bytes that a storage's frame takes of the device while it is there."""
        action = self.actions.get(index)
        if action is Action.ENCODE or (
            action is Action.ENCODE_SWAP and not self.rates.inline_codec
        ):
            return self.step.storages[index].held_frame_nbytes
        return 0

    def _gone_after(self, mark: int | None, nbytes: int) -> None:
        """Bytes that are there through a mark; None: to the end."""
        if mark is not None:
            self.gone_at.setdefault(mark + 1, []).append(nbytes)

    def _gone_at(self, mark: int, nbytes: int, now: int) -> None:
        """Bytes that are not there any more at a mark, which may have passed."""
        if mark <= now:
            self.resident -= nbytes
        else:
            self.gone_at.setdefault(mark, []).append(nbytes)

    def _wait(self, index: int, until_s: float, why: str) -> None:
        stall_s = until_s - self.clock
        if stall_s > 0:
            self.found.exposed_s[index] = self.found.exposed_s.get(index, 0.0) + stall_s
            self._note("waits", f"{why} ({self.step.storages[index].unit})", stall_s)
            self.clock = until_s

    def _copy(self, way: int, index: int, nbytes: int) -> None:
        """A copy away (0) or back (1) may start."""
        self.link.add(way, index, nbytes, self.clock)
        takes_s = (self.rates.fetch_takes_s if way else self.rates.send_takes_s)(nbytes)
        if takes_s:
            self._work("waits", index, takes_s, "copying takes processors from")

    def _codec(self, index: int, seconds: float, what: str) -> None:
        self._work("codec", index, seconds, what)

    def _work(self, lane: str, index: int, seconds: float, what: str) -> None:
        self.found.exposed_s[index] = self.found.exposed_s.get(index, 0.0) + seconds
        self._note(lane, f"{what} {self.step.storages[index].unit}", seconds)
        self.clock += seconds

    def _note(self, lane: str, name: str, seconds: float) -> None:
        """A span that begins now."""
        if self.noting:
            self.found.spans.append(Span(lane, name, self.clock, self.clock + seconds))

    def _note_copies(self) -> None:
        self.link.drain()
        for way, lane in enumerate(("copies away", "copies back")):
            for index, begin_s in sorted(self.link.begins[way].items()):
                unit = self.step.storages[index].unit
                end_s = self.link.ends[way][index]
                self.found.spans.append(Span(lane, f"{unit} #{index}", begin_s, end_s))
