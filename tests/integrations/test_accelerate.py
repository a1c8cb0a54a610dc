"""accelerate: `prepare` and a manager, on one process, on two under DDP and with FSDP2."""

from __future__ import annotations

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
tiny = pytest.importorskip("tiny")

from tiny import Trained, assert_no_hooks, assert_same_bits, llama, moved  # noqa: E402

from memswap.integrations.accelerate import prepare  # noqa: E402
from memswap.integrations.states import unwrapped  # noqa: E402
from memswap.optimizers import managed_optimizer  # noqa: E402

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def _a_new_state():
    """accelerate keeps one state for a process, which refuses another precision."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def look_at_samples(model) -> None:
    """What a loop does in the middle of training: an evaluation, and a generation."""
    inner = model.module if hasattr(model, "module") else model
    model.eval()
    with torch.no_grad():
        model(input_ids=tiny.windows(2))
    inner.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
    model.train()


def train(
    accelerator, folder=None, checkpointing=False, in_step=None, rows=12, **options
) -> tuple[Trained, str]:
    model = llama()
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(tiny.windows(rows), batch_size=2)
    if folder is None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        manager = None
    else:
        options |= {"optimizer": "encode", **tiny.swapping(folder)}
        model, optimizer, loader, manager = prepare(
            accelerator, model, optimizer, loader, **options
        )
        assert managed_optimizer(unwrapped(optimizer)) is not None
    gradients, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                gradients += [
                    one.grad.clone() for one in model.parameters() if one.grad is not None
                ]
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if in_step is not None:
            in_step(model)
        if manager is not None:
            manager.wait_for_plan()
    report = ""
    if manager is not None:
        report = manager.report()
        assert (manager.plan is not None) == ("budget" in options), report
        manager.remove()
    assert_no_hooks(model)
    return Trained.of(model, gradients, losses), report


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process_gives_the_same_bits(tmp_path, precision, accumulate):
    def new():
        return accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
        )

    expected, _ = train(new())
    found, report = train(new(), tmp_path)
    assert_same_bits(found, expected)
    assert moved(report), report


@pytest.mark.parametrize(
    "options",
    [{"checkpointing": True}, {"in_step": look_at_samples}],
    ids=["checkpointing", "evaluation, generation"],
)
def test_what_else_a_loop_does_keeps_the_bits(tmp_path, options):
    expected, _ = train(accelerate.Accelerator(cpu=True), **options)
    found, report = train(accelerate.Accelerator(cpu=True), tmp_path, **options)
    assert_same_bits(found, expected)
    assert moved(report), report


def test_resuming_from_a_saved_state_gives_the_same_bits(tmp_path):
    """With the optimizer's state away while it is saved, and while it is loaded."""

    def steps(accelerator, model, optimizer):
        losses = []
        for batch in tiny.windows(4).split(2):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def whole(name, **options):
        losses, folder = [], str(tmp_path / name)
        for resumes in (False, True):
            accelerator, model = accelerate.Accelerator(cpu=True), llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if options:
                model, optimizer, manager = prepare(accelerator, model, optimizer, **options)
            else:
                model, optimizer = accelerator.prepare(model, optimizer)
            if resumes:
                accelerator.load_state(folder)
            losses += steps(accelerator, model, optimizer)
            if not resumes:
                accelerator.save_state(folder)
            if options:
                assert manager.stats().moved_storages > 0
                manager.remove()
            accelerator.free_memory()
        return Trained.of(model, [one.detach() for one in model.parameters()], losses)

    expected = whole("plain")
    assert_same_bits(whole("memswap", optimizer="encode", **tiny.swapping(tmp_path)), expected)


def test_a_loop_that_raises_and_a_cell_that_is_run_again(tmp_path):
    accelerator, model = accelerate.Accelerator(cpu=True), llama()
    prepared, manager = prepare(accelerator, model, **tiny.swapping(tmp_path))
    with pytest.raises(ArithmeticError), manager:
        prepared(input_ids=tiny.windows(2), labels=tiny.windows(2)).loss.backward()
        raise ArithmeticError
    assert_no_hooks(model)
    prepared, manager = prepare(accelerator, model, **tiny.swapping(tmp_path))
    with pytest.raises(ValueError, match="managed already"):
        prepare(accelerator, model)
    manager.remove()
    assert_no_hooks(model)


def compare(folder: str, how: str) -> None:
    """A training of one of two processes has the bits of the one without memswap."""
    plugin, accumulate = None, 2 if "accumulation" in how else 1
    if "FSDP2" in how:
        tiny.accelerate_shards_on_a_cpu()
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            activation_checkpointing="checkpointing" in how,
        )
    accelerator = accelerate.Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate
    )
    assert accelerator.num_processes == 2
    budget, rows = ({"budget": "60%"}, 48) if "budget" in how else ({}, 12)
    expected, _ = train(accelerator, rows=rows)
    accelerator.free_memory()
    found, report = train(accelerator, folder, rows=rows, **budget)
    assert_same_bits(found, expected)
    layers = "4 FSDPLlamaDecoderLayer" if plugin else "4 LlamaDecoderLayer"
    assert moved(report) and layers in report, report


@pytest.mark.parametrize(
    "how",
    [
        "DDP",
        "DDP, accumulation",
        "DDP, budget",
        "FSDP2",
        "FSDP2, checkpointing, accumulation",
        "FSDP2, budget",
    ],
)
def test_two_processes_give_the_same_bits(tmp_path, how):
    tiny.on_two_ranks(compare, str(tmp_path), how)


def test_no_model_that_trains_is_an_error():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="no model with trainable parameters"):
        prepare(accelerator, llama().requires_grad_(False))


def test_an_accelerator_that_is_left_out_is_told():
    with pytest.raises(TypeError, match="found Linear, expected an accelerate"):
        prepare(torch.nn.Linear(2, 2))


def test_a_wrong_option_is_refused_before_anything_is_prepared():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="Write '70%' for this share"):
        prepare(accelerator, torch.nn.Linear(2, 2), budget=0.7)
    assert not accelerator._models
