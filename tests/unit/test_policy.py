"""Policy: which saved tensors move, decided and checked in one place."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

import memswap
from memswap import Action, Policy, TensorInfo

INFO = TensorInfo("layers.3", 400, 800)


def test_default_leaves_the_action_to_the_device_for_everything_of_64_kib_or_more():
    policy = Policy()
    assert policy.action is None
    assert policy.min_bytes == 65536
    assert policy.covers("any") and policy.covers("")
    assert policy.decide(torch.zeros(1), INFO) is None
    assert Policy(action=Action.ENCODE).decide(torch.zeros(1), INFO) is Action.ENCODE
    assert Policy(action="encode_swap").action is Action.ENCODE_SWAP, "a name is as good"


def test_policy_is_frozen_and_can_be_compared_and_pickled():
    policy = Policy(min_bytes=5, include="a*")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.min_bytes = 6
    assert policy == Policy(min_bytes=5, include=("a*",))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert dataclasses.replace(policy, min_bytes=7).include == ("a*",)


@pytest.mark.parametrize(
    ("options", "covered", "left_out"),
    [
        ({"include": "layers.*"}, ["layers.0", "layers.11"], ["head", "", "Layers.0"]),
        ({"exclude": "layers.*"}, ["head", ""], ["layers.0"]),
        ({"include": ("a", "b"), "exclude": ("b",)}, ["a"], ["b", "c"]),
        ({"include": ["[0-3]"]}, ["0", "3"], ["4", "12"]),
        ({"include": ()}, ["anything"], []),
        ({"exclude": ("*",)}, [], ["", "anything"]),
        ({"include": "block?"}, ["block1"], ["block", "block10"]),
    ],
)
def test_patterns_on_unit_names(options, covered, left_out):
    policy = Policy(**options)
    assert [name for name in covered if not policy.covers(name)] == []
    assert [name for name in left_out if policy.covers(name)] == []


def test_one_pattern_may_be_given_as_a_string():
    assert Policy(include="abc").include == ("abc",), "a string was taken apart into letters"
    assert Policy(exclude="abc").exclude == ("abc",)


def test_patterns_may_come_from_a_generator():
    policy = Policy(include=(name for name in ("a", "b")), operators=(one for one in ("x::y",)))
    assert policy.include == ("a", "b"), "what checked the patterns has used them up"
    assert policy.operators == ("x::y",)


def test_function_decides_with_tensor_and_information():
    asked = []

    def decide(tensor, info):
        asked.append((tuple(tensor.shape), info))
        return Action.KEEP

    assert Policy(fn=decide).decide(torch.zeros(3, 4), INFO) is Action.KEEP
    assert asked == [((3, 4), INFO)]
    assert (INFO.unit, INFO.nbytes, INFO.storage_nbytes) == ("layers.3", 400, 800)


def test_function_overrules_the_action():
    policy = Policy(action=Action.KEEP, fn=lambda tensor, info: Action.SWAP)
    assert policy.decide(torch.zeros(1), INFO) is Action.SWAP


@pytest.mark.parametrize("returned", [None, "swap", 1, True, [Action.SWAP]])
def test_function_that_returns_no_action_is_told_what_it_returned(returned):
    policy = Policy(fn=lambda tensor, info: returned)
    with pytest.raises(TypeError, match=r"expected a memswap\.Action") as caught:
        policy.decide(torch.zeros(1), INFO)
    assert repr(returned) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"action": 1}, TypeError, "memswap.Action"),
        ({"min_bytes": -1}, ValueError, r"min_bytes=.*cannot be negative, found -1"),
        ({"min_bytes": "64 pages"}, ValueError, r"min_bytes=.*found '64 pages'"),
        ({"min_bytes": None}, ValueError, r"min_bytes=.*found None"),
        ({"min_bytes": 1.5}, ValueError, r"min_bytes=.*found 1\.5"),
        ({"include": 3}, TypeError, "include"),
        ({"include": (1, 2)}, TypeError, "include"),
        ({"exclude": [None]}, TypeError, "exclude"),
        ({"fn": "function"}, TypeError, "fn="),
    ],
)
def test_wrong_arguments_are_refused_in_clear_words(options, error, words):
    with pytest.raises(error, match=words):
        Policy(**options)


def test_min_bytes_may_be_a_size_with_a_unit():
    assert Policy(min_bytes="1.5MiB") == Policy(min_bytes=3 << 19)


def test_zero_min_bytes_is_everything():
    assert Policy(min_bytes=0).min_bytes == 0


def test_names_are_public():
    for name in ("Policy", "Action", "TensorInfo"):
        assert name in memswap.__all__
    assert [action.name for action in Action] == [
        "KEEP", "ENCODE", "SWAP", "ENCODE_SWAP", "RECOMPUTE",
    ]  # fmt: skip
