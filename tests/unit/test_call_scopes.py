"""ModuleHooks: each call has a scope of its own, which ends once and may change what goes by."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn

from memswap.hooks.module_hooks import AtBegin, AtEnd, ModuleHooks


def test_calls_begin_and_end_in_pairs():
    """Each call has a scope of its own, which ends once: by its end, or abandoned."""
    events = []

    class Scope:
        def __init__(self, name):
            self.name = name

        def enter(self, call):
            events.append(("enter", self.name))

        def leave(self, output):
            events.append(("leave", self.name))

        def abandon(self):
            events.append(("abandon", self.name))

    class Calls(nn.Module):
        def forward(self, *inner):
            for one in inner:
                one()

    def begin(key, module, args, kwargs):
        return Scope(key)

    hooks = ModuleHooks()
    a, b = Calls(), Calls()
    hooks.add(a, "a", begin)
    hooks.add(b, "b", begin)

    def interrupted():
        raise KeyboardInterrupt

    a(b, lambda: a(b))
    assert events == [
        ("enter", "a"),
        ("enter", "b"),
        ("leave", "b"),
        ("enter", "a"),
        ("enter", "b"),
        ("leave", "b"),
        ("leave", "a"),
        ("leave", "a"),
    ]
    events.clear()
    with pytest.raises(KeyboardInterrupt):
        a(lambda: b(interrupted))
    assert events == [("enter", "a"), ("enter", "b")]
    b()
    assert events[2:] == [("abandon", "b"), ("abandon", "a"), ("enter", "b"), ("leave", "b")]
    events.clear()
    a(hooks.remove)
    assert events == [("enter", "a"), ("abandon", "a")]
    assert len(hooks) == 0


def test_a_scope_may_change_what_a_module_gets_and_returns():
    class Scope:
        def enter(self, call):
            return (2,), {"factor": 5}

        def leave(self, output):
            return output + 1

        def abandon(self):
            raise AssertionError("the call has ended")

    class Product(nn.Module):
        def forward(self, x, factor):
            return x * factor

    hooks, module = ModuleHooks(), Product()
    hooks.add(module, None, lambda key, module, args, kwargs: Scope())
    assert module(100, factor=100) == 11
    hooks.remove()
    assert module(100, factor=100) == 10000
    hooks.add(module, None, lambda key, module, args, kwargs: AtBegin(((3,), kwargs)))
    other = ModuleHooks()
    other.add(module, None, lambda key, module, args, kwargs: AtEnd(lambda output: -output))
    assert module(100, factor=100) == -300


def test_a_scope_of_outputs_hears_of_no_call_that_raised():
    """None is an output; an exception that the caller is handling is not the call's."""
    heard = []

    class Scope:
        def __init__(self, outputs):
            self.outputs = outputs

        def enter(self, call):
            pass

        def leave(self, output):
            self.outputs.append(output)

        def abandon(self):
            self.outputs.append("abandoned")

    class Maybe(nn.Module):
        def forward(self, raises):
            if raises:
                raise ValueError("in forward")

    hooks, module = ModuleHooks(), Maybe()
    hooks.add(module, None, lambda *call: Scope(heard), abandons_raised=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="in forward"):
            module(True)
        module(False)
    try:
        raise KeyError("of the caller's")
    except KeyError:
        module(False)
        with pytest.raises(ValueError, match="in forward"):
            module(True)
    assert heard == ["abandoned", None, "abandoned", None, None, "abandoned"]


def test_hooks_of_a_copy_do_nothing_or_refuse_it():
    def refuse():
        raise NotImplementedError("copy the model first")

    events = []
    for copied in (None, refuse):
        module = nn.Identity()
        hooks = ModuleHooks(copied)
        hooks.add(module, None, lambda *call: events.append(call))
        for make in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            if copied is None:
                make(module)(1)
            else:
                with pytest.raises(NotImplementedError, match="copy the model first"):
                    make(module)
    assert not events
