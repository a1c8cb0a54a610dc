"""torch.compile around attention over a cut sequence: hooks run beside compiled code, untraced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from cut_attention import FP64
from memswap.parallel import ContextParallel
from ranks import Rank, distributed


class Core(nn.Module):
    """Causal attention, bshd."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Model(nn.Module):
    """Projections of four heads around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv = nn.Linear(16, 48, dtype=FP64)
        self.core = Core()
        self.out = nn.Linear(16, 16, dtype=FP64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(2)
        return self.out(self.core(q, k, v).flatten(2))


@distributed(2)
@pytest.mark.parametrize("mode", ["ulysses", "gather"])
def test_compiled_models_attend_as_one_process_at_any_length(rank: Rank, mode: str) -> None:
    """The second length is compiled for any length; traced hooks raised there."""
    torch._dynamo.reset()
    model, whole = Model(), Model()
    ContextParallel(ulysses=1 if mode == "gather" else None).apply(model.core, rank.mesh)
    counting: Any = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counting)
    for tokens in (16, 24, 32):
        torch.manual_seed(tokens)
        x = torch.randn(2, tokens, 16, dtype=FP64)
        mine = x.chunk(2, 1)[rank.rank].clone().requires_grad_()
        x.requires_grad_()
        found, expected = compiled(mine), whole(x)
        found.square().sum().backward()
        expected.square().sum().backward()
        same = {"rtol": 1e-11, "atol": 1e-12}
        torch.testing.assert_close(found, expected.chunk(2, 1)[rank.rank], **same)
        torch.testing.assert_close(mine.grad, x.grad.chunk(2, 1)[rank.rank], **same)
    assert counting.frame_count <= 16, "hooks were compiled as well, piece by piece"
