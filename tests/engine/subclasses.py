"""Tensor subclasses to test with."""

from __future__ import annotations

import torch


class Pair(torch.Tensor):
    """A wrapper subclass of two equal tensors; operators run on both."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            a.size(),
            strides=a.stride(),
            dtype=a.dtype,
            device=a.device,
            requires_grad=a.requires_grad,
        )

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], {"note": "context"}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        assert context == {"note": "context"}, "the context of a subclass was lost"
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def run(part):
            def pick(value):
                return getattr(value, part) if isinstance(value, Pair) else value

            tree = torch.utils._pytree.tree_map
            return function(*tree(pick, args), **tree(pick, kwargs or {}))

        a, b = run("a"), run("b")
        inplace = function._schema.name.endswith("_")
        if inplace:
            return args[0]
        return Pair(a, b) if isinstance(a, torch.Tensor) else a


class Opaque(torch.Tensor):
    """A wrapper subclass that cannot be taken apart."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def pick(value):
            return value.inner if isinstance(value, Opaque) else value

        tree = torch.utils._pytree.tree_map
        out = function(*tree(pick, args), **tree(pick, kwargs or {}))
        return Opaque(out) if isinstance(out, torch.Tensor) else out
