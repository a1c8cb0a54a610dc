"""InternEvo's ISP as its users write it: linears hold rows of their weights and call the hooks.

Only the import differs from there. What trains here is compared, bit for bit, with whole weights in
plain torch, whose gradients a blocking reduce-scatter has averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from comms import CommAround, EventLog
from memswap.compat.internevo import (
    ISPCommModelConfig,
    ISPCommunicator,
    ISPCommunicatorSchedulerHook,
    ISPCommunicatorWrapper,
    WPCommunicator,
)
from memswap.parallel import ShardContext
from ranks import Rank, distributed

WIDTH, HEADS, HIDDEN, BLOCKS, TOKENS = 16, 2, 24, 3, 5

# --- the user's model -----------------------------------------------------------------------------


class FusedDense(torch.autograd.Function):
    """Gathers its weight for forward and for backward, and reduces the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        module: nn.Module,
        communicator: WPCommunicator,
    ) -> torch.Tensor:
        ctx.module, ctx.communicator = module, communicator
        total_weight = communicator.weight_hook(weight, module=module)
        total_bias = bias
        if bias is not None:
            total_bias = communicator.weight_hook(bias, module=module, is_bias=True)
        module.note("forward")
        ctx.save_for_backward(x, weight, bias)
        return F.linear(x, total_weight, total_bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        module, communicator = ctx.module, ctx.communicator
        x, weight, bias = ctx.saved_tensors
        total_weight = communicator.weight_hook(weight, module=module)
        module.note("backward")
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        grad_weight, weight_sync = communicator.grad_hook(
            flat.t() @ x.reshape(-1, x.shape[-1]), async_op=True, module=module, is_bias=False
        )
        grad_bias = None
        if bias is not None:
            grad_bias, bias_sync = communicator.grad_hook(
                flat.sum(0), async_op=True, module=module, is_bias=True
            )
        grad_input = (flat @ total_weight).reshape(x.shape)
        weight_sync.wait()
        if grad_bias is not None:
            bias_sync.wait()
        return grad_input, grad_weight, grad_bias, None, None


class WPLinear(nn.Linear):
    """A linear with the rows of one rank. All of a model share a communicator, by their class."""

    communicator: WPCommunicator
    log: EventLog
    name: str

    def __init__(self, in_features: int, out_features: int, bias: bool, ranks: int) -> None:
        super().__init__(in_features, out_features // ranks, bias=bias)

    @classmethod
    def register_cls_communicator(cls, communicator: WPCommunicator) -> None:
        cls.communicator = communicator

    def note(self, what: str) -> None:
        self.log(f"{what} {self.name}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.communicator.communication_mode() != "wp":
            raise AssertionError("the other kind of communicator has input_hook")
        output: torch.Tensor = FusedDense.apply(x, self.weight, self.bias, self, self.communicator)
        return output


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


#: Makes a linear: in, out, bias.
Linear = Callable[[int, int, bool], nn.Module]


class Attention(nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.wqkv = linear(WIDTH, 3 * WIDTH, True)
        self.wo = linear(WIDTH, WIDTH, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.wqkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.wo(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.w1, self.w3 = linear(WIDTH, HIDDEN, False), linear(WIDTH, HIDDEN, False)
        self.w2 = linear(HIDDEN, WIDTH, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(linear), FeedForward(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, linear: Linear, checkpointed: int = 0, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(linear) for _ in range(BLOCKS))
        self.norm = RMSNorm(WIDTH)
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index < self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = layer(x)
        return self.norm(x)


# --- the user's training --------------------------------------------------------------------------


class ZeroOptimizer:
    """Collects reduced gradients from the communicator, as it is told to after each backward."""

    skip_grad_reduce = False

    def __init__(self, model: nn.Module, isp: Any) -> None:
        self.parameters = list(model.parameters())
        self.isp = isp
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.05)
        self.calls: list[str] = []

    def accumulate_left_grads_after_backward(self) -> None:
        self.calls.append("accumulate")
        for param in self.parameters:
            if not hasattr(param, "isp_reduce_scatter_name"):
                continue
            key = param.isp_reduce_scatter_name
            grad, handle = self.isp.reduce_scatter_handlers[key]
            handle.wait()
            param.grad.add_(grad)
            if self.isp.enable_memory_pool:
                self.isp.memory_pool.free_reduce_scatter_memory(
                    key=tuple(grad.size()), index=grad.index
                )
            self.isp.reduce_scatter_handlers[key] = None

    def reduce_left_grads_after_backward(self) -> None:
        self.calls.append("reduce")
        for param in self.parameters:  # the replicated ones
            if not hasattr(param, "isp_reduce_scatter_name"):
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


def batches(rank: Rank, steps: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(7)
    shape = (steps, rank.size, 2, TOKENS, WIDTH)
    return torch.randn(shape, generator=made, dtype=torch.float64)[:, rank.rank]


def as_in_plain_torch(
    rank: Rank, steps: int, start: dict[str, torch.Tensor], checkpointed: int = 0
) -> nn.Module:
    """Whole weights on every rank."""
    model = Llama(lambda i, o, bias: nn.Linear(i, o, bias=bias), checkpointed).double()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches(rank, steps):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        for name, param in model.named_parameters():
            if "norm" in name:
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
                continue
            rows = param.grad.new_empty(param.shape[0] // rank.size, *param.shape[1:])
            dist.reduce_scatter_tensor(rows, param.grad, op=dist.ReduceOp.AVG)
            dist.all_gather_into_tensor(param.grad, rows)
        optimizer.step()
    return model


def whole_start() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return Llama(lambda i, o, bias: nn.Linear(i, o, bias=bias)).double().state_dict()


def model_of_parts(
    rank: Rank, start: dict[str, torch.Tensor], checkpointed: int = 0, reentrant: bool = False
) -> Llama:
    model = Llama(
        lambda i, o, bias: WPLinear(i, o, bias, rank.size), checkpointed, reentrant
    ).double()
    parts = {
        name: whole if "norm" in name else whole.chunk(rank.size)[rank.rank].clone()
        for name, whole in start.items()
    }
    model.load_state_dict(parts)
    WPLinear.log = rank.log
    for index, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            module.name = f"0.{index}.{name}"
    return model


def assert_same_bits(rank: Rank, model: nn.Module, plain: nn.Module) -> None:
    wholes = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        whole = wholes[name]
        mine = whole if "norm" in name else whole.chunk(rank.size)[rank.rank]
        assert torch.equal(param.detach().view(torch.int64), mine.detach().view(torch.int64)), name
        theirs = whole.grad if "norm" in name else whole.grad.chunk(rank.size)[rank.rank]
        assert torch.equal(param.grad.view(torch.int64), theirs.view(torch.int64)), f"{name}.grad"


class Counting(CommAround):
    """Adds up what is gathered."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self.gathered_bytes = 0

    def launch(self, event: str, outputs: Any, inputs: Any, collective: Any) -> Any:
        if event.startswith("all_gather") and "configuration" not in event:
            self.gathered_bytes += sum(one.nbytes for one in outputs)
        return collective(outputs, inputs)


def exposed_gathers(log: EventLog) -> list[str]:
    """Those that have no compute between their launch and their wait."""
    found = []
    launched: dict[str, int] = {}
    for at, event in enumerate(log.events):
        if event.startswith("all_gather"):
            launched[event] = at
        elif event.startswith("wait all_gather"):
            name = event.removeprefix("wait ")
            between = log.events[launched[name] : at]
            if not any(one.startswith(("forward", "backward")) for one in between):
                found.append(name)
    return found


def observed(rank: Rank, late: bool = True) -> tuple[ShardContext, list[Counting]]:
    """For the test: the late communicator, its log, and how much was gathered."""
    counting: list[Counting] = []

    def open_comm(group: Any) -> Any:
        counting.append(Counting(rank.open_comm(group, late=late)))
        return counting[-1]

    return ShardContext(open_comm=open_comm), counting


@distributed(2, 4)
@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
@pytest.mark.parametrize(
    "checkpointed", [0, 2, 3], ids=["", "two checkpointed", "all checkpointed"]
)
def test_a_model_trains_with_isp_overlap(rank: Rank, pool: bool, checkpointed: int) -> None:
    start, steps = whole_start(), 3
    model = model_of_parts(rank, start, checkpointed, reentrant=pool)
    context, counting = observed(rank, late=not pool)
    conf = ISPCommModelConfig(
        dtype=torch.float64,
        device=torch.device("cpu"),
        activation_checkpointing=checkpointed / BLOCKS,
    )
    isp = ISPCommunicator(
        model, conf, overlap=True, enable_memory_pool=pool, process_group=None, context=context
    )
    WPLinear.register_cls_communicator(isp)
    assert isinstance(isp, WPCommunicator)
    optimizer = ZeroOptimizer(model, isp)
    hook = ISPCommunicatorSchedulerHook(isp, optimizer)
    seen: list[nn.Module] = []
    isp.register_prerequisite_for_forward_prefetch_hooks(seen.append)
    for step, batch in enumerate(batches(rank, steps)):
        rank.log.events.clear()
        counting[0].gathered_bytes = 0
        optimizer.optimizer.zero_grad()
        hook.before_forward(None, batch)
        x = batch.requires_grad_() if pool else batch
        loss = model(x).square().sum()
        hook.after_forward(None, loss)
        hook.before_backward(None, loss, None)
        assert not isp.is_forward
        loss.backward()
        in_backward = list(rank.log.events)
        hook.after_backward(None, None)
        optimizer.optimizer.step()
        assert seen == [*model.layers] * (step + 1), "before each block's gather in forward, once"
    assert optimizer.calls == ["accumulate", "reduce"] * steps
    assert_same_bits(rank, model, as_in_plain_torch(rank, steps, start, checkpointed))

    shapes = {module: module.weight for module in model.modules() if isinstance(module, WPLinear)}
    weights = sum(weight.nbytes for weight in shapes.values()) * rank.size
    biases = sum(one.bias.nbytes for one in shapes if one.bias is not None) * rank.size
    again = checkpointed / BLOCKS  # a checkpointed block's weights stay until they are used
    assert counting[0].gathered_bytes == round(2 * weights + (1 + again) * biases)
    log = rank.log
    launched = [one for one in log.events if one.startswith(("all_gather", "reduce_scatter"))]
    for event in set(launched):
        assert log.events.count(f"wait {event}") == launched.count(event), event
    first = ["all_gather 0.0.attention.wqkv.weight", "all_gather 0.0.attention.wqkv.bias"]
    backward = [f"all_gather 0.{BLOCKS - 1}.feed_forward.w2.weight"] * (checkpointed < BLOCKS)
    if checkpointed:  # the last of them, where it is computed again
        name = f"all_gather 0.{checkpointed - 1}.attention.wqkv"
        backward += [f"{name}.weight", f"{name}.bias"]
    assert exposed_gathers(log) == first + backward, "all others are beside compute"
    for index in range(BLOCKS - 1):
        after = f"all_gather 0.{index + 1}.attention.wqkv.weight"
        assert log.before(after, f"forward 0.{index}.attention.wo"), "with the output projection"
        assert log.before(f"forward 0.{index}.attention.wqkv", after), "behind the attention"
        assert log.before(f"forward 0.{index}.feed_forward.w2", f"wait {after}")
        reduced = f"reduce_scatter 0.{index + 1}.attention.wqkv.weight gradient"
        assert log.before(reduced, f"backward 0.{index}.feed_forward.w2")
        if f"wait {reduced}" in in_backward:  # as many as are under way at once
            assert log.before(f"backward 0.{index}.feed_forward.w2", f"wait {reduced}")
    if checkpointed < BLOCKS:
        last = f"0.{BLOCKS - 1}.feed_forward"
        gathered = log.index(f"all_gather {last}.w3.weight", 1)
        assert gathered < log.index(f"reduce_scatter {last}.w2.weight gradient"), "ahead of its use"
        assert gathered < log.index(f"backward {last}.w3")
    if checkpointed == BLOCKS:
        ahead = log.index("all_gather 0.0.attention.wqkv.weight", 1)
        assert ahead < log.index("forward 0.1.attention.wo", 1), "where block 1 is computed again"
    if pool:
        # Two for each of 7 names of weights and biases; of more than 100 gathers. gloo's threads
        # may hold a buffer a moment longer than the gather takes, and then one comes from beside.
        assert isp.memory_pool.allocations <= 3 * 7
        assert isp.memory_pool.reduce_allocations >= 7 * BLOCKS, "gradients arrive in its buffers"


@distributed(2, slow=(4,))
@pytest.mark.parametrize("checkpointed", [0, 2], ids=["", "two checkpointed"])
@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
def test_hooks_alone_gather_ahead_from_the_second_step_on(
    rank: Rank, pool: bool, checkpointed: int
) -> None:
    start, steps = whole_start(), 3
    model = model_of_parts(rank, start, checkpointed)
    context, counting = observed(rank, late=not pool)
    conf = ISPCommModelConfig(torch.float64, torch.device("cpu"))
    isp = ISPCommunicator(None, conf, overlap=True, enable_memory_pool=pool, context=context)
    WPLinear.register_cls_communicator(isp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches(rank, steps):
        rank.log.events.clear()
        counting[0].gathered_bytes = 0
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        for name, param in model.named_parameters():
            if "norm" in name:
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
    assert_same_bits(rank, model, as_in_plain_torch(rank, steps, start, checkpointed))
    assert all(one is None for one in isp.reduce_scatter_handlers.values()), "grads have it all"

    log = rank.log
    linears = [one for one in model.modules() if isinstance(one, WPLinear)]
    weights = sum(one.weight.nbytes for one in linears) * rank.size
    biases = sum(one.bias.nbytes for one in linears if one.bias is not None) * rank.size
    assert counting[0].gathered_bytes == round(2 * weights + (1 + checkpointed / BLOCKS) * biases)
    uses = [one for one in log.events if one.startswith(("forward", "backward"))]
    gathers = {f"forward {one.name}": 0 for one in linears}
    for event in uses:
        if event.startswith("forward") and uses.index(event) > 0 and event in gathers:
            before = uses[uses.index(event) - 1]
            name = name_of_gather(isp, model, event)
            assert log.before(name, before), f"{event}: gathered before {before}"
            del gathers[event]
    assert len(gathers) == 1, "all but the first"
    # The first weight and its bias in forward, and the first weight in backward.
    assert len(exposed_gathers(log)) == 3
    reduced = [one for one in log.events if one.startswith("wait reduce_scatter")]
    first = reduced[0].removeprefix("wait ")
    between = log.events[log.index(first) : log.index(reduced[0])]
    assert sum(one.startswith("backward") for one in between) >= 5, "awaited late"
    if pool:
        assert isp.memory_pool.allocations < len(linears) * steps


def name_of_gather(isp: ISPCommunicator, model: nn.Module, event: str) -> str:
    """Of the weight that an event uses."""
    layers, place = model.layers, event.removeprefix("forward 0.").split(".", 1)
    module = layers[int(place[0])].get_submodule(place[1])
    return f"all_gather {isp._ahead.known(module, False).name}"


@distributed(2)
@pytest.mark.parametrize("with_model", [True, False], ids=["model", "None"])
def test_without_overlap_a_gather_is_where_it_is_used(rank: Rank, with_model: bool) -> None:
    start, steps = whole_start(), 2
    model = model_of_parts(rank, start)
    context, _ = observed(rank)
    conf = ISPCommModelConfig(torch.float64, torch.device("cpu"))
    isp = ISPCommunicator(model if with_model else None, conf, context=context)
    WPLinear.register_cls_communicator(isp)
    optimizer = ZeroOptimizer(model, isp)
    hook = ISPCommunicatorSchedulerHook(isp, optimizer)
    for batch in batches(rank, steps):
        rank.log.events.clear()
        optimizer.optimizer.zero_grad()
        model(batch).square().sum().backward()
        hook.after_backward(None, None)
        for name, param in model.named_parameters():
            if "norm" in name:
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        optimizer.optimizer.step()
    assert not optimizer.calls, "there is nothing to collect"
    assert_same_bits(rank, model, as_in_plain_torch(rank, steps, start))
    events = rank.log.events
    for at, event in enumerate(events):
        if event.startswith("all_gather"):
            assert events[at + 1] == f"wait {event}"


@distributed(2)
def test_microbatches_of_two_chunks_through_a_wrapper(rank: Rank) -> None:
    start, microbatches = whole_start(), 2
    chunks = [model_of_parts(rank, start), model_of_parts(rank, start)]
    context, _ = observed(rank)
    conf = ISPCommModelConfig(torch.float64, torch.device("cpu"))
    isp = ISPCommunicator(chunks, conf, overlap=True, enable_memory_pool=True, context=context)
    WPLinear.register_cls_communicator(isp)
    wrapper = ISPCommunicatorWrapper([isp])
    assert wrapper.isp_communicators == [isp] and wrapper.memory_pools == [isp.memory_pool]
    assert wrapper.enable_memory_pool
    current = 0
    hook = ISPCommunicatorSchedulerHook(wrapper, None, chunk=lambda: current)
    for batch in batches(rank, microbatches):
        outputs = []
        x = batch
        for at, chunk in enumerate(chunks):
            current = at
            hook.before_forward(None, x)
            outputs.append((x, chunk(x)))
            x = outputs[-1][1].detach().requires_grad_()
        gradient = 2 * outputs[-1][1].detach()
        for current in (1, 0):
            x, output = outputs[current]
            hook.before_backward(None, output, gradient)
            output.backward(gradient)
            gradient = x.grad
            for param in chunks[current].parameters():
                if hasattr(param, "isp_reduce_scatter_name"):
                    key = param.isp_reduce_scatter_name
                    grad, handle = wrapper.reduce_scatter_handlers[key]
                    handle.wait()
                    param.grad.add_(grad)
                    wrapper.reduce_scatter_handlers[key] = None
            hook.after_backward(None, gradient)
    assert isp.overlap_state is isp._states[0]
    plain = [Llama(lambda i, o, bias: nn.Linear(i, o, bias=bias)).double() for _ in chunks]
    for one in plain:
        one.load_state_dict(start)
    totals: dict[int, torch.Tensor] = {}
    for batch in batches(rank, microbatches):
        for one in plain:
            one.zero_grad()
        plain[1](plain[0](batch)).square().sum().backward()
        for which, one in enumerate(plain):
            for at, param in enumerate(one.parameters()):
                if param.ndim > 1:
                    rows = param.grad.new_empty(param.shape[0] // rank.size, *param.shape[1:])
                    dist.reduce_scatter_tensor(rows, param.grad, op=dist.ReduceOp.AVG)
                    known = totals.get(1000 * which + at)
                    totals[1000 * which + at] = rows if known is None else known + rows
    for which, one in enumerate(chunks):
        for at, param in enumerate(one.parameters()):
            if param.ndim > 1:
                assert torch.equal(param.grad, totals[1000 * which + at])
