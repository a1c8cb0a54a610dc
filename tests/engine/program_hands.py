"""Hands and policies that decide at random, for `programs.py`."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import torch

import memswap
from memswap import Action, CheckpointPolicy

ACTIONS = tuple(Action)


class Mixed:
    """Another action for each size and unit; the same in each step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, tensor: torch.Tensor, info: memswap.TensorInfo) -> Action:
        return ACTIONS[self._number(info.unit, info.storage_nbytes, tensor.dim()) % len(ACTIONS)]

    def of_operator(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decisions = tuple(CheckpointPolicy)
        return decisions[self._number(str(op)) % len(decisions)]

    def _number(self, *facts: Any) -> int:
        return zlib.crc32(repr((self.seed, *facts)).encode())


class ByHand:
    """Groups that are moved at arbitrary times, as far as that is legal."""

    def __init__(
        self, policy: memswap.Policy, options: dict[str, Any], choose: random.Random
    ) -> None:
        self.engine = memswap.Groups(policy, **options)
        self.groups = [self.engine.new("first"), self.engine.new("second")]
        self.choose = choose
        self.batchs: list[Any] = []

    def stats(self) -> memswap.types.Stats:
        return self.engine.stats()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self.choose.choice(self.groups) as batch:
            if self.choose.random() < 0.2:
                with self.choose.choice(self.groups):
                    yield
            else:
                yield
        if not torch.is_grad_enabled():
            return
        self.batchs = [*self.batchs[-3:], batch]
        for _ in range(self.choose.randint(0, 8)):
            one = self.choose.choice(self.batchs)
            calls = (one.launch_offload, one.wait_offload, one.launch_load, one.wait_load)
            with contextlib.suppress(memswap.GroupError):
                self.choose.choice(calls)()
