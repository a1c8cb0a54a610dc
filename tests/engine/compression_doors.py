"""The two doors to compression that its tests try, and one layer's region by hand."""

from __future__ import annotations

from typing import Any

import torch
from helpers import Look, Remember
from torch import nn

import memswap
from memswap import Action, Policy, Windows
from memswap.compat.mindspeed import CompressHook, GlobalContext, GlobalContextConfig

ENCODE = Policy(action=Action.ENCODE, min_bytes=1)


class Door:
    """A model's layers under one of the two."""

    def __init__(self, kind: str, layers: Any) -> None:
        self.kind, self.layers = kind, layers
        if kind == "manage":
            self.manager = memswap.manage(
                layers,
                ENCODE,
                windows=Windows(seconds=lambda op, shapes: 1e-3),
                prefetch_bytes="8KiB",
            )
            self.stats, self.windows = self.manager.stats, self.manager.window_stats
            self.engine = self.manager._engine
        else:
            self.ctx = GlobalContext(GlobalContextConfig())
            self.ctx.engine.policy = ENCODE
            self.stats, self.windows = self.ctx.stats, self.ctx.window_stats
            self.engine = self.ctx.engine
            for layer in layers:
                self.wrap(layer)

    def wrap(self, layer: nn.Module) -> None:
        """What an adaptor makes of a layer's forward."""
        forward, ctx, uuid = layer.forward, self.ctx, id(layer)

        def wrapped(*args: Any) -> Any:
            key = (uuid, ctx.get_absolute_order(is_first_step=False))
            ctx.pack_start(key)
            with CompressHook(key, ctx):
                result = forward(*args)
            if result.grad_fn is not None:
                result.register_hook(lambda gradient: ctx.unpack_start(key))
            return result

        layer.forward = wrapped  # type: ignore[method-assign]

    def remove(self) -> None:
        if self.kind == "manage":
            self.manager.remove()
        else:
            for layer in self.layers:
                del layer.forward
            self.engine.settle()

    # What `let_sends_end` asks for.
    @property
    def _engine(self) -> Any:
        return self.engine


class Region:
    """What a managed layer is inside, around one operator."""

    def __init__(self, device: torch.device) -> None:
        self.ctx = GlobalContext(GlobalContextConfig())
        self.ctx.engine = Windows().engine(
            ENCODE, None, 0
        )  # nothing stays for being needed at once
        self.device = device
        self.seen: list[Look] = []

    def settled(self) -> memswap.types.Stats:
        """The statistics when all that was started has ended."""
        self.ctx.engine._transfers.settle()  # `settle` would forget what waits
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.ctx.stats()

    def save(self, *tensors: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(4, device=self.device, requires_grad=True)
        with CompressHook("layer", self.ctx):
            return Remember.apply(x, self.seen, *tensors)
