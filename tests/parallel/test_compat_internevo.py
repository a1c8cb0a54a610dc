"""InternEvo's ISP names: what is trained through them has the bits of memswap's own names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from memswap.compat.internevo import (
    EmbeddingWeightParallelCommunicator,
    HeadWeightParallelCommunicator,
    ISPCommModelConfig,
    ISPCommunicator,
    ISPCommunicatorSchedulerHook,
    ISPCommunicatorWrapper,
    MemoryPool,
)
from memswap.errors import SlotError
from memswap.parallel import (
    HeadPlan,
    SequenceShards,
    SequenceToHeads,
    ShardContext,
    exchange,
    shard,
)
from memswap.parallel.comm import ProcessGroupComm
from ranks import Rank, distributed
from sharding import assert_same, loss_of, make_net, moved, sharded, tokens_of, train

CPU = torch.device("cpu")


def config(**options: Any) -> ISPCommModelConfig:
    return ISPCommModelConfig(torch.float64, CPU, **options)


@distributed(2)
@pytest.mark.parametrize("late", [False, True], ids=["async", "late"])
def test_a_model_trains_through_a_communicator_as_through_shard(rank: Rank, late: bool) -> None:
    start = make_net()
    start.checkpointed = [0]
    reference, _ = sharded(rank, start)
    train(reference, rank)
    for overlap in (True, False):
        net = copy.deepcopy(start)
        context = None
        if late:
            context = ShardContext(
                slots=2,
                prefetch=overlap,
                open_comm=lambda group: rank.open_comm(group, late=True),
                debug=True,
            )
        conf = config(activation_checkpointing=0.34)
        isp = ISPCommunicator(net, conf, overlap, overlap, dist.group.WORLD, context=context)
        assert isp.communication_mode() == "wp", "callers dispatch on it"
        shard(net, rank.mesh, context=isp.context)
        train(net, rank)
        assert moved(net, start)
        assert_same(net, reference, rank, bitwise=True)
        assert isp.context.stats().lent == 0
        assert (isp.context.stats().slots > 0) == (overlap or late)
        causes = {(one.unit, one.cause) for one in isp.context.last_step}
        assert (("layers.1", "prefetched by layers.0") in causes) == overlap
        state = isp.overlap_state
        assert (state.num_blocks, state.ckpt_block_num) == (3, 1)
        assert state.isp_outs == [layer.wo for layer in net.layers], "the gathers' anchors"
        assert conf.module_shapes["qkv"] == (24, 8), "shapes are of whole weights"


class HookedLinear(torch.autograd.Function):
    """As systems write it whose linear layers gather their own weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ module.communicator.weight_hook(weight, module=module).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x, weight), module = ctx.saved_tensors, ctx.module
        whole = module.communicator.weight_hook(weight, module=module)
        of_weight, handle = module.communicator.grad_hook(
            gradient.flatten(0, -2).t() @ x.flatten(0, -2), async_op=True, module=module
        )
        of_x = gradient @ whole
        handle.wait()
        return of_x, of_weight, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.wo = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
        self.communicator: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.w1, self.wo):
            if self.communicator is None:
                x = module(x).tanh()
            else:
                module.communicator = self.communicator
                x = HookedLinear.apply(x, module.weight, module).tanh()
        return x


@distributed(2)
@pytest.mark.parametrize("pool", [False, True], ids=["", "pool"])
def test_layers_that_call_the_hooks_train_the_same(rank: Rank, pool: bool) -> None:
    torch.manual_seed(3)
    start = nn.Sequential(nn.ModuleList([Block(), Block()])).double()
    blocks = list(start[0])
    xs = torch.randn(2, 2, 3, 4, dtype=torch.float64)

    def run(blocks: list[Block], x: torch.Tensor) -> None:
        for block in blocks:
            x = block(x)
        x.square().sum().backward()

    own = copy.deepcopy(blocks)
    context = ShardContext()
    for block in own:
        shard(block, rank.mesh, context=context)

    # Weights that are whole when the communicator is made: it shards them.
    theirs = copy.deepcopy(start)
    isp = ISPCommunicator(theirs, config(), True, pool)
    for block in theirs[0]:
        block.communicator = isp

    # Weights that are parts already: the hooks gather and reduce.
    parts = copy.deepcopy(blocks)
    by_hand = ISPCommunicator(None, config(), enable_memory_pool=pool)
    for block in parts:
        block.communicator = by_hand
        for linear in (block.w1, block.wo):
            linear.weight = nn.Parameter(linear.weight.detach().chunk(2)[rank.rank].clone())

    runs: list[list[Block]] = [own, list(theirs[0]), parts]
    for one in runs:
        parameters = [p for block in one for p in block.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            run(one, xs[rank.rank] + step)
            optimizer.step()
    for ours, *others in zip(*(nn.ModuleList(one).parameters() for one in runs), strict=True):
        for other in others:
            local = other.to_local() if hasattr(other, "to_local") else other
            assert torch.equal(local, ours.to_local())
    if pool:
        assert by_hand.memory_pool is not None and by_hand.memory_pool.allocations <= 4


@distributed(2)
def test_chunks_prerequisites_and_a_schedulers_callbacks(rank: Rank) -> None:
    start = [make_net(layers=2), make_net(layers=1)]
    chunks = copy.deepcopy(start)
    dense, experts = copy.deepcopy(chunks[0]), copy.deepcopy(chunks[1])
    isp = ISPCommunicator(chunks, config(), True, True)
    wrapper = ISPCommunicatorWrapper()
    wrapper.set_communicator(1, isp)
    gathered: list[nn.Module] = []
    wrapper.register_prerequisite_for_forward_prefetch_hooks(gathered.append)
    collected: list[str] = []

    class Optimizer:
        def accumulate_left_grads_after_backward(self) -> None:
            collected.append("after backward")

    current = 0
    hook = ISPCommunicatorSchedulerHook(wrapper, Optimizer(), chunk=lambda: current)
    directions: list[bool] = []
    chunks[1].layers[0].down.register_full_backward_pre_hook(
        lambda *_: directions.append(isp.is_forward)
    )
    losses = []
    for current, chunk in enumerate(chunks):
        hook.before_forward(None, None)
        assert isp.overlap_state.num_blocks == (2, 1)[current]
        losses.append(loss_of(chunk, tokens_of(0, 2)[rank.rank]))
        hook.after_forward(None, None)
    assert gathered == [*chunks[0].layers, *chunks[1].layers], "once before each forward gather"
    for current in (1, 0):
        hook.before_backward(None, None, None)
        losses[current].backward()
        hook.after_backward(None, None)
    assert directions == [False] and isp.is_forward
    assert len(gathered) == 3 and len(collected) == 2
    assert not wrapper.reduce_scatter_handlers, "gradients are where optimizers look for them"
    for mine, plain in zip(chunks, (dense, experts), strict=True):
        loss_of(plain, tokens_of(0, 2)[rank.rank]).backward()
        for a, b in zip(mine.layers.parameters(), plain.layers.parameters(), strict=True):
            dist.all_reduce(b.grad)
            assert torch.equal(a.grad.full_tensor(), b.grad / 2)
    with pytest.raises(ValueError, match="found chunk 2 of 2"):
        isp.switch_current_model_chunk(2)
    with pytest.raises(TypeError, match="expected a function of a block"):
        isp.register_prerequisite_for_forward_prefetch_hooks(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"found no nn.ModuleList of blocks in Linear"):
        ISPCommunicator(nn.Linear(2, 2), config(), True)


@distributed(2)
def test_handles_of_reductions_can_be_seen_while_they_fly(rank: Rank) -> None:
    net = make_net()
    isp = ISPCommunicator(net, config(), True)
    seen: list[list[str]] = []
    net.layers[0].norm.register_full_backward_hook(
        lambda *_: seen.append(sorted(isp.reduce_scatter_handlers))
    )
    train(net, rank, steps=1)
    assert any("wo.weight" in name for name in seen[0]) and not isp.reduce_scatter_handlers


# --- the ends -----------------------------------------------------------------------------------

WORDS, WIDTH, LENGTH = 12, 6, 8


class Ends(nn.Module):
    """An embedding and a head; the sequence is cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)


class HookedHead(torch.autograd.Function):
    """A head as those systems write it, with the weight's rows as a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, communicator: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.communicator = communicator
        output, handle = communicator.output_hook(x @ communicator.weight_hook(weight).t())
        handle.wait()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x, weight), communicator = ctx.saved_tensors, ctx.communicator
        gradient, handle = communicator.grad_output_hook(gradient)
        handle.wait()
        of_weight, handle = communicator.grad_hook(
            gradient.flatten(0, -2).t() @ x.flatten(0, -2), reduce_op=dist.ReduceOp.SUM
        )
        handle.wait()
        return gradient @ communicator.weight_hook(weight), of_weight, None


@distributed(2, 4)
@pytest.mark.parametrize("words_cut", [True, False], ids=["words cut", "words whole"])
def test_embedding_and_head_train_as_with_shard_and_exchange(rank: Rank, words_cut: bool) -> None:
    torch.manual_seed(11)
    start = Ends().double()
    tokens = torch.randint(0, WORDS, (2, LENGTH))
    weights = torch.randn(2, LENGTH, WORDS, dtype=torch.float64)  # of a loss that knows its place
    mine = slice(rank.rank * LENGTH // rank.size, (rank.rank + 1) * LENGTH // rank.size)
    words = torch.arange(WORDS).chunk(rank.size)[rank.rank]
    of_output = weights[..., words] if words_cut else weights

    own, context = copy.deepcopy(start), ShardContext()
    shard(own.embed, rank.mesh, context=context, unshard_in_backward=False)
    shard(own.head, rank.mesh, context=context)
    for module in (own.embed, own.head):
        module.set_gradient_divide_factor(1)
    comm = ProcessGroupComm(rank.mesh.get_group())
    plan = HeadPlan(WORDS, WORDS, rank.size).queries()
    to_words = SequenceToHeads(
        comm, plan, SequenceShards.cut(LENGTH, rank.size).lengths, seq_dim=1, head_dim=2
    )
    logits = own.head(own.embed(tokens[:, mine]))
    if words_cut:
        turned = exchange(logits, to_words).wait()
        (turned * of_output).sum().backward()
    else:
        (logits * weights[:, mine]).sum().backward()

    theirs = copy.deepcopy(start)
    ends = EmbeddingWeightParallelCommunicator(dist.group.WORLD)
    theirs.embed.vocab_parallel = rank.size == 2
    ends.register_module_hook(theirs.embed)
    theirs.embed.set_gradient_divide_factor(1)
    weight = nn.Parameter(start.head.weight.detach().chunk(rank.size)[rank.rank].clone())
    head = HeadWeightParallelCommunicator(dist.group.WORLD, dist.group.WORLD, words_cut)
    output = HookedHead.apply(theirs.embed(tokens[:, mine]), weight, head)
    if words_cut:
        assert torch.equal(output, turned)
    (output * of_output).sum().backward()
    ends.grad_reduce_hook(theirs.embed.weight)
    assert torch.equal(weight.grad, own.head.weight.grad.to_local())
    whole = theirs.embed.weight.grad.full_tensor()
    assert torch.equal(whole, own.embed.weight.grad.full_tensor())
    with pytest.raises(ValueError, match="a parameter of no registered module"):
        ends.grad_reduce_hook(weight)


# --- what goes wrong there ----------------------------------------------------------------------


def test_a_buffer_that_somebody_reads_is_not_handed_out_again() -> None:
    pool = MemoryPool(config(module_shapes={"wo": torch.Size((4, 2))}), with_bias=True)
    held = [pool.allocate_all_gather_memory(block, "wo") for block in range(3)]
    assert len({one.data_ptr() for one in held}) == 3, "blocks 0 and 2 share a buffer"
    assert held[0].shape == (4, 2) and held[0].dtype == torch.float64
    first = held[0].data_ptr()
    del held[0]
    assert pool.allocate_all_gather_memory(7, "wo").data_ptr() == first
    assert pool.allocate_all_gather_memory(0, "wo", is_bias=True).shape == (4,)
    with pytest.raises(ValueError, match=r"no shape of module 'w3' \(block 1\)"):
        pool.allocate_all_gather_memory(1, "w3")


def test_zeros_that_are_shared_cannot_be_written_to() -> None:
    zeros = MemoryPool(config()).allocate_constant_zero((3, 2))
    assert torch.equal(zeros, torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="single memory location"):
        zeros.add_(1)


@distributed(2)
def test_freeing_the_experts_buffer_leaves_the_dense_parts_in_use(rank: Rank) -> None:
    wrapper = ISPCommunicatorWrapper()
    for index in range(2):
        wrapper.set_communicator(index, ISPCommunicator(None, config(), enable_memory_pool=True))
    pools = [one.memory_pool for one in wrapper]
    buffers = [pool.allocate_reduce_scatter_memory((4, 2)) for pool in pools]
    wrapper.free_reduce_scatter_memory((4, 2), buffers[1].index)
    assert pools[0].allocate_reduce_scatter_memory((4, 2)) is not buffers[0]
    assert pools[1].allocate_reduce_scatter_memory((4, 2)) is buffers[1]
    with pytest.raises(SlotError, match="was it freed already, or is it another pool's"):
        pools[0].free_reduce_scatter_memory((4, 2), buffers[1].index)
    wrapper.free_reduce_scatter_memory((4, 2), buffers[0].index)
    with pytest.raises(SlotError, match="no pool has lent"):
        wrapper.free_reduce_scatter_memory((4, 2), buffers[0].index)
    wrapper.reset_lazy_pools()
    with pytest.raises(ValueError, match=r"found no communicator 2; set were \[0, 1\]"):
        wrapper.get_communicator(2)


@distributed(2)
def test_experts_and_the_dense_part_gather_their_own_modules_only(rank: Rank) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wo = nn.Linear(4, 4)
            self.moe = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.wo(x)
            return sum(expert(x) for expert in self.moe["experts"]).tanh()

    torch.manual_seed(2)
    start = nn.Sequential()
    start.layers = nn.ModuleList([Layer(), Layer()]).double()
    net, plain = copy.deepcopy(start), copy.deepcopy(start)
    experts = ISPCommunicator([one.moe for one in net.layers], config(), True, True)
    dense = ISPCommunicator(net, config(), True, True, context=experts.context)
    assert {len(state.isp_modules) for state in experts._states} == {2}
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    for _ in range(2):
        for model in (net, plain):
            y = x[rank.rank]
            for layer in model.layers:
                y = layer(y)
            y.sum().backward()
    gathers = [one for one in dense.context.last_step if one.collective == "all-gather"]
    assert len(gathers) == 2 * 6, "two for each of four experts and two layers"
    for a, b in zip(net.layers.parameters(), plain.layers.parameters(), strict=True):
        dist.all_reduce(b.grad)
        assert torch.equal(a.grad.full_tensor(), b.grad / 2)


@distributed(2)
def test_accumulation_of_an_embedding_needs_no_count_of_microbatches(rank: Rank) -> None:
    ends, plain = EmbeddingWeightParallelCommunicator(), nn.Embedding(5, 3).double()
    dist.broadcast(plain.weight.detach(), 0)
    embedding = copy.deepcopy(plain)
    ends.register_module_hook(embedding)
    assert embedding.weight.placements[0].dim == 1
    for microbatches in (1, 3):
        for one in (embedding, plain):
            one.zero_grad()
            for i in range(microbatches):
                F.cross_entropy(one(torch.tensor([i, rank.rank])), torch.tensor([0, 1])).backward()
        dist.all_reduce(plain.weight.grad)
        torch.testing.assert_close(
            embedding.weight.grad.full_tensor(), plain.weight.grad / 2, rtol=0, atol=1e-15
        )


class PartEmbedding(nn.Module):
    """An embedding of the user's own, with this rank's columns of the weight."""

    def __init__(self, whole: torch.Tensor, rank: Rank) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = whole.shape
        self.weight = nn.Parameter(whole.chunk(rank.size, 1)[rank.rank].clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


@distributed(2)
def test_an_embedding_gathers_the_part_that_it_has_now(rank: Rank) -> None:
    start, loaded = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(6, 4) * 10
    embedding, ends = PartEmbedding(start, rank), EmbeddingWeightParallelCommunicator()
    ends.register_module_hook(embedding)
    part = loaded.chunk(rank.size, 1)[rank.rank].clone()
    embedding.load_state_dict({"weight": part}, assign=True)  # another parameter takes its place
    tokens = torch.tensor([1, 4])
    output = embedding(tokens)
    assert torch.equal(output, loaded[tokens])
    output.sum().backward()
    ends.grad_reduce_hook(embedding.weight)
    assert embedding.weight.grad is not None


@distributed(2)
def test_an_embedding_has_its_part_again_after_an_interrupt(rank: Rank) -> None:
    class Interrupted(PartEmbedding):
        interrupt = True

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if self.interrupt:
                raise KeyboardInterrupt
            return super().forward(tokens)

    whole = torch.arange(24.0).view(6, 4)
    embedding, ends = Interrupted(whole, rank), EmbeddingWeightParallelCommunicator()
    ends.register_module_hook(embedding)
    tokens = torch.tensor([1, 4])
    with pytest.raises(KeyboardInterrupt):
        embedding(tokens)
    embedding.interrupt = False
    assert torch.equal(embedding(tokens), whole[tokens])
    assert embedding.weight is embedding._parameters["weight"]
    with pytest.raises(NotImplementedError, match="copy the model first"):
        copy.deepcopy(embedding)
