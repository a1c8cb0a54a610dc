"""MindSpeed's activation compression (``--compress-activation``), as its users write it."""

from __future__ import annotations

import functools
import uuid
from typing import Any

import pytest
import torch
from helpers import assert_nothing_left, assert_same_gradients, flush_autograd, gradients
from torch import nn

from memswap.compat.mindspeed import CompressHook, GlobalContext, GlobalContextConfig

pytestmark = pytest.mark.usefixtures("every_tensor_is_encoded")

WIDTH, LENGTH = 128, 128


class TransformerLayer(nn.Module):
    """A layer as Megatron has it: numbered from 1, and its output is a tuple."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.linear_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.linear_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.pre_mlp_layernorm = nn.LayerNorm(WIDTH)
        self.linear_fc1 = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.linear_fc2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> Any:
        q, k, v = self.linear_qkv(self.input_layernorm(hidden_states)).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(-1, -2)) / WIDTH**0.5
        hidden_states = hidden_states + self.linear_proj(torch.matmul(scores.softmax(-1), v))
        inner = nn.functional.gelu(self.linear_fc1(self.pre_mlp_layernorm(hidden_states)))
        return hidden_states + self.linear_fc2(inner), None


class TransformerBlock(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(number + 1) for number in range(depth))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states)
        return hidden_states.float().square().mean()


class Arguments:
    """What Megatron calls ``args``."""

    curr_iteration = 0
    compress_activation_ctx: GlobalContext | None = None


def filter_func(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None and tensor.numel() >= 32768 and tensor.storage_offset() == 0


def compressed(forward: Any, args: Arguments) -> Any:
    """The wrapper that a feature manager puts around ``TransformerLayer.forward``."""
    layer_uuid = uuid.uuid1()

    @functools.wraps(forward)
    def wrapper(*inputs: Any, **options: Any) -> Any:
        if args.compress_activation_ctx is None:
            config = GlobalContextConfig(0, 0, [filter_func], ["matmul", "allgather", "all2all"])
            args.compress_activation_ctx = GlobalContext(config)
        ctx = args.compress_activation_ctx
        ctx.statistic = args.curr_iteration <= 3 or args.curr_iteration % 100 == 0
        order_layer_uuid = (layer_uuid, ctx.get_absolute_order(args.curr_iteration == 0))
        ctx.pack_start(order_layer_uuid)
        with CompressHook(order_layer_uuid, ctx):
            result = forward(*inputs, **options)
        result[0].register_hook(lambda gradient: ctx.unpack_start(order_layer_uuid))
        return result

    return wrapper


def new_model(device: torch.device, depth: int = 4) -> TransformerBlock:
    torch.manual_seed(0)
    return TransformerBlock(depth).to(device, torch.bfloat16)


def microbatches(device: torch.device, step: int, count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(count, 2, LENGTH, WIDTH, generator=generator)
    return list(batch.to(device, torch.bfloat16))


def pretrain(model: TransformerBlock, device: torch.device, args: Arguments) -> list[Any]:
    """A few steps of two microbatches each; the gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for args.curr_iteration in range(3):
        optimizer.zero_grad()
        for batch in microbatches(device, args.curr_iteration):
            model(batch).backward()
        found += gradients(model)
        optimizer.step()
    return found


def test_layers_wrapped_as_by_the_feature_manager_train_to_the_same_bits(device) -> None:
    expected = pretrain(new_model(device), device, Arguments())
    model, args = new_model(device), Arguments()
    for layer in model.layers:
        layer.forward = compressed(layer.forward, args)
    assert_same_gradients(pretrain(model, device, args), expected)
    ctx = args.compress_activation_ctx
    assert ctx is not None and ctx.stats().encoded_storages > 0, "nothing was compressed"
    assert ctx.stats().freed_bytes > 0, "what was compressed freed nothing"
    del model
    flush_autograd(device)
    ctx.saver.settle()
    assert_nothing_left(ctx.stats())
