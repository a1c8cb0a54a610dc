"""Steps for the planner's tests: written by hand, and drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from memswap import Action, Rates
from memswap.planning.step import Recipe, Region, SavedStorage, Step

ALL = (Action.SWAP, Action.ENCODE_SWAP, Action.ENCODE)

#: One byte takes a microsecond on the link, a tenth of it in the codec; no latencies.
RATES = Rates("a machine", 1e6, 1e6, 1e6, 1e6, 1e7, 1e7, copy_latency_s=0.0, codec_latency_s=0.0)


def saved(
    nbytes: int,
    held_until: int | None,
    last_demand: int | None,
    *,
    actions: tuple[Action, ...] = (Action.SWAP,),
    frame: float = 0.7,
    held_frame: float = 0.8,
    unit: str = "0",
    ordinal: int = 0,
    overflow: float = 0.0,
    recipe: Recipe | None = None,
) -> SavedStorage:
    return SavedStorage(
        unit,
        ordinal,
        nbytes,
        "torch.bfloat16",
        actions,
        int(nbytes * frame),
        int(nbytes * held_frame),
        held_until,
        last_demand,
        overflow_nbytes=int(nbytes * overflow),
        recipe=recipe,
    )


def stack(
    sizes: list[int],
    forward_s: float = 1e-3,
    backward_s: float = 2e-3,
    actions: tuple[Action, ...] = (Action.SWAP,),
    **options: float,
) -> Step:
    """Layers that save one storage each, demanded in reverse; let go by the next layer."""
    n = len(sizes)
    storages = [
        saved(size, min(i + 1, n), 2 * n - 1 - i, actions=actions, unit=str(i), **options)
        for i, size in enumerate(sizes)
    ]
    return Step(tuple(storages), tuple(reversed(range(n))), (forward_s,) * n + (backward_s,) * n)


@st.composite
def steps(draw: st.DrawFn, most: int = 5, recomputable: bool = False) -> Step:
    """Random steps: sizes, times, orders, what is held for how long, what may be done."""
    n = draw(st.integers(1, most))
    order = list(reversed(range(n)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    unused = draw(st.integers(0, n - 1)) if n > 1 and draw(st.booleans()) else None
    order = [index for index in order if index != unused]
    marks = n + len(order)
    first = {index: n + place for place, index in enumerate(order)}
    storages = []
    for index in range(n):
        last = None
        if index in first:
            last = draw(st.integers(first[index], min(first[index] + 2, marks - 1)))
        held = draw(st.sampled_from([index + 1, index + 1, index + 2, n, None]))
        actions = draw(st.sampled_from([ALL, ALL, (Action.SWAP,), (Action.ENCODE,), ()]))
        recipe = None
        if actions and draw(st.booleans()):
            actions = (*actions, Action.RECOMPUTE)
            read = draw(st.lists(st.integers(0, n - 1), max_size=2, unique=True))
            seconds = draw(st.sampled_from([0.0, 1e-4, 3e-3]))
            made_nbytes = draw(st.sampled_from([0, 2_000, 9_000]))
            sources = tuple(one for one in read if one < index)
            recipe = Recipe("mul", sources, seconds, made_nbytes)
        storages.append(
            saved(
                draw(st.integers(1, 5000)),
                None if held is None else min(held, n),
                last,
                actions=actions,
                frame=draw(st.sampled_from([0.1, 0.6, 0.9])),
                held_frame=draw(st.sampled_from([0.1, 0.6, 1.0])),
                unit=str(index // 2),
                ordinal=index % 2,
                overflow=draw(st.sampled_from([0.0, 0.0, 0.3])),
                recipe=recipe,
            )
        )
    gaps = draw(st.lists(st.integers(0, 4000), min_size=marks, max_size=marks))
    units = sorted({storage.unit for storage in storages}) if recomputable else []
    first = {unit: next(i for i, one in enumerate(storages) if one.unit == unit) for unit in units}
    return Step(
        tuple(storages),
        tuple(order),
        tuple(gap * 1e-6 for gap in gaps),
        0.0,
        tuple(Region(u, (first[u],), draw(st.sampled_from([0, 300]))) for u in units),
        windows_s=tuple(
            draw(
                st.sampled_from(
                    [(), tuple(gap * draw(st.sampled_from([0.0, 5e-7])) for gap in gaps)]
                )
            )
        ),
    )


machines = st.builds(
    Rates,
    st.just("a machine"),
    *(st.sampled_from([2e5, 1e6, 5e6]) for _ in range(2)),
    *(st.sampled_from([1e5, 2e5]) for _ in range(2)),
    *(st.sampled_from([1e6, 1e7, 1e9]) for _ in range(2)),
    copy_latency_s=st.sampled_from([0.0, 1e-4]),
    codec_latency_s=st.just(0.0),
    copy_share=st.sampled_from([0.0, 0.0, 0.3]),
    inline_codec=st.booleans(),
)
