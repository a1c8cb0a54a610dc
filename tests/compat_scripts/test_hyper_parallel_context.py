"""HyperParallel's context parallelism, as its users write it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cut_attention import LATE_FIRST, open_comms
from hyper_parallel_attention import (
    BATCH,
    STEPS,
    TOKENS,
    WIDTH,
    Block,
    CoreAttention,
    CoreBNSD,
    CoreBSH,
    CoreNormed,
    CoreOtherPlaces,
    CoreSBHD,
    CoreTHD,
    CoreTriu,
    CoreTuple,
    Recorded,
    assert_trains_the_bits,
    batches,
    degrees,
    make,
)
from memswap.compat.hyper_parallel import AsyncContextParallel, ContextParallel
from ranks import Rank, distributed

# --- scripts --------------------------------------------------------------------------------------


def apply_to_each(model: nn.Module, style: Any, mesh: DeviceMesh) -> None:
    for block in model.children():
        assert style.apply(block.attention, mesh) is block.attention


def apply_by_plan(model: nn.Module, style: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"*.attention": style})


def apply_async(model: nn.Module, style: Any, mesh: DeviceMesh) -> None:
    for block in model.children():
        block.attention = style.apply(
            block.attention, mesh, block.q_proj, block.k_proj, block.v_proj
        )


def apply_async_by_name(model: nn.Module, style: Any, mesh: DeviceMesh) -> None:
    for block in model.children():
        style.apply(
            block.attention, mesh, q_proj=block.q_norm, k_proj=block.k_norm, v_proj=block.v_proj
        )


@distributed(2, slow=(4,))
@LATE_FIRST
def test_a_style_in_a_plan_and_by_hand(rank: Rank, late: bool) -> None:
    mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("cp",))
    for degree, script in itertools.product(degrees(rank), (apply_by_plan, apply_to_each)):
        if script is apply_by_plan and degree == 2:
            continue
        style = Recorded(ContextParallel, rank, late, ulysses_degree=degree)
        name = f"degree {degree}, {script.__name__}"
        assert_trains_the_bits(rank, style, mesh, CoreAttention, script, name=name)
        for applied in style.style.applied:
            launches = applied.exchanges.launches
            part = BATCH * TOKENS // rank.size * WIDTH * 4
            moved = {"q", "k", "v", "o"} if degree != 1 else {"k", "v"}
            assert {label for _, label in launches} == {
                label + end for label in moved for end in ("", " gradient")
            }
            assert all(launch.times == STEPS for launch in launches.values())
            first = [one for one in launches.values() if one.collective == "all-to-all"]
            assert all(one.nbytes == part for one in first), "each rank gives what it holds"
    rank.same_everywhere(rank.log.events, "launches and waits")


LAYOUTS = (CoreAttention, CoreTriu, CoreTuple, CoreBNSD, CoreSBHD, CoreTHD, CoreBSH, CoreNormed)

#: What four ranks try in the fast suite: a layout is the same for any number of them.
ON_FOUR = (CoreAttention, CoreTHD, CoreNormed)


@distributed(2)
@LATE_FIRST
@pytest.mark.parametrize("like", LAYOUTS)
def test_async_with_its_projections(rank: Rank, late: bool, like: type[CoreAttention]) -> None:
    assert_projections_launch(rank, late, like)


@distributed(4)
@LATE_FIRST
@pytest.mark.parametrize(
    "like",
    [pytest.param(one, marks=() if one in ON_FOUR else pytest.mark.slow) for one in LAYOUTS],
)
def test_async_with_its_projections_on_four_ranks(
    rank: Rank, late: bool, like: type[CoreAttention]
) -> None:
    assert_projections_launch(rank, late, like)


def assert_projections_launch(rank: Rank, late: bool, like: type[CoreAttention]) -> None:
    mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("cp",))
    for degree in degrees(rank):
        if like is CoreBSH and degree != 1:
            continue
        style = Recorded(AsyncContextParallel, rank, late, like.seq_dim, like.head_dim, degree)
        script = apply_async_by_name if like is CoreNormed else apply_async
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert_trains_the_bits(rank, style, mesh, like, script, name=f"degree {degree}")
        for applied in style.style.applied:
            assert applied.early == STEPS * (2 if degree == 1 else 3), "launched by projections"
    rank.same_everywhere(rank.log.events, "launches and waits")


@distributed(2, slow=(4,))
@LATE_FIRST
def test_async_without_projections_is_the_ordinary_path(rank: Rank, late: bool) -> None:
    mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("cp",))
    for degree in degrees(rank):
        style = Recorded(AsyncContextParallel, rank, late, ulysses_degree=degree)
        assert_trains_the_bits(rank, style, mesh, CoreAttention, apply_to_each)
        assert all(applied.early == 0 and applied.calls == STEPS for applied in style.style.applied)


@distributed(2, 4)
@LATE_FIRST
def test_load_balance_alone(rank: Rank, late: bool) -> None:
    mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("cp",))
    for kind, script in ((ContextParallel, apply_to_each), (AsyncContextParallel, apply_async)):
        for like in (CoreAttention, CoreTuple):
            style = Recorded(kind, rank, late, ulysses_degree=1, load_balance=True)
            assert_trains_the_bits(rank, style, mesh, like, script)


class CalledByName(Block):
    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(value=v, query=q, key=k)


class CalledAtOtherPlaces(Block):
    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(None, q, k, v)


@distributed(2, slow=(4,))
def test_queries_keys_and_values_at_other_places(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("cp",))
    for kind, script in ((ContextParallel, apply_to_each), (AsyncContextParallel, apply_async)):
        for degree in degrees(rank):
            style = Recorded(kind, rank, True, ulysses_degree=degree, qkv_indices=(1, 2, 3))
            assert_trains_the_bits(
                rank,
                style,
                mesh,
                CoreAttention,
                script,
                core=CoreOtherPlaces,
                block=CalledAtOtherPlaces,
                dtypes=(torch.float32,),
            )
            names = ("query", "key", "value")
            style = Recorded(kind, rank, True, ulysses_degree=degree, qkv_kwarg_names=names)
            assert_trains_the_bits(
                rank,
                style,
                mesh,
                CoreAttention,
                script,
                block=CalledByName,
                dtypes=(torch.float32,),
            )


# --- meshes ---------------------------------------------------------------------------------------


@distributed(4)
@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ((2, 2), True),
        ((2, 2), False),
        ((4, 1), True),
        ((1, 4), False),
        pytest.param((4, 1), False, marks=pytest.mark.slow),
        pytest.param((1, 4), True, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_of_two_dimensions_is_all_its_ranks(
    rank: Rank, shape: tuple[int, int], named: bool
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("co", "ds") if named else None)
    for degree in (None, 4, 1, 2):
        if degree == 2 and shape != (2, 2):
            style = ContextParallel(ulysses_degree=degree)
            with pytest.raises(ValueError, match=r"expected a 1-D mesh, or \(co, ds\) of \(2, 2"):
                style.apply(CoreAttention(), mesh)
            continue
        style = Recorded(AsyncContextParallel, rank, True, ulysses_degree=degree)
        name = f"{shape}, degree {degree}"
        assert_trains_the_bits(
            rank, style, mesh, CoreAttention, apply_async, name=name, dtypes=(torch.float64,)
        )


@distributed(8)
def test_both_at_once_on_a_part_of_a_mesh(rank: Rank) -> None:
    whole = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))
    style = Recorded(AsyncContextParallel, rank, True, ulysses_degree=2)
    assert_trains_the_bits(rank, style, whole["cp"], CoreAttention, apply_async)
    if whole["dp"].get_local_rank() == 0:  # the others need not come
        style = Recorded(ContextParallel, rank, True, ulysses_degree=2)
        assert_trains_the_bits(rank, style, whole["cp"], CoreAttention, apply_to_each)
    dist.barrier()


@distributed(4)
def test_what_cannot_work_is_told_on_all_ranks_before_anything_is_sent(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (4,))
    q = torch.zeros(1, 4, 4, 8)

    def told(error: type[Exception], match: str, act: Callable[[], object]) -> None:
        with pytest.raises(error, match=match) as caught:
            act()
        rank.same_everywhere(str(caught.value), "what is told")

    def applied(*inputs: torch.Tensor, **options: Any) -> Callable[[], object]:
        core = CoreAttention()
        style = ContextParallel(comm=open_comms(rank, False), **options)
        return lambda: style.apply(core, mesh)(*inputs)

    told(ValueError, "3 on a mesh of 4 ranks: expected a divisor", applied(q, ulysses_degree=3))
    told(ValueError, "8 on a mesh of 4 ranks", applied(q, ulysses_degree=8))
    few = q[:, :, :2]
    told(ValueError, "found 2 query heads for 4 ranks", applied(few, few, few))
    three = q[:, :, :3]
    told(ValueError, "found 4 query heads and 3 key/value heads", applied(q, three, three))
    told(ValueError, "3 key heads and 2 value heads", applied(q, three, few, ulysses_degree=2))
    flat = q.flatten(2)
    told(ValueError, "expected 4 dimensions", applied(flat, flat, flat, ulysses_degree=2))
    told(ValueError, "expected 3 dimensions", applied(q, q, q, seq_dim=0, head_dim=1))
    told(
        TypeError,
        "found a list, expected a DeviceMesh",
        lambda: ContextParallel().apply(CoreAttention(), [0, 1, 2, 3]),
    )  # type: ignore[arg-type]
    backwards = DeviceMesh("cpu", torch.tensor([3, 2, 1, 0]))
    told(
        ValueError,
        r"found ranks in the order \[3, 2, 1, 0\]",
        lambda: ContextParallel().apply(CoreAttention(), backwards),
    )
    assert rank.log.events == []


# --- the order of events --------------------------------------------------------------------------


@distributed(2, 4)
def test_exchanges_are_under_way_as_there(rank: Rank) -> None:
    """Launched when a projection returns, waited for by attention, in the order q, k, v.

    Where both are done at once q, of which nothing more is to be sent, is waited for last.
    """
    mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("cp",))
    for degree in degrees(rank):
        rank.log.events.clear()
        model = make(CoreAttention, [CoreAttention()])
        style = AsyncContextParallel(ulysses_degree=degree, comm=open_comms(rank, True))
        apply_async(model, style, mesh)
        (block,) = model.children()
        for name in ("q", "k", "v"):
            linear = getattr(block, f"{name}_proj").linear
            linear.register_forward_pre_hook(lambda *_, name=name: rank.log(f"{name}_proj"))
            linear.weight.register_post_accumulate_grad_hook(
                lambda _, name=name: rank.log(f"{name}_proj backward")
            )
        x = batches(torch.float32)[0].chunk(rank.size, 1)[rank.rank]
        model(x.requires_grad_()).sum().backward()
        log = rank.log
        launch = "all_gather" if degree == 1 else "all_to_all"
        moved = ("k", "v") if degree == 1 else ("q", "k", "v")
        for name, then in (("q", "k_proj"), ("k", "v_proj")):
            if name in moved:
                assert log.before(f"{launch} {name}", then), "launched beside the next projection"
        both = degree == 2 and rank.size == 4
        for one, other in itertools.pairwise(("k", "v", "q") if both else moved):
            assert log.before(f"wait {launch} {one}", f"wait {launch} {other}")
        assert log.before(f"{launch} v", f"wait {launch} {moved[0]}"), "all before the first wait"
        if both:
            assert log.before("all_gather k", "wait all_to_all v"), "k is gathered while v travels"
        back = "reduce_scatter" if degree == 1 else "all_to_all"
        gradients = [f"{back} {name} gradient" for name in moved]
        first = min(log.index(f"wait {one}") for one in gradients)
        assert all(log.index(one) < first for one in gradients), "all gradients travel together"
        for name, one in zip(moved, gradients, strict=True):
            assert log.before(f"wait {one}", f"{name}_proj backward")
        launched = [event for event in log.events if event.startswith(("all_", "reduce_"))]
        assert all(log.events.count(f"wait {one}") == launched.count(one) for one in launched)
