"""ContextParallel: early launches, their fallback, and what goes wrong in other systems."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import memswap
from cut_attention import (
    FP64,
    LATE,
    LATE_FIRST,
    Attention,
    Core,
    assert_is_one_process,
    make,
    meshes,
    open_comms,
    random,
)
from memswap.parallel import ContextParallel, ShardContext, shard
from ranks import Rank, distributed


def apply(rank: Rank, late: bool = False, **options: Any) -> tuple[ContextParallel, Attention, Any]:
    """A style with early launches on a model, by heads over all ranks."""
    options = {"heads": 4, "ranges": "ranges", **options}
    style = ContextParallel(comm=open_comms(rank, late), **options)
    model = make()
    mesh = init_device_mesh("cpu", (rank.size,))
    return style, model, style.apply(model.core, mesh, q=model.q, k=model.k, v=model.v)


@distributed(2, 4)
@LATE
def test_exchanges_fly_beside_the_projections(rank: Rank, late: bool) -> None:
    for mesh, ulysses in meshes(rank).values():
        style = ContextParallel(
            ulysses=ulysses, heads=4, ranges="ranges", comm=open_comms(rank, late)
        )
        model = make()
        applied = style.apply(model.core, mesh, q=model.q, k=model.k, v=model.v)
        for name in "qkv":
            projection = getattr(model, name)
            projection.register_forward_pre_hook(lambda *_, name=name: rank.log(f"F{name}"))
            projection.linear.weight.register_hook(lambda _, name=name: rank.log(f"B{name}"))
        x = style.shard_batch({"x": random(2, 16, model.width)})["x"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = model(x.requires_grad_())
        log, launch = rank.log, "all_gather" if ulysses == 1 else "all_to_all"
        assert applied.early == (2 if ulysses == 1 else 3)
        if ulysses != 1:
            assert log.before("all_to_all q", "Fk")
        assert log.before(f"{launch} k", "Fv")
        assert log.before("Fv", f"wait {launch} k")
        if ulysses == 2 and rank.size == 4:  # the gather of k is not waited for, nor is v
            assert log.before("all_gather k", "wait all_to_all v")
            assert log.before("all_gather v", "wait all_gather k")
        log.events.clear()
        y.sum().backward()
        launch = "reduce_scatter" if ulysses == 1 else "all_to_all"
        # The gradients of k and q are on their way while V's weights get theirs.
        assert log.before(f"{launch} k gradient", f"wait {launch} v gradient")
        assert log.before("Bv", f"wait {launch} k gradient")
        if ulysses != 1:
            assert log.before("all_to_all q gradient", "Bv")
            assert log.before("Bk", "wait all_to_all q gradient")
        rank.same_everywhere(log.events, "launches and waits")
        log.events.clear()


@distributed(2)
@LATE
@pytest.mark.parametrize("edit", [False, True], ids=["rotated", "edited-in-place"])
def test_an_operation_between_projection_and_attention_is_not_bypassed(
    rank: Rank, late: bool, edit: bool
) -> None:
    style, model, applied = apply(rank, late)
    model.between = (lambda q: q.mul_(2.0)) if edit else (lambda q: q.roll(1, -1) * 2.0)
    x = random(2, 8, model.width)
    with pytest.warns(UserWarning, match="another q than its projection returned"):
        assert_is_one_process(style, model, x)
    assert applied.early == 2
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        model(style.shard_batch({"x": x})["x"])
    applied.remove()
    rank.log.assert_all_waited()  # those that nobody wanted as well: their buffers were in use


@distributed(2)
def test_a_projection_of_other_dimensions_takes_the_ordinary_path(rank: Rank) -> None:
    style = ContextParallel(heads=4, ranges="ranges")
    model = make()
    mesh = init_device_mesh("cpu", (2,))
    applied = style.apply(model.core, mesh, q=model.q.linear)
    with pytest.warns(UserWarning, match="not 4 dimensions"):
        assert_is_one_process(style, model, random(2, 8, model.width))
    assert applied.early == 0


@distributed(2)
@LATE
def test_the_gradient_of_a_second_consumer_of_a_projection_is_not_lost(
    rank: Rank, late: bool
) -> None:
    style, model, applied = apply(rank, late)
    reference = make()

    def loss(model: Attention, x: torch.Tensor) -> torch.Tensor:
        q, k, v = model.q(x), model.k(x), model.v(x)
        z = sum(t.square().sum() for t in (q, k, v))  # a z-loss on what attention gets, too
        return model.out(model.core(q, k, v).flatten(2)).square().sum() + z

    x = random(2, 8, model.width)
    loss(reference, x).backward()
    loss(model, style.shard_batch({"x": x})["x"]).backward()
    assert applied.early == 3
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)


@distributed(2)
@LATE
def test_a_projection_can_be_used_without_attention(rank: Rank, late: bool) -> None:
    _, model, applied = apply(rank, late)
    x = random(2, 4, model.width)
    model.q(x).sum().backward()
    assert torch.equal(model.q.linear.weight.grad, x.sum((0, 1)).expand(16, 16))
    assert not applied._early, "the launch outlived its tensor"
    model.q(x)
    assert rank.log.count("wait all_to_all q") == 1, "its buffers were freed while in use"
    with torch.no_grad():
        model.k(x)
        y = model(x)
    assert applied.early == 3
    assert torch.equal(model(x).detach(), y)


@distributed(2)
def test_the_number_of_heads_is_found_when_the_queries_come(rank: Rank) -> None:
    """Keys that are projected before them launch early from the second forward on."""
    style, model, applied = apply(rank, True, heads=None)
    x = random(2, 4, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for early in (2, 5):
            k, q, v = model.k(x), model.q(x), model.v(x)
            y = model.core(q, k, v)
            assert applied.early == early
            assert style.mesh.columns == 2 and torch.isfinite(y).all()


@distributed(2)
@LATE
def test_projections_of_two_microbatches_do_not_meet_in_one_slot(rank: Rank, late: bool) -> None:
    style, model, applied = apply(rank, late)
    inputs = [style.shard_batch({"x": random(2, 8, model.width, seed)})["x"] for seed in (1,)]
    inputs.append(inputs[0] + 1)
    expected = [model(x).detach() for x in inputs]
    projected = [(model.q(x), model.k(x), model.v(x)) for x in inputs]
    outputs = [model.core(*one) for one in projected]
    for theirs, y in zip(expected, outputs, strict=True):
        assert torch.equal(model.out(y.flatten(2)), theirs)
    assert applied.early == 12
    outputs[0].sum().backward()
    outputs[1].sum().backward()


@distributed(2)
def test_a_style_that_never_ran_is_an_error_at_the_end_of_the_first_step(rank: Rank) -> None:
    """Accepted, and silently a no-op: each rank's tokens attend to themselves only."""
    style, model, _ = apply(rank)
    other = Core()
    style.apply(other, init_device_mesh("cpu", (2,)))
    batch = style.shard_batch({"x": random(2, 8, model.width)})
    y = model(batch["x"])
    for end in (
        style.check,
        lambda: style.mean_loss(y.sum(), 8),
        lambda: style.shard_batch({"x": random(2, 8, model.width)}),
    ):
        with pytest.raises(RuntimeError, match=r"applied to Core \(1 of 2 never ran\)"):
            end()
    style.applied[1].remove()
    style.check()
    with pytest.raises(RuntimeError, match="no module at all"):
        ContextParallel().check()


@distributed(2)
def test_a_mask_that_would_mean_something_else_is_refused(rank: Rank) -> None:
    q = torch.zeros(1, 4, 2, 4, dtype=FP64)
    for told in ({"ranges": "ranges"}, {"mask": "attn_mask"}):
        core = Core()
        ContextParallel(ulysses=1, **told).apply(core, init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="is_causal=True means another mask"):
            core(q, q, q, is_causal=True)
    core = Core()  # takes is_causal, and goes by the place of a query in its tensor all the same
    ContextParallel(ulysses=1).apply(core, init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="another result than they have among all"):
        core(q, q, q, is_causal=True)
    core = Core()
    ContextParallel(mask="attn_mask").apply(core, init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="'attn_mask', which the style is to fill"):
        core(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool))


@distributed(2)
def test_bad_input_is_told_before_anything_is_sent(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2,))
    q = torch.zeros(1, 4, 2, 4, dtype=FP64)

    def core(**options: Any) -> Any:
        core = Core(causal=False)
        ContextParallel(comm=open_comms(rank, False), **options).apply(core, mesh)
        return core

    with pytest.raises(ValueError, match="found 1 query heads for 2 ranks"):
        core()(q[:, :, :1], q[:, :, :1], q[:, :, :1])
    with pytest.raises(ValueError, match="found 3 query heads and 2 key/value heads"):
        core()(q[:, :, :1].expand(1, 4, 3, 4), q, q)
    with pytest.raises(ValueError, match="found 2 key heads and 1 value heads"):
        core()(q, q, q[:, :, :1])
    with pytest.raises(ValueError, match="found 2 query heads, expected 4"):
        core(heads=4)(q, q, q)
    with pytest.raises(ValueError, match="found 4 tokens, expected this rank's 5 of 10"):
        core(sequence_length=10)(q, q, q)
    with pytest.raises(ValueError, match="expected 4 dimensions"):
        core()(q[0], q, q)
    with pytest.raises(TypeError, match="k is a int"):
        core()(q, 3, q)
    with pytest.raises(ValueError, match="cannot say how balance"):
        core(use_local_output=False, balance="headtail")
    with pytest.raises(ValueError, match="k is a DTensor with"):
        core()(q, DTensor.from_local(q, mesh, [Replicate()]), q)
    with pytest.raises(TypeError, match="without argument 2"):
        core()(q, q)
    with pytest.raises(ValueError, match="expected one of"):
        ContextParallel(layout="bsh")
    with pytest.raises(ValueError, match="expected None or a divisor of 2"):
        ContextParallel(ulysses=3).apply(Core(), mesh)
    assert rank.log.events == []


@distributed(2, 4)
@LATE_FIRST
@pytest.mark.parametrize("gradients", ["sum", "avg"])
def test_mean_loss_weighs_tokens_not_ranks(rank: Rank, late: bool, gradients: str) -> None:
    for mesh, ulysses in meshes(rank).values():
        style = ContextParallel(
            ulysses=ulysses, balance="headtail", ranges="ranges", comm=open_comms(rank, late)
        )
        model, reference = make(), make()
        style.apply(model.core, mesh)
        x = random(2, 16, model.width)
        labels = torch.arange(32).view(2, 16) % model.width
        labels[:, 1:7] = -100  # ranks count differently many
        shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
        expected = F.cross_entropy(reference(x).flatten(0, 1), shifted.flatten())
        expected.backward()
        batch = style.shard_batch({"x": x, "labels": labels, "name": "one"}, labels="labels")
        assert batch["name"] == "one"
        mine = batch["labels"].flatten()
        total = F.cross_entropy(model(batch["x"]).flatten(0, 1), mine, reduction="sum")
        loss = style.mean_loss(total, (mine != -100).sum(), gradients=gradients)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        rank.same_everywhere(loss.item(), "loss")
        loss.backward()
        for weight, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            if gradients == "avg":
                weight.grad /= rank.size
            torch.testing.assert_close(weight.grad, theirs.grad, rtol=1e-11, atol=1e-13)


@distributed(2)
def test_shard_batch_says_what_does_not_fit(rank: Rank) -> None:
    style, model, _ = apply(rank)
    with pytest.raises(ValueError, match="has to be said"):
        style.shard_batch({"x": torch.zeros(1, 7)})
    model(random(2, 4, model.width))
    with pytest.raises(ValueError, match="tensors of one length"):
        style.shard_batch({"x": torch.zeros(1, 8), "y": torch.zeros(1, 6)})
    with pytest.raises(ValueError, match="tensors of one length"):
        style.shard_batch({"x": 3})
    with pytest.raises(ValueError, match="found 'positions'"):
        style.shard_batch({"positions": torch.zeros(1, 8)})
    with pytest.raises(ValueError, match="labels='y'"):
        style.shard_batch({"x": torch.zeros(1, 8)}, labels="y")


@distributed(2, 4)
def test_dtensors_of_the_sequence_go_in_and_out(rank: Rank) -> None:
    for mesh, ulysses in meshes(rank).values():
        style = ContextParallel(
            ulysses=ulysses, ranges="ranges", use_local_output=False, comm=open_comms(rank, True)
        )
        core, reference = Core(), Core()
        style.apply(core, mesh)
        whole = [random(2, 8, 16, i).unflatten(-1, (4, 4)).requires_grad_() for i in range(3)]
        cut = [Shard(1)] * mesh.ndim
        mine = [distribute_tensor(t.detach(), mesh, cut).requires_grad_() for t in whole]
        expected, got = reference(*whole), core(*mine)
        assert isinstance(got, DTensor) and got.placements == tuple(cut)
        torch.testing.assert_close(got.full_tensor(), expected, rtol=0, atol=1e-12)
        expected.square().sum().backward()
        got.to_local().square().sum().backward()
        for own, theirs in zip(mine, whole, strict=True):
            assert isinstance(own.grad, DTensor)
            torch.testing.assert_close(own.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)


@distributed(2)
@pytest.mark.parametrize("ulysses", [None, 1], ids=["ulysses", "gather"])
def test_shard_manage_checkpoint_and_context_compose(rank: Rank, ulysses: int | None) -> None:
    """Sharded weights, swapped activations, a checkpointed layer, a cut sequence: one process."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = nn.ModuleList(Attention() for _ in range(3))
            self.checkpointed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                if self.checkpointed and i == 1:
                    x = x + memswap.checkpoint(layer, x)
                else:
                    x = x + layer(x)
            return x

    mesh = init_device_mesh("cpu", (2,))
    reference, net = Net(), Net()
    context = ShardContext(
        slots=2, open_comm=lambda group: rank.open_comm(group, late=True), debug=True
    )
    style = ContextParallel(ulysses=ulysses, heads=4, ranges="ranges", comm=open_comms(rank, True))
    for layer in net.layers:
        named = {"q": layer.q, "k": layer.k, "v": layer.v, "o": layer.out}
        style.apply(layer.core, mesh, **named)  # type: ignore[arg-type]
        shard(layer, mesh, context=context, anchor="out")
    net.checkpointed = True
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (reference, net)]
    with tempfile.TemporaryDirectory() as folder:
        manager = memswap.manage(
            net.layers,
            memswap.Policy(action=memswap.Action.SWAP, min_bytes=1),
            pool=memswap.DiskPool(folder),
        )
        for step in range(2):
            x = random(2, 8, 16, seed=step)
            batch = style.shard_batch({"x": x})
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = reference(x).square().mean()
            y = net(batch["x"])
            loss = style.mean_loss(y.square().sum(), y.numel(), gradients="avg")
            expected.backward()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert manager.stats().moved_storages > 0
        manager.remove()
    if ulysses is None:  # the next layer's weights travel after this one's attention
        log = rank.log
        assert log.index("all_to_all o") < log.index("all_gather Attention.1")
        assert log.index("all_gather Attention.1") < log.index("all_to_all q", 1)
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        whole = mine.full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(whole, theirs.detach(), rtol=0, atol=1e-9, msg=name)
    rank.same_everywhere(rank.log.events, "launches and waits")


@distributed(2, 4)
def test_a_mesh_is_regrouped_as_ulysses_says(rank: Rank) -> None:
    size = rank.size
    shapes: list[tuple[int, ...]] = [(size,), (1, size), (size, 1)]
    shapes += [(2, 2)] if size == 4 else []
    whole = random(2, 16, 16)
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
        for ulysses in (1, 2, size):
            if ulysses not in (1, size) and len(shape) == 2 and shape[1] != ulysses:
                with pytest.raises(ValueError, match="1 and the number of all ranks take any"):
                    ContextParallel(ulysses=ulysses).apply(Core(), mesh)
                continue
            style = ContextParallel(ulysses=ulysses, ranges="ranges", comm=open_comms(rank, True))
            model = make()
            style.apply(model.core, mesh)
            assert (style.mesh.rows, style.mesh.columns) == (size // ulysses, ulysses)
            assert_is_one_process(style, model, whole)
    for mesh in (torch.arange(size).flip(0), torch.arange(size).view(1, -1).flip(1)):
        with pytest.raises(ValueError, match=r"in the order \[.*expected ascending"):
            ContextParallel().apply(Core(), DeviceMesh("cpu", mesh))
    with pytest.raises(TypeError, match="found a int, expected a DeviceMesh"):
        ContextParallel().apply(Core(), 2)  # type: ignore[arg-type]


@distributed(2)
def test_outputs_that_cannot_go_back_are_told_before_one_is_sent(rank: Rank) -> None:
    class Returns(nn.Module):
        what: Any = None

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return self.what(q)

    core = Returns()
    ContextParallel(comm=open_comms(rank, False)).apply(core, init_device_mesh("cpu", (2,)))
    q = random(1, 4, 16).unflatten(-1, (4, 4))
    for what, match in (
        (lambda q: (q, q[:, 1:]), r"shape \[1, 7, 2, 4\] \(tensor 1 of 2\)"),
        (lambda q: {"y": q, "scores": q.transpose(1, 2)}, r"\[1, 2, 8, 4\] \(tensor 1 of 2\)"),
        (lambda q: (q, q.sum(-1)), r"\[1, 8, 2\] \(tensor 1 of 2\)"),
    ):
        core.what = what
        with pytest.raises(ValueError, match=match):
            core(q, q, q)
    for nothing in (None, (), (None, 3)):
        core.what = lambda q, nothing=nothing: nothing
        with pytest.raises(TypeError, match="expected a tensor, or tensors"):
            core(q, q, q)
    assert rank.log.count("all_to_all o") == 0
    core.what = lambda q: {"y": q, "twice": [2 * q], "none": None}
    found = core(q, q, q)
    assert torch.equal(found["y"], q) and torch.equal(found["twice"][0], 2 * q)
    assert found["none"] is None and rank.log.count("all_to_all o 1") == 1


@distributed(2)
def test_a_warning_names_the_line_that_called_the_model(rank: Rank) -> None:
    model = make()
    model.between = lambda q: 2 * q
    ContextParallel().apply(model.core, init_device_mesh("cpu", (2,)), q=model.q)
    with pytest.warns(UserWarning, match="another q than its projection") as caught:
        model(random(1, 4, 16))
    (one,) = caught
    assert one.filename == inspect.getsourcefile(Attention), "where attention is called"
