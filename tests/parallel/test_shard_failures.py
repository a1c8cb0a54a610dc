"""What goes wrong in use, and what went wrong in other systems: errors that say so, no damage."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import unittest
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from memswap.errors import InplaceEditError, SlotError
from memswap.parallel import ShardContext, shard
from memswap.parallel.slots import SlotPool
from ranks import Rank, distributed
from sharding import adamw, assert_same, loss_of, make_net, sharded, tokens_of, train

LATE = pytest.mark.parametrize("late", [False, True], ids=["async", "late"])


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ArithmeticError("on purpose")


@distributed(2)
@LATE
@pytest.mark.parametrize("where", ["forward", "backward", "prefetched"])
def test_the_step_after_an_exception_is_right(rank: Rank, late: bool, where: str) -> None:
    start = make_net()
    reference, _ = sharded(rank, start)
    net, context = sharded(rank, start, late=late, context={"slots": 2})

    def fail(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if where == "backward":
            return Fails.apply(output)
        raise ArithmeticError("on purpose")

    broken = net.layers[1].wo if where == "forward" else net.layers[1].norm
    handle = broken.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(net, tokens_of(9, 2)[rank.rank]).backward()
    handle.remove()
    shown = [hasattr(value, "full_tensor") for value in net.parameters()]
    assert all(shown), "the failed step left gathered parameters behind"
    net.zero_grad()
    train(net, rank, steps=2)
    train(reference, rank, steps=2)
    assert_same(net, reference, rank, bitwise=True)
    assert context.stats().lent == 0


class Again(nn.Module):
    """Calls itself first, and goes on where that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        if again:
            with contextlib.suppress(ArithmeticError):
                self(x, again=False)
        return self.linear(x)


@distributed(2)
def test_a_call_that_another_hook_cuts_off_ends_no_other_call(rank: Rank) -> None:
    """The hook of memswap behind that call ran, and hid the weights of the call around it."""
    torch.manual_seed(0)
    module = Again()
    weight = module.linear.weight.detach().clone()
    context = ShardContext(open_comm=rank.open_comm, debug=True)
    shard(module, rank.mesh, context=context)
    calls = []

    def refuses(*_: Any) -> None:
        calls.append(1)
        if len(calls) % 2 == 0:
            raise ArithmeticError("on purpose")

    module.register_forward_pre_hook(refuses, prepend=True)  # before memswap's
    x = torch.ones(3, 8, dtype=torch.float64)
    for _ in range(2):
        found = module(x)
        assert torch.equal(found, nn.functional.linear(x, weight, module.linear.bias.full_tensor()))
    assert len(calls) == 4
    assert context.stats().lent == 0


@distributed(2)
@LATE
def test_forwards_without_a_backward_leave_nothing_behind(rank: Rank, late: bool) -> None:
    start = make_net()
    reference, _ = sharded(rank, start)
    net, context = sharded(rank, start, late=late, context={"slots": 2})
    tokens = tokens_of(0, 2)[rank.rank]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            loss_of(net, tokens)
    train(net, rank, steps=2)
    train(reference, rank, steps=2)
    assert_same(net, reference, rank, bitwise=True)
    assert context.stats().lent == 0
    assert context.stats().overflows == 0


@distributed(2)
def test_inference_first_does_not_spoil_training(rank: Rank) -> None:
    start = make_net()
    reference, _ = sharded(rank, start)
    net, _ = sharded(rank, start, context={"slots": 2})
    with torch.inference_mode():
        loss_of(net, tokens_of(0, 2)[rank.rank])
    train(net, rank, steps=1)
    train(reference, rank, steps=1)
    assert_same(net, reference, rank, bitwise=True)


@distributed(2)
def test_weights_changed_between_forward_and_backward_raise(rank: Rank) -> None:
    net, _ = sharded(rank, make_net())
    optimizer = adamw(net)
    loss_of(net, tokens_of(0, 2)[rank.rank]).backward()
    late = loss_of(net, tokens_of(1, 2)[rank.rank])
    optimizer.step()
    with pytest.raises(InplaceEditError, match=r"changed .* between its forward and its backward"):
        late.backward()


@distributed(2)
def test_weights_used_outside_of_their_unit_raise_and_say_what_to_do(rank: Rank) -> None:
    net, _ = sharded(rank, make_net(layers=1), context={"slots": 1})
    kept = []
    net.layers[0].wo.register_forward_pre_hook(lambda module, args: kept.append(module.weight))
    net(tokens_of(0, 2)[0])
    with pytest.raises(RuntimeError, match=r"unit 'layers.0' are sharded now .*call unshard\(\)"):
        kept[0] + 1


@distributed(2)
def test_an_output_that_hides_its_tensors_raises_in_backward(rank: Rank) -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Hides(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Box(super().forward(x))

    layer = Hides(2, 2)
    shard(layer, rank.mesh)
    out = layer(torch.ones(1, 2, requires_grad=True)).value
    with pytest.raises(RuntimeError, match="the unit's output has to be a tensor"):
        out.sum().backward()


@distributed(2)
@LATE
def test_a_unit_called_from_another_one_gets_memory_when_slots_are_out(
    rank: Rank, late: bool
) -> None:
    class Calls(nn.Linear):
        def __init__(self, other: nn.Module | None) -> None:
            super().__init__(3, 3)
            self.other = [other]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = x if self.other[0] is None else self.other[0](x)
            return super().forward(inner)

    torch.manual_seed(1)
    first = Calls(None)
    second = Calls(first)
    plain = Calls(copy.deepcopy(first))
    plain.load_state_dict(second.state_dict())
    context = ShardContext(
        slots=1, debug=True, open_comm=lambda group: rank.open_comm(group, late=late)
    )
    for one in (first, second):
        shard(one, rank.mesh, context=context)
    x = torch.ones(1, 3)
    second(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(second.weight.grad.full_tensor(), plain.weight.grad)
    assert torch.equal(first.weight.grad.full_tensor(), plain.other[0].weight.grad)
    assert context.stats().overflows > 0
    assert context.stats().lent == 0


@distributed(2)
def test_a_model_that_is_dropped_frees_its_weights(rank: Rank) -> None:
    net, context = sharded(rank, make_net(), context={"slots": 2})
    train(net, rank, steps=1)
    gone = weakref.ref(net)
    shard_gone = weakref.ref(net.layers[0].wo.weight)
    del net, context
    gc.collect()
    assert gone() is None and shard_gone() is None


@distributed(2)
@LATE
def test_outputs_that_the_loss_does_not_use(rank: Rank, late: bool) -> None:
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
    plain = copy.deepcopy(layers)
    context = ShardContext(
        slots=2, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )
    for layer in layers:
        shard(layer, rank.mesh, context=context)
    x = torch.ones(1, 3, dtype=torch.float64)
    for _ in range(2):
        for model in (layers, plain):
            model[1](model[0](x))
            model[2](model[0](x)).sum().backward()
    assert layers[1].weight.grad is None
    for i in (0, 2):
        assert torch.equal(layers[i].weight.grad.full_tensor(), plain[i].weight.grad)
    assert context.stats().lent == 0


@distributed(2)
@LATE
def test_a_graph_that_is_kept_goes_backward_twice(rank: Rank, late: bool) -> None:
    start = make_net(layers=2)
    net, context = sharded(rank, start, late=late, context={"slots": 2})
    reference, _ = sharded(rank, start)
    for model in (net, reference):
        loss = loss_of(model, tokens_of(0, 2)[rank.rank])
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.full_tensor())
    loss_of(start, tokens_of(0, 2)[rank.rank]).backward()
    total = start.layers[0].wo.weight.grad * 2
    dist.all_reduce(total)
    torch.testing.assert_close(net.layers[0].wo.weight.grad.full_tensor(), total / 2)
    assert context.stats().lent == 0


@distributed(2)
@LATE
def test_gradients_of_inputs_alone_leave_parameters_without(rank: Rank, late: bool) -> None:
    layer = nn.Linear(3, 3)
    plain = copy.deepcopy(layer)
    context = ShardContext(
        slots=1, open_comm=lambda group: rank.open_comm(group, late=late), debug=True
    )
    shard(layer, rank.mesh, context=context)
    x = torch.ones(2, 3, requires_grad=True)
    with unittest.TestCase().assertLogs("memswap.parallel.schedule") as told:
        for _ in range(2):
            (mine,) = torch.autograd.grad(layer(x).pow(2).sum(), x)
    assert ["for inputs alone passed unit 'Linear.0'" in text for text in told.output] == [True]
    (theirs,) = torch.autograd.grad(plain(x).pow(2).sum(), x)
    assert torch.equal(mine, theirs)
    assert layer.weight.grad is None
    assert context.stats().lent == 0


@distributed(2)
def test_double_backward_raises_and_is_not_wrong(rank: Rank) -> None:
    layer = shard(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), rank.mesh)
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="are sharded now and were used outside"):
        gradient.pow(2).sum().backward()


# --- asked for what cannot be -------------------------------------------------------------------


@distributed(2)
def test_bad_requests_say_what_was_found_and_what_to_do(rank: Rank) -> None:
    mesh = rank.mesh
    with pytest.raises(ValueError, match=r"anchor 'wq' is no submodule; there are .*wo"):
        shard(make_net().layers[0], mesh, anchor="wq")
    with pytest.raises(ValueError, match="sharded already"):
        layer = shard(nn.Linear(2, 2), mesh)
        shard(layer, mesh)
    with pytest.raises(ValueError, match="ModuleList, which has no forward"):
        shard(make_net().layers, mesh)
    with pytest.raises(ValueError, match="no parameter"):
        shard(nn.ReLU(), mesh)
    with pytest.raises(TypeError, match=r"found str, expected an nn\.Module"):
        shard(["layer"], mesh)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="fully_shard has sharded"):
        shard(fully_shard(nn.Linear(2, 2), mesh=mesh), mesh)
    with pytest.raises(ValueError, match="residency='always'"):
        shard(nn.Linear(2, 2), mesh, residency="always")  # type: ignore[arg-type]
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="'scale' is a scalar; make it 1-D"):
        shard(scalar, mesh)
    with pytest.raises(
        ValueError, match=r"returned Shard\(dim=2\) for a parameter of shape \(2, 2\)"
    ):
        shard(nn.Linear(2, 2), mesh, shard_placement_fn=lambda parameter: Shard(2))
    with pytest.raises(ValueError, match="max_reduces=0"):
        ShardContext(max_reduces=0)
    with pytest.raises(ValueError, match="slots=0"):
        ShardContext(slots=0)
    assert all(type(value) is nn.Parameter for value in scalar.parameters()), "half sharded"


@distributed(4)
def test_a_mesh_of_three_dimensions_is_refused_with_the_way_out(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))
    with pytest.raises(NotImplementedError, match=r"mesh of 3 dimensions .*pass mesh\['name'\]"):
        shard(nn.Linear(2, 2), mesh)


@distributed(2)
def test_a_policy_that_differs_by_parameter_is_refused(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    object.__setattr__(policy, "param_dtype_override_fn", lambda parameter: None)  # torch 2.15's
    net = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"param_dtype_override_fn.*in another call"):
        shard(net, rank.mesh, mp_policy=policy)
    assert all(type(value) is nn.Parameter for value in net.parameters()), "half sharded"


@distributed(2)
@pytest.mark.parametrize("wanted", [torch.float32, None], ids=str)
def test_a_parameter_that_wants_gradients_of_another_dtype_is_refused(
    rank: Rank, wanted: torch.dtype | None
) -> None:
    net = nn.Linear(2, 2, dtype=torch.bfloat16)
    net.bias.grad_dtype = wanted
    with pytest.raises(NotImplementedError, match=r"'bias' wants gradients in .* \(grad_dtype\)"):
        shard(net, rank.mesh)
    assert all(type(value) is nn.Parameter for value in net.parameters()), "half sharded"


@distributed(2)
def test_a_sharded_module_cannot_be_copied(rank: Rank) -> None:
    net, _ = sharded(rank, make_net(layers=1))
    with pytest.raises(NotImplementedError, match="copy the model before"):
        copy.deepcopy(net)


# --- slots --------------------------------------------------------------------------------------


def test_a_loan_that_has_ended_is_noticed() -> None:
    pool = SlotPool(1)
    first = pool.take("a", 64, torch.device("cpu"))
    assert first is not None and pool.take("b", 64, torch.device("cpu")) is None
    pool.release(first)
    second = pool.take("b", 64, torch.device("cpu"))
    assert second is not None
    with pytest.raises(SlotError, match=r"unit 'a' uses its slot under loan 1, .* belongs to 'b'"):
        first.check()
    with pytest.raises(SlotError):
        pool.release(first)
    second.check()


def test_a_write_to_a_free_slot_is_noticed() -> None:
    pool = SlotPool(1, debug=True)
    lease = pool.take("a", 64, torch.device("cpu"))
    assert lease is not None
    pool.release(lease)
    assert lease.memory.view(torch.float32).isnan().all(), "dropped weights must be poison"
    lease.memory[5] = 1
    with pytest.raises(SlotError, match="wrote to it after loan 1 was returned"):
        pool.take("b", 64, torch.device("cpu"))


# --- what went wrong elsewhere ------------------------------------------------------------------


@distributed(2)
@LATE
def test_layers_of_different_sizes_share_slots_without_corruption(rank: Rank, late: bool) -> None:
    # A pool whose buffers had the shapes of the first block gave the others wrong ones.
    torch.manual_seed(2)
    widths = [3, 17, 2, 9, 4]
    start = nn.Sequential(
        *(nn.Linear(a, b, bias=b != 2) for a, b in zip(widths, [*widths[1:], 5], strict=True))
    )
    net = copy.deepcopy(start)
    context = ShardContext(
        slots=2, debug=True, open_comm=lambda group: rank.open_comm(group, late=late)
    )
    for layer in net:
        shard(layer, rank.mesh, context=context)
    x = torch.randn(4, 3)
    for _ in range(2):
        net(x).pow(2).sum().backward()
        start(x).pow(2).sum().backward()
    for mine, theirs in zip(net.parameters(), start.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)


@distributed(2)
def test_a_tied_weight_in_two_calls_is_an_error_not_two_weights(rank: Rank) -> None:
    # Two handlers under one key lost one of the two gradients.
    net = make_net(tied=True)
    shard(net.embed, rank.mesh)
    with pytest.raises(ValueError, match=r"'weight' is tied .*shard\(\[embedding, head\]"):
        shard(net.head, rank.mesh)


@distributed(2)
def test_a_model_with_any_names_for_its_layers_is_prefetched(rank: Rank) -> None:
    # Prefetching hung on submodules called wo or out_proj; without them it silently did nothing.
    net = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("tick", "trick", "track")})
    context = ShardContext(open_comm=rank.open_comm)
    for layer in net.values():
        shard(layer, rank.mesh, context=context)
        layer.register_forward_hook(lambda *_: rank.log("compute"))
    x = torch.ones(1, 2)
    for layer in net.values():
        x = layer(x)
    gathers = [i for i, one in enumerate(rank.log.events) if one.startswith("all_gather")]
    computes = [i for i, one in enumerate(rank.log.events) if one == "compute"]
    assert gathers[1] < computes[0] and gathers[2] < computes[1]


@distributed(2)
@LATE
def test_evaluation_between_steps_needs_no_switch(rank: Rank, late: bool) -> None:
    # A flag for forward or backward, flipped by a scheduler, was stale after an evaluation.
    start = make_net()
    reference, _ = sharded(rank, start)
    net, _ = sharded(rank, start, late=late)
    for one in (net, reference):
        optimizer = adamw(one)
        for step in range(3):
            if one is net:
                one.eval()
                with torch.no_grad():
                    loss_of(one, tokens_of(20 + step, 2)[rank.rank])
                one.train()
            rank.log.events.clear()
            loss_of(one, tokens_of(step, 2)[rank.rank]).backward()
            if one is net:
                assert rank.log.count("all_gather layers.") == 6
            optimizer.step()
            optimizer.zero_grad()
    assert_same(net, reference, rank, bitwise=True)


@distributed(2)
def test_two_models_share_nothing(rank: Rank) -> None:
    start = make_net(layers=2)
    alone, _ = sharded(rank, start)
    first, _ = sharded(rank, start)
    second, _ = sharded(rank, make_net(layers=2))
    train(alone, rank, steps=1)
    optimizers = adamw(first), adamw(second)
    losses = [loss_of(one, tokens_of(0, 2)[rank.rank]) for one in (first, second)]
    for loss in losses:
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same(first, alone, rank, bitwise=True)


def test_state_names_are_words() -> None:
    assert pickle.loads(pickle.dumps(SlotError("x"))).args == ("x",)


@distributed(2)
@LATE
def test_a_backward_that_raised_is_tried_again(rank: Rank, late: bool) -> None:
    start, tokens = make_net(), tokens_of(9, 2)[rank.rank]
    reference, _ = sharded(rank, start)
    loss_of(reference, tokens).backward()
    net, _ = sharded(rank, start, late=late)
    failures = ["on purpose"]

    def fail(gradient: torch.Tensor) -> None:
        if failures:
            raise ArithmeticError(failures.pop())

    handle = net.layers[1].norm.register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and None
    )
    loss = loss_of(net, tokens)
    handle.remove()
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    loss.backward()
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
