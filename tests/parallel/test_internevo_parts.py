"""ISPCommunicator with linears that hold rows of their weights: unusual training, bad input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import memswap
from comms import EventLog, LateComm, Recording
from memswap.compat.internevo import (
    HeadWeightParallelCommunicator,
    ISPCommModelConfig,
    ISPCommunicator,
    ISPCommunicatorWrapper,
    WPCommunicator,
)
from memswap.errors import RankMismatchError
from memswap.parallel import ShardContext, shard
from memswap.parallel.comm import ProcessGroupComm
from ranks import Rank, distributed


def config() -> ISPCommModelConfig:
    return ISPCommModelConfig(torch.float64, torch.device("cpu"))


class Hooked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, module: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.module, communicator = module, module.communicator
        whole = communicator.weight_hook(weight, module=module)
        if bias is not None:
            bias = communicator.weight_hook(bias, module=module, is_bias=True)
        return F.linear(x, whole, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x, weight, bias), module = ctx.saved_tensors, ctx.module
        communicator = module.communicator
        whole = communicator.weight_hook(weight, module=module)
        rows = gradient.flatten(0, -2)
        of_weight, handle = communicator.grad_hook(
            rows.t() @ x.flatten(0, -2), async_op=True, module=module
        )
        of_bias, bias_handle = None, None
        if bias is not None:
            of_bias, bias_handle = communicator.grad_hook(
                rows.sum(0), async_op=True, module=module, is_bias=True
            )
        of_x = gradient @ whole
        for one in (handle, bias_handle):
            if one is not None:
                one.wait()
        return of_x, of_weight, of_bias, None


class PartLinear(nn.Module):
    """Rows of a weight and of a bias; the communicator comes later."""

    def __init__(self, whole: nn.Linear, rank: Rank) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(rank.size)[rank.rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(rank.size)[rank.rank].clone())
        self.communicator: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = Hooked.apply(x, self.weight, self.bias, self)
        return output


class Block(nn.Module):
    def __init__(self, make: Callable[[nn.Linear], nn.Module], seed: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.w1 = make(nn.Linear(width, 8).double())
        self.wo = make(nn.Linear(8, width).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(self.w1(x).tanh())


class Net(nn.Module):
    def __init__(self, make: Callable[[nn.Linear], nn.Module], repeats: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(make, seed) for seed in range(3))
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(self.repeats):
                x = x + layer(x)
        return x


def nets(
    rank: Rank, with_model: bool, late: bool = True, repeats: int = 1
) -> tuple[Net, Net, ISPCommunicator]:
    """With parts and a communicator, and with whole weights in plain torch."""
    net = Net(lambda whole: PartLinear(whole, rank), repeats)
    context = ShardContext(open_comm=lambda group: rank.open_comm(group, late=late))
    isp = ISPCommunicator(net if with_model else None, config(), True, context=context)
    for module in net.modules():
        if isinstance(module, PartLinear):
            module.communicator = isp
    return net, Net(lambda whole: whole, repeats), isp


def batch(rank: Rank, step: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(11 + step)
    return torch.randn(rank.size, 5, 4, generator=made, dtype=torch.float64)[rank.rank]


def reduced(gradient: torch.Tensor, rank: Rank) -> torch.Tensor:
    rows = gradient.new_empty(gradient.shape[0] // rank.size, *gradient.shape[1:])
    dist.reduce_scatter_tensor(rows, gradient.contiguous(), op=dist.ReduceOp.AVG)
    return rows


def assert_gradients(net: Net, plain: Net, rank: Rank) -> None:
    for (name, part), whole in zip(net.named_parameters(), plain.parameters(), strict=True):
        mine = reduced(whole.grad, rank)
        assert torch.equal(part.grad.view(torch.int64), mine.view(torch.int64)), name


MODES = pytest.mark.parametrize("with_model", [True, False], ids=["model", "None"])


@distributed(2)
@MODES
def test_gradients_that_nobody_collected_are_not_trained_with(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):  # two backwards, summed
        net(batch(rank, step)).square().sum().backward()
    if with_model:
        before = [one.detach().clone() for one in net.parameters()]
        with pytest.raises(RuntimeError, match=r"12 parameters whose gradients wait.*'0.0.w1.w"):
            optimizer.step()
        assert all(map(torch.equal, before, net.parameters()))
        isp.collect_gradients()
    optimizer.step()
    sums: dict[str, torch.Tensor] = {}
    for step in range(2):
        plain.zero_grad()
        plain(batch(rank, step)).square().sum().backward()
        for name, one in plain.named_parameters():
            sums[name] = sums[name] + reduced(one.grad, rank) if step else reduced(one.grad, rank)
    for name, one in net.named_parameters():
        assert torch.equal(one.grad, sums[name]), name


@distributed(2)
@MODES
def test_gradients_that_autograd_hands_out_are_there(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model)
    found = torch.autograd.grad(net(batch(rank)).square().sum(), list(net.parameters()))
    plain(batch(rank)).square().sum().backward()
    for mine, whole in zip(found, plain.parameters(), strict=True):
        assert torch.equal(mine, reduced(whole.grad, rank))
    assert not isp.reduce_scatter_handlers and all(one.grad is None for one in net.parameters())


@distributed(2)
@MODES
def test_a_gradient_of_negative_zeros_keeps_its_sign(rank: Rank, with_model: bool) -> None:
    net, _, isp = nets(rank, with_model)
    net(batch(rank))
    module, weight = net.layers[0].w1, net.layers[0].w1.weight

    class Zero(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            zeros = torch.full((8, 4), -0.0, dtype=torch.float64)
            rows, handle = isp.grad_hook(zeros, module=module)
            handle.wait()
            return rows

    Zero.apply(weight).backward()
    isp.collect_gradients()
    assert torch.signbit(weight.grad).all() and not weight.grad.any()


@distributed(2)
def test_a_hook_of_a_parameter_sees_its_gradient(rank: Rank) -> None:
    net, plain, _ = nets(rank, with_model=False)
    seen: list[torch.Tensor] = []
    net.layers[1].wo.weight.register_post_accumulate_grad_hook(
        lambda one: seen.append(one.grad.clone())
    )
    net(batch(rank)).square().sum().backward()
    plain(batch(rank)).square().sum().backward()
    assert torch.equal(seen[0], reduced(plain.layers[1].wo.weight.grad, rank))
    assert_gradients(net, plain, rank)


@distributed(2)
def test_a_hook_of_an_accumulator_sees_its_gradient(rank: Rank) -> None:
    """DDP, and optimizers that reduce in backward, hook the node and not the tensor."""
    net, plain, _ = nets(rank, with_model=False)
    weight = net.layers[1].wo.weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    seen: list[torch.Tensor] = []
    node.register_hook(lambda inputs, outputs: seen.append(weight.grad.clone()))
    net(batch(rank)).square().sum().backward()
    plain(batch(rank)).square().sum().backward()
    assert torch.equal(seen[0], reduced(plain.layers[1].wo.weight.grad, rank))
    assert_gradients(net, plain, rank)


@distributed(2, 4)
@MODES
def test_uses_of_a_module_in_one_backward_add_up(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model, repeats=2)
    for step in range(2):
        net.zero_grad()
        net(batch(rank, step)).square().sum().backward()
        if with_model:
            for one in net.parameters():
                rows, handle = isp.reduce_scatter_handlers[one.isp_reduce_scatter_name]
                handle.wait()
                one.grad.add_(rows)
                isp.reduce_scatter_handlers[one.isp_reduce_scatter_name] = None
    plain(batch(rank, 1)).square().sum().backward()
    for mine, whole in zip(net.parameters(), plain.parameters(), strict=True):
        # Each use is reduced, and then they are added; plain torch does it the other way round.
        torch.testing.assert_close(mine.grad, reduced(whole.grad, rank), rtol=1e-13, atol=1e-13)


@distributed(2)
@MODES
def test_a_backward_that_raises_leaves_nothing_behind(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("the user's")

    for _ in range(2):
        x = batch(rank, 3)
        y = x + net.layers[0](x)
        y.register_hook(fail)
        for layer in list(net.layers)[1:]:
            y = y + layer(y)
        with pytest.raises(KeyError, match="the user's"):
            y.square().sum().backward()
    net.zero_grad()
    net(batch(rank)).square().sum().backward()
    isp.collect_gradients()
    plain(batch(rank)).square().sum().backward()
    assert_gradients(net, plain, rank)


@distributed(2)
@MODES
def test_a_backward_that_raised_is_tried_again(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model)
    failures = ["the user's"]

    def fail(gradient: torch.Tensor) -> None:
        if failures:
            raise KeyError(failures.pop())

    y = batch(rank)
    for layer in net.layers:
        y = y + layer(y)
        if layer is net.layers[0]:
            y.register_hook(fail)
    loss = y.square().sum()
    with pytest.raises(KeyError, match="the user's"):
        loss.backward(retain_graph=True)
    net.zero_grad()
    loss.backward()
    isp.collect_gradients()
    plain(batch(rank)).square().sum().backward()
    assert_gradients(net, plain, rank)


@distributed(2)
@MODES
def test_weights_that_were_edited_are_gathered_again(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model, late=False)  # a late one would read the edited rows
    for step in range(3):
        with torch.no_grad():
            assert torch.equal(net(batch(rank, step)), plain(batch(rank, step)))
            net.layers[0](batch(rank))  # and the next block is gathered, for nobody
            dist.barrier()
            for one in (*net.parameters(), *plain.parameters()):
                one.data.mul_(0.5)  # which no version tells
    with torch.no_grad():
        net.layers[0](batch(rank))
        dist.barrier()
        for one in (*net.parameters(), *plain.parameters()):
            one.mul_(0.5)
        assert torch.equal(net.layers[1](batch(rank)), plain.layers[1](batch(rank)))
    net(batch(rank)).square().sum().backward()
    plain(batch(rank)).square().sum().backward()
    isp.collect_gradients()
    assert_gradients(net, plain, rank)


@distributed(2)
@MODES
def test_managed_layers_with_parts_train_the_same(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model)
    manager = memswap.manage(list(net.layers), policy=memswap.Policy(min_bytes=1))
    for step in range(2):
        for one in (net, plain):
            one.zero_grad()
            one(batch(rank, step)).square().sum().backward()
        isp.collect_gradients()
        assert_gradients(net, plain, rank)
    manager.remove()


@distributed(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_biases_pass_the_hooks_as_weights_do(rank: Rank, overlap: bool) -> None:
    for whole in (True, False):
        start = Net(lambda one: one)
        net = copy.deepcopy(start) if whole else Net(lambda one: PartLinear(one, rank))
        if whole:  # a unit gathers and reduces; the hooks let pass
            for layer in net.layers:
                for name in ("w1", "wo"):
                    made = PartLinear(getattr(layer, name), rank)
                    made.weight = getattr(layer, name).weight
                    made.bias = getattr(layer, name).bias
                    setattr(layer, name, made)
        isp = ISPCommunicator(net, config(), overlap, weights="whole" if whole else None)
        for module in net.modules():
            if isinstance(module, PartLinear):
                module.communicator = isp
        net(batch(rank)).square().sum().backward()
        isp.collect_gradients()
        start(batch(rank)).square().sum().backward()
        for (name, mine), one in zip(net.named_parameters(), start.parameters(), strict=True):
            local = mine.grad.to_local() if whole else mine.grad
            assert torch.equal(local, reduced(one.grad, rank)), (name, whole)


@distributed(2)
def test_a_head_reduces_its_bias(rank: Rank) -> None:
    head = HeadWeightParallelCommunicator()
    assert isinstance(head, WPCommunicator) and head.communication_mode() == "wp"
    bias = torch.arange(6.0).chunk(2)[rank.rank]
    assert torch.equal(head.weight_hook(bias, is_bias=True), torch.arange(6.0))
    rows, handle = head.grad_hook(
        torch.arange(6.0) * (rank.rank + 1),
        async_op=True,
        is_bias=True,
        reduce_op=dist.ReduceOp.SUM,
    )
    handle.wait()
    assert torch.equal(rows, 3 * torch.arange(6.0).chunk(2)[rank.rank])


class ExpertBlock(nn.Module):
    """A dense linear and an expert, each of which has a communicator."""

    def __init__(self, seed: int, make: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wo = make(nn.Linear(4, 4).double())
        self.experts = nn.ModuleDict({"0": make(nn.Linear(4, 4).double())})
        self.gate = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.wo(x)
        return x + self.experts["0"](x) * self.gate(x).sigmoid()


@distributed(2)
def test_communicators_of_a_dense_part_and_of_experts_share_a_model(rank: Rank) -> None:
    def made(make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
        model = nn.Sequential()
        model.layers = nn.ModuleList(ExpertBlock(seed, make) for seed in range(2))
        return model

    net, plain = made(lambda whole: PartLinear(whole, rank)), made(lambda whole: whole)
    wrapper, logs = ISPCommunicatorWrapper(), []
    for index in range(2):
        log = EventLog()
        logs.append(log)
        comm = Recording(LateComm(ProcessGroupComm()), log)
        context = ShardContext(open_comm=lambda group, comm=comm: comm)
        wrapper.set_communicator(index, ISPCommunicator(net, config(), True, context=context))
    for layer in net.layers:
        layer.wo.communicator = wrapper.get_communicator(0)
        layer.experts["0"].communicator = wrapper.get_communicator(1)
    for step in range(2):
        for log in logs:
            log.events.clear()
        for one in (net, plain):
            one.zero_grad()
            x = batch(rank, step)
            for layer in one.layers:
                x = layer(x)
            x.square().sum().backward()
        for part in net.parameters():
            if hasattr(part, "isp_reduce_scatter_name"):
                key = part.isp_reduce_scatter_name
                rows, handle = wrapper.reduce_scatter_handlers[key]
                handle.wait()
                part.grad.add_(rows)
                wrapper.reduce_scatter_handlers[key] = None
    for (name, part), whole in zip(net.named_parameters(), plain.parameters(), strict=True):
        mine = whole.grad if "gate" in name else reduced(whole.grad, rank)
        assert torch.equal(part.grad, mine), name
    assert not any("experts" in event for event in logs[0].events)
    assert not any("wo" in event for event in logs[1].events)
    assert all(log.count("all_gather") == 2 * 3 for log in logs), "weights twice, biases once"


# --- what cannot work -----------------------------------------------------------------------------


class Fused(nn.Module):
    """A linear of the user's own that gathers nothing: its weight is whole."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = whole.weight, whole.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@distributed(2)
def test_whole_weights_that_were_taken_for_parts_are_told(rank: Rank) -> None:
    net = Net(Fused)
    ISPCommunicator(net, config(), True)
    with pytest.raises(ValueError, match=r"none of \['w1', 'wo'\].*pass weights='whole'"):
        net(batch(rank))
    net, plain = Net(Fused), Net(lambda one: one)
    ISPCommunicator(net, config(), True, weights="whole")
    for one in (net, plain):
        one(batch(rank)).square().sum().backward()
    for mine, whole in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), reduced(whole.grad, rank))


@distributed(2)
def test_a_model_that_gathers_parts_is_not_copied(rank: Rank) -> None:
    net = Net(lambda whole: PartLinear(whole, rank))
    ISPCommunicator(net, config(), True)
    with pytest.raises(NotImplementedError, match="copy the model first"):
        copy.deepcopy(net)


@distributed(2)
def test_a_router_of_the_users_own_stands_beside_whole_weights(rank: Rank) -> None:
    net = Net(lambda one: one)
    for layer in net.layers:
        layer.wo = nn.Sequential(layer.wo, Fused(nn.Linear(4, 4).double()))
    plain = copy.deepcopy(net)
    ISPCommunicator(net, config(), True)
    for one in (net, plain):
        one(batch(rank)).square().sum().backward()
    for mine, whole in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), reduced(whole.grad, rank))


@distributed(2, 4)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("what", ["shape", "dtype", "modules"])
def test_ranks_with_other_parts_raise_when_the_communicator_is_made(
    rank: Rank, what: str, overlap: bool
) -> None:
    net = Net(lambda whole: PartLinear(whole, rank))
    if rank.rank == 1:
        odd = net.layers[1].wo
        if what == "shape":
            odd.weight = nn.Parameter(odd.weight.detach().repeat(2, 1))
        elif what == "dtype":
            odd.weight = nn.Parameter(odd.weight.detach().float())
        else:
            del net.layers[2]
    with pytest.raises(
        RankMismatchError, match=rf"(?s)rank {rank.rank} holds other parts.*0\.0\.w1"
    ):
        ISPCommunicator(net, config(), overlap, context=ShardContext(open_comm=rank.open_comm))
    assert rank.log.events == ["all_gather configuration", "wait all_gather configuration"]


@distributed(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_hooks_alone_compare_parts_at_their_first_use(rank: Rank, overlap: bool) -> None:
    communicators = [ISPCommunicator(None, config(), overlap), HeadWeightParallelCommunicator()]
    told = r"(?s)rank \d holds other parts.*weight: \[\d, 3\]"
    for one in communicators:
        for rows, kind in enumerate((torch.Tensor, nn.Parameter)):
            part = kind(torch.zeros(2 + 3 * rows + rank.rank, 3))
            for module in (nn.Identity(), None):
                with pytest.raises(RankMismatchError, match=told):
                    one.weight_hook(part, module=module)


@distributed(2)
@MODES
def test_bad_tensors_and_options_raise_before_a_collective(rank: Rank, with_model: bool) -> None:
    net, _, isp = nets(rank, with_model)
    net(batch(rank))
    rank.log.events.clear()
    module = net.layers[0].w1
    with pytest.raises(ValueError, match=r"gradient of shape \[5, 4\], expected \[8, 4\]: 2 ranks"):
        isp.grad_hook(torch.zeros(5, 4), module=module)
    with pytest.raises(ValueError, match=r"gradient of shape \[5\], expected rows"):
        isp.grad_hook(torch.zeros(5))
    with pytest.raises(ValueError, match=r"found reduce_op .*, expected AVG or SUM"):
        isp.grad_hook(torch.zeros(8, 4), module=module, reduce_op=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="found a scalar, expected a tensor of which each rank"):
        isp.weight_hook(torch.tensor(1.0))
    with pytest.raises(ValueError, match="found tuple, expected None"):
        isp.reduce_scatter_handlers["x"] = (torch.zeros(1), None)  # type: ignore[assignment]
    assert not rank.log.events, "before the first collective"
    with pytest.raises(ValueError, match="found weights='half', expected 'parts', 'whole' or None"):
        ISPCommunicator(net, config(), weights="half")  # type: ignore[arg-type]
    bare = nn.Sequential(nn.ModuleList([nn.Tanh()]))
    with pytest.raises(ValueError, match="found no module with a weight in the blocks"):
        ISPCommunicator(bare, config(), weights="parts")


@distributed(2)
@pytest.mark.parametrize("parts", [True, False], ids=["parts", "whole"])
def test_what_a_prerequisite_returns_is_awaited_or_told_once(rank: Rank, parts: bool) -> None:
    if parts:
        net, _, isp = nets(rank, with_model=True)
    else:
        net = Net(lambda one: one)
        isp = ISPCommunicator(net, config(), True)
    waited: list[nn.Module] = []

    class Broadcast:
        def __init__(self, block: nn.Module) -> None:
            self.block = block

        def wait(self) -> None:
            waited.append(self.block)

    isp.register_prerequisite_for_forward_prefetch_hooks(Broadcast)
    isp.register_prerequisite_for_forward_prefetch_hooks(lambda block: False)
    with pytest.warns(UserWarning, match="returned bool, which decides nothing") as told:
        net(batch(rank)).sum().backward()
    assert waited == list(net.layers) and len(told) == 1
    assert told[0].filename == __file__, "at the line that registered it"
    with pytest.raises(ValueError, match="made without a model, it has no blocks"):
        ISPCommunicator(None, config(), True).register_prerequisite_for_forward_prefetch_hooks(
            waited.append
        )


@distributed(2)
@MODES
def test_a_weight_that_is_made_for_one_use_is_gathered_for_it(rank: Rank, with_model: bool) -> None:
    net, plain, isp = nets(rank, with_model)
    hook = isp.weight_hook
    isp.weight_hook = lambda one, **more: hook(one.float(), **more).double()  # as autocast would
    for _ in range(2):
        net(batch(rank))
        rank.log.events.clear()
    net(batch(rank))
    assert rank.log.count("all_gather configuration") == 0
    with torch.no_grad():
        for one in plain.parameters():
            one.copy_(one.float())
    assert torch.equal(net(batch(rank)), plain(batch(rank)))


@distributed(2)
def test_rows_of_a_weight_are_not_sharded_again(rank: Rank) -> None:
    net, _, isp = nets(rank, with_model=True)
    net.rest = nn.Linear(4, 4).double()
    told = r"'weight' has this rank's rows of a weight that an ISPCommunicator gathers"
    with pytest.raises(ValueError, match=told):
        shard(net, rank.mesh, context=isp.context)
    parts = [one for one in net.layers.parameters()]
    shard(net, rank.mesh, context=isp.context, ignored_params=parts)
    assert net.rest.weight.to_local().shape == (2, 4)


@distributed(4)
def test_a_group_that_this_rank_is_not_in_is_refused(rank: Rank) -> None:
    group = dist.new_group([0, 1])
    if rank.rank > 1:
        with pytest.raises(ValueError, match="this process is in no such process group"):
            ISPCommunicator(None, config(), True, process_group=group)
    else:
        ISPCommunicator(None, config(), True, process_group=group)


@distributed(2)
def test_is_forward_can_be_set_and_is_never_true_in_backward(rank: Rank) -> None:
    net, _, isp = nets(rank, with_model=True)
    seen: list[bool] = []
    y = net(batch(rank))
    y.register_hook(lambda gradient: seen.append(isp.is_forward))
    assert isp.is_forward
    isp.is_forward = False
    assert not isp.is_forward
    isp.is_forward = True
    y.sum().backward()
    assert seen == [False] and isp.is_forward
