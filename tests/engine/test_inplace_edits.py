"""Edits in place: what autograd refuses is refused in its words, what it allows works."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    Remember,
    assert_released,
    assert_the_same_within,
    bits,
    let_sends_end,
    look,
    new_input,
    new_stack,
    random,
    same_bits,
    train_step,
)
from subclasses import Pair

import memswap

pytestmark = pytest.mark.every_action

#: Why the tensor is where it is in backward: moved, or kept for one of the reasons to keep.
POLICIES = {
    "moved": EVERYTHING,
    "kept by the policy": memswap.Policy(action=memswap.Action.KEEP, min_bytes=1),
    "kept by a rule": memswap.Policy(min_bytes=1, exclude=("",)),
    "small": memswap.Policy(min_bytes=1 << 20),
}
EDITS = {
    "directly": lambda h: h.add_(1),
    "through a view": lambda h: h[1:2].mul_(3),
    "through detach()": lambda h: h.detach().zero_(),
    "through a view of detach()": lambda h: h.detach().view(-1)[0].fill_(9),
    "by copy_": lambda h: h.copy_(torch.ones_like(h)),
    "by out=": lambda h: torch.exp(torch.ones_like(h), out=h),
    "by an index": lambda h: h.__setitem__(0, 5.0),
}
WORDS = "one of the variables needed for gradient computation has been modified by an inplace"


def before_an_edit(engine):
    """Order what follows after the sends under way.

    A send may still read what the user edits. Nobody will ever see those bytes, for backward is
    refused, but the laboratory cannot know and reports the race.
    """
    engine._engine.settle()


def backward_is_refused(loss):
    with pytest.raises(memswap.InplaceEditError, match=WORDS):
        loss.backward()


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("policy", POLICIES)
def test_edit_after_saving_raises_in_backward(device, new_pool, policy, edit):
    pool = new_pool()
    engine = memswap.saved_tensors(POLICIES[policy], pool=pool)
    x = random(device, 4, 4).requires_grad_()
    with engine:
        h = x * 2
        loss = h.sin().sum()
    before_an_edit(engine)
    with torch.no_grad():
        EDITS[edit](h)
    backward_is_refused(loss)
    del h, loss
    assert_released(engine, pool, moved=policy == "moved")


@pytest.mark.parametrize("policy", POLICIES)
def test_edit_of_what_its_operator_might_have_filled_later_raises(device, new_pool, policy):
    """A norm's statistics are saved once another operator saves, or the block ends."""
    engine = memswap.saved_tensors(POLICIES[policy], pool=new_pool())
    x = random(device, 4, 4).requires_grad_()
    with engine:
        normed, mean, _ = torch.native_layer_norm(x, (4,), None, None, 1e-5)
        loss = normed.sum()
        mean.add_(1)
    backward_is_refused(loss)


@pytest.mark.parametrize("kept", [False, True], ids=["moved", "kept"])
def test_edit_is_noticed_even_if_the_edited_tensor_is_gone_by_backward(device, new_pool, kept):
    policy = POLICIES["kept by the policy" if kept else "moved"]
    engine = memswap.saved_tensors(policy, pool=new_pool())
    x = random(device, 4, 4).requires_grad_()
    with engine:
        h = x * 2
        loss = h.sin().sum()
    before_an_edit(engine)
    h.detach().add_(1)
    del h
    let_sends_end(engine, device)
    backward_is_refused(loss)


def test_edit_of_the_base_is_noticed_by_a_saved_view_and_the_other_way_round(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x = random(device, 4, 4).requires_grad_()
    with engine:
        base = x * 2
        loss = base[1:].sin().sum()
    before_an_edit(engine)
    with torch.no_grad():
        base[0].zero_()  # not even the saved part; autograd counts per storage, and so do we
    backward_is_refused(loss)


def test_error_is_autograds_kind_and_says_what_and_which_version(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x = random(device, 3, 5).requires_grad_()
    with engine:
        h = x * 2
        loss = h.sin().sum()
    before_an_edit(engine)
    with torch.no_grad():
        h.add_(1).add_(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    message = str(caught.value)
    assert isinstance(caught.value, memswap.MemswapError)
    assert "[3, 5]" in message and "is at version 2; expected version 0" in message, message
    del caught


@pytest.mark.parametrize("leaf", ["nn.Parameter", "leaf tensor", "view of a parameter"])
def test_edit_of_a_parameter_before_backward_raises(device, new_pool, leaf):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    weight = torch.nn.Parameter(random(device, 4, 4))
    used = weight if leaf == "nn.Parameter" else weight.t()
    if leaf == "leaf tensor":
        weight = used = random(device, 4, 4).requires_grad_()
    x = random(device, 4).requires_grad_()
    with engine:
        loss = (used * x).sum()
    with torch.no_grad():
        weight.add_(1)  # what an optimizer step does
    backward_is_refused(loss)
    assert engine.stats().kept["parameter"].tensors >= 1


def test_edit_of_a_saved_output_raises(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 4, 4).requires_grad_()
    with engine:
        y = x.exp()  # exp saves its result
        loss = y.sum()
    before_an_edit(engine)
    y.detach().add_(1)
    backward_is_refused(loss)
    del y, loss
    assert_released(engine, pool)


def test_what_autograd_allows_to_edit_works(device, new_pool):
    """An edit before the save, after a save that is not needed, and by an operator itself."""
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 6, 6).requires_grad_()

    def loss():
        h = x * 2
        h.relu_()  # saves its result, after the edit
        h = h.clone().add_(1).mul_(random(device, 6, 6, seed=2))  # saves the other factor only
        part = torch.zeros(8, 6, device=device)
        part[1:7] = h  # an edit before sin saves it
        part[0].fill_(3)
        y = part.sin()
        y += 1  # sin does not need its result
        return y.cos().exp_().sum()

    assert_the_same_within(engine, pool, x, loss, steps=3)


def test_edit_between_two_saves_gives_each_graph_its_own_content(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = torch.zeros(4, device=device, requires_grad=True)
    seen: list = []
    buffer = random(device, 64, seed=0)
    with engine:
        first = Remember.apply(x, seen, buffer)
        first.backward(torch.ones_like(first))  # consumed before the edit
        del first
        buffer.mul_(2)  # the same storage at the same address with other content
        second = Remember.apply(x, seen, buffer)
    wanted = bits(random(device, 64, seed=0) * 2).numpy().tobytes()
    del buffer
    second.backward(torch.ones_like(second))
    assert seen[1].content == wanted, "the second graph got what the first one had saved"
    assert engine.stats().deduplicated_tensors == 0, (
        "an edited storage was taken for the one before"
    )
    del second
    assert_released(engine, pool)


def test_edit_between_two_saves_breaks_the_first_graph_only(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 8).requires_grad_()
    with engine:
        h = (x * 2).detach()
        first = (x * h).sum()
        before_an_edit(engine)
        h.add_(1)
        second = (x * h).sum()
    expected = random(device, 8) * 2 + 1
    del h
    let_sends_end(engine, device)
    backward_is_refused(first)
    x.grad = None
    second.backward()
    assert same_bits(x.grad, expected), "a graph that saved after the edit got other content"
    del first, second
    assert_released(engine, pool)


def test_edit_after_the_graph_was_consumed_is_free(device, new_pool):
    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 16).requires_grad_()
    buffer = torch.zeros(16, device=device)
    for step in range(4):
        with torch.no_grad():
            buffer.copy_(random(device, 16, seed=step))  # a preallocated input, refilled every step
        with engine:
            loss = (x * buffer).sum()
        loss.backward()
        assert same_bits(x.grad, random(device, 16, seed=step)), f"step {step} saw old content"
        x.grad = None
    del loss
    assert_released(engine, pool)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_steps_between_training_steps(device, new_pool, way, make):
    from helpers import Training

    def train(swapped):
        model = new_stack(device)
        training = Training(way, model, new_pool()) if swapped else None
        optimizer = make(model.parameters(), lr=0.1)
        for step in range(3):
            x = new_input(device, seed=step)
            train_step(model, lambda: training.loss(x) if training else model(x))
            optimizer.step()
        if training:
            training.assert_released()
        return [p.detach() for p in model.parameters()]

    for ours, plain in zip(train(True), train(False), strict=True):
        assert same_bits(ours, plain), "a parameter differs after three optimizer steps"


@pytest.mark.parametrize("first", ["edit, then use", "use, then edit"])
def test_edit_through_a_tensor_that_came_back_is_noticed(device, new_pool, first):
    """A backward that edits what it unpacked would change what a second backward sees."""

    class Vandal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.save_for_backward(other)
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            (other,) = ctx.saved_tensors
            other.add_(1)
            return gradient * 1, None

    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 8).requires_grad_()
    with engine:
        h = (x * 2).detach()
        # Backward scopes what was computed last first.
        if first == "edit, then use":
            product = x * h
            loss = (Vandal.apply(x, h) + product).sum()
        else:
            vandal = Vandal.apply(x, h)
            loss = (vandal + x * h).sum()
    expected = h * 1
    product = vandal = None
    del h, product, vandal
    let_sends_end(engine, device)
    try:
        loss.backward()
    except RuntimeError as error:
        assert WORDS in str(error)
    else:
        assert same_bits(x.grad, 1 + expected), "an edit of a returned tensor reached another save"
    del loss
    assert_released(engine, pool)


def test_edit_of_a_tensor_that_came_back_does_not_reach_the_second_backward(device, new_pool):
    class Vandal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seen, other):
            ctx.save_for_backward(other)
            ctx.seen = seen
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            (other,) = ctx.saved_tensors
            ctx.seen.append(look(other))
            other.add_(1)
            return gradient * 1, None, None

    pool = new_pool()
    engine = memswap.saved_tensors(EVERYTHING, pool=pool)
    x = random(device, 8).requires_grad_()
    seen: list = []
    with engine:
        loss = Vandal.apply(x, seen, random(device, 8, seed=1)).sum()
    let_sends_end(engine, device)
    loss.backward(retain_graph=True)
    try:
        loss.backward()
    except RuntimeError as error:
        assert WORDS in str(error)  # what autograd itself would do
    else:
        assert seen[1].content == seen[0].content, (
            "the second backward saw an edited save, silently"
        )
    del loss
    assert_released(engine, pool)


def test_edit_of_one_part_of_a_wrapper_subclass_is_noticed(device, new_pool):
    engine = memswap.saved_tensors(EVERYTHING, pool=new_pool())
    x = Pair(random(device, 4), random(device, 4, seed=1)).requires_grad_()
    with engine:
        h = x * 2
        loss = h.sin()
    before_an_edit(engine)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(memswap.InplaceEditError, match=WORDS):
        loss.backward(Pair(torch.ones(4, device=device), torch.ones(4, device=device)))


@pytest.mark.cpu_only
def test_edit_of_a_nested_tensor_of_torchs_strided_layout_is_refused_in_autograds_words(device):
    """It has no one size to be described by."""
    rows = [random(device, 2, 3), random(device, 4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.strided).requires_grad_()
    with memswap.saved_tensors(EVERYTHING) as engine:
        y = nested * 1
        z = y * y
    before_an_edit(engine)
    y.mul_(2)
    with pytest.raises(memswap.InplaceEditError, match=WORDS) as refused:
        torch.nested.to_padded_tensor(z, 0.0).sum().backward()
    assert "[[2, 3], [4, 3]]" in str(refused.value)
