"""torchtitan: a specification whose Llama is managed, as torchtitan's Trainer calls it.

The Trainer itself needs an accelerator, and so does its language models' attention. So its own
model is trained here with its own attention for images, in the order in which its Trainer does it.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchtitan")
pytest.importorskip("triton", reason="torchtitan imports it")
tiny = pytest.importorskip("tiny")

from tiny import Trained, assert_no_hooks, assert_same_bits, moved  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402

from memswap.integrations.torchtitan import managed  # noqa: E402

pytestmark = pytest.mark.cpu_only


def new_spec():
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def checkpointed(model) -> None:
    """As torchtitan's parallelize functions do it: each block is wrapped."""
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


def compiled(model) -> None:
    """As its `apply_compile`: each block by itself, as one graph."""
    torch._dynamo.reset()
    for block in model.layers.children():
        block.compile(backend="aot_eager", fullgraph=True)


def sharded(model) -> None:
    """As its `apply_fsdp`: each block by itself, and the rest."""
    for block in model.layers.children():
        fully_shard(block)
    fully_shard(model)


def train(spec, parts=1, rows=2, prepare=(), dtype=None) -> Trained:
    """What torchtitan's Trainer does with a specification, in its order."""
    torch.manual_seed(0)
    models = [spec.model.build() for _ in range(parts)]
    for model in models:
        model.init_states()
        for one in prepare:
            one(model)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn(optimizers, models, None)
    gradients, losses = [], []
    for batch in tiny.windows(3 * rows, 33).split(rows):
        for model, optimizer in zip(models, optimizers, strict=True):
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                logits = model(batch[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            gradients += [one.grad.clone() for one in model.parameters()]
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn.end()
    for model in models:
        assert_no_hooks(model)
    return Trained.of(torch.nn.ModuleList(models), gradients, losses)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_managed_specification_gives_the_same_bits(tmp_path, parts):
    expected = train(new_spec(), parts)
    spec = managed(new_spec(), optimizer=True, **tiny.swapping(tmp_path))
    assert_same_bits(train(spec, parts), expected)
    report = spec.post_optimizer_build_fn.report()
    assert report.count("as frames") == parts, report
    assert moved(report) and f"{6 * parts} Llama3TransformerBlock" in report, report


@pytest.mark.parametrize(
    "options",
    [
        {"prepare": [checkpointed]},
        {"prepare": [compiled]},
        {"prepare": [checkpointed, compiled]},
        {"dtype": torch.bfloat16},
    ],
    ids=["checkpointing", "compile", "checkpointing, compile", "bf16"],
)
def test_how_torchtitan_prepares_a_model_keeps_the_bits(tmp_path, options):
    expected = train(new_spec(), **options)
    spec = managed(new_spec(), **tiny.swapping(tmp_path))
    assert_same_bits(train(spec, **options), expected)
    report = spec.post_optimizer_build_fn.report()
    assert moved(report) and "units: 6 " in report, report


def compare_sharded(folder: str) -> None:
    """A training of one of two ranks has the bits of the one without memswap."""
    torch.distributed.init_process_group("gloo")
    expected = train(new_spec(), prepare=[sharded])
    spec = managed(new_spec(), optimizer=True, **tiny.swapping(folder))
    assert_same_bits(train(spec, prepare=[sharded]), expected)
    report = spec.post_optimizer_build_fn.report()
    assert moved(report) and "6 FSDPLlama3TransformerBlock" in report, report
    assert report.count("as frames") == 1, report


def test_two_ranks_that_shard_the_weights_keep_the_bits(tmp_path):
    tiny.on_two_ranks(compare_sharded, str(tmp_path))


def test_what_the_specification_called_there_is_still_called(tmp_path):
    spec, called = new_spec(), []
    spec.post_optimizer_build_fn = lambda *arguments: called.append(arguments)
    train(managed(spec))
    assert len(called) == 1 and len(called[0]) == 3


def test_what_is_no_specification_is_refused():
    with pytest.raises(TypeError, match="found Linear, expected a ModelSpec"):
        managed(torch.nn.Linear(2, 2))
