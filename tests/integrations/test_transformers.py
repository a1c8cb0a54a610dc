"""transformers' Trainer with the callback: the bits of without it, and no hooks left."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tiny = pytest.importorskip("tiny")

from tiny import Trained, assert_no_hooks, assert_same_bits, examples, llama, moved  # noqa: E402

from memswap.integrations.transformers import MemswapCallback  # noqa: E402

pytestmark = pytest.mark.cpu_only


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of each step, and what a test does in the middle of training."""

    def __init__(self, in_step=None):
        self.kept: list[torch.Tensor] = []
        self.in_step = in_step

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.kept += [one.grad.clone() for one in model.parameters() if one.grad is not None]

    def on_step_end(self, args, state, control, model, **kwargs):
        if self.in_step is not None:
            self.in_step(state, control, model)


def new_trainer(
    folder, callbacks, *, model=None, steps=4, optimizer="adamw_torch", **options
) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy=options.pop("save_strategy", "no"),
        use_cpu=True,
        disable_tqdm=True,
        optim=optimizer,
        **options,
    )
    return transformers.Trainer(
        model=llama() if model is None else model,
        args=arguments,
        train_dataset=examples(16),
        eval_dataset=examples(4),
        callbacks=callbacks,
    )


def train(folder, callback=None, in_step=None, resume=None, **options: Any) -> Trained:
    gradients = Gradients(in_step)
    trainer = new_trainer(folder, [gradients, *([callback] if callback else [])], **options)
    trainer.train(resume_from_checkpoint=resume)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert_no_hooks(trainer.model)
    return Trained.of(trainer.model, gradients.kept, losses)


def generate(state, control, model):
    """What a user does to look at samples in the middle of training."""
    model.eval()
    model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
    model.train()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param(
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            id="reentrant checkpointing",
        ),
        pytest.param({"gradient_accumulation_steps": 3}, id="accumulation"),
        pytest.param({"bf16": True}, id="bf16"),
        pytest.param({"eval_strategy": "steps", "eval_steps": 2}, id="evaluation"),
        pytest.param({"in_step": generate}, id="generation"),
        pytest.param({"neftune_noise_alpha": 5.0}, id="neftune"),
        pytest.param({"max_grad_norm": 0.1, "optimizer": "sgd"}, id="clipping, SGD"),
    ],
)
def test_trainer_gives_the_same_bits(tmp_path, options):
    expected = train(tmp_path, **options)
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(train(tmp_path, callback, **options), expected)
    assert moved(callback.report()), f"nothing moved:\n{callback.report()}"
    assert callback.manager is None


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "mixtral", "mamba", "vit"])
def test_layers_are_found_in_models_of_every_kind(tmp_path, kind):
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    callback.begin(tiny.of_kind(kind))
    with callback:
        assert len(callback.manager.units) > 1, callback.report()


def test_a_configuration_of_plain_values(tmp_path):
    expected = train(tmp_path, bf16=True)
    callback = MemswapCallback.from_config({"action": "encode", "min_bytes": "1KiB"})
    assert_same_bits(train(tmp_path, callback, bf16=True), expected)
    assert moved(callback.report())
    with pytest.raises(ValueError, match="found the option 'bugdet', expected budget"):
        MemswapCallback.from_config({"bugdet": "70%"})


def test_a_budget_is_planned_and_met(tmp_path):
    expected = train(tmp_path, steps=12)
    callback = MemswapCallback(budget="60%", **tiny.swapping(tmp_path))
    plans = []

    def look(state, control, model):
        if callback.manager is not None:
            callback.manager.wait_for_plan()
            plans.append(callback.manager.plan)

    assert_same_bits(train(tmp_path, callback, look, steps=12), expected)
    assert plans[-1] is not None, "twelve steps led to no plan"


def test_what_was_moved_stands_beside_the_loss(tmp_path):
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    trainer = new_trainer(tmp_path, [callback])
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 4 and all(log["memswap_moved_mib"] > 0 for log in logs)


def test_resuming_from_a_checkpoint_gives_the_same_bits(tmp_path):
    def whole(name, callback=None):
        folder = tmp_path / name
        train(folder, callback, steps=2, save_strategy="steps", save_steps=2)
        return train(folder, callback, steps=4, resume=str(folder / "checkpoint-2"))

    expected = whole("plain")
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(whole("memswap", callback), expected)
    assert moved(callback.report())


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_the_optimizers_state_is_away_between_steps(tmp_path, optimizer):
    """Through a checkpoint and a training that resumes from it, with the same bits."""
    away = []

    def whole(name, callback=None):
        def look(state, control, model):
            if callback is not None:
                away.append(callback.metrics()["memswap_optimizer_away_mib"])

        folder = tmp_path / name
        options = {"optimizer": optimizer, "save_strategy": "steps", "save_steps": 2}
        train(folder, callback, look, steps=2, **options)
        resume = str(folder / "checkpoint-2")
        found = train(folder, callback, look, steps=4, resume=resume, **options)
        last = torch.load(folder / "checkpoint-4" / "optimizer.pt", weights_only=True)
        return found, last["state"]

    expected, expected_state = whole("plain")
    config = {"optimizer": "swap" if optimizer == "sgd" else "on", "action": "keep"}
    callback = MemswapCallback.from_config(config)
    found, state = whole("memswap", callback)
    assert_same_bits(found, expected)
    for number, one in expected_state.items():
        for name, tensor in one.items():
            ours = state[number][name]
            assert tensor is None or tiny.bits(ours).equal(tiny.bits(tensor)), f"{name} differs"
    if optimizer == "sgd":
        assert set(away) == {0}, "an optimizer without a state has some away"
    else:
        assert min(away) > 0.2, away
        assert "of state" in callback.report()
        assert "memswap_optimizer_away_mib" not in callback.metrics()


def test_a_live_line_says_what_was_done_so_far(tmp_path, capsys):
    callback = MemswapCallback(live=True, **tiny.swapping(tmp_path))
    train(tmp_path, callback)
    shown = capsys.readouterr().err
    assert shown.count("memswap: ") >= 2 and " moved, peak " in shown
    train(tmp_path, MemswapCallback(**tiny.swapping(tmp_path)))
    assert "memswap: " not in capsys.readouterr().err


def test_an_optimizer_option_that_is_none_is_refused():
    with pytest.raises(ValueError, match="found optimizer='sawp', expected True or one of"):
        MemswapCallback(optimizer="sawp")
    with pytest.raises(ValueError, match="optimizer_pool= without optimizer="):
        import memswap

        MemswapCallback(optimizer_pool=memswap.HostPool())


def test_an_early_stop_takes_the_hooks_off(tmp_path):
    def stop(state, control, model):
        control.should_training_stop = state.global_step == 2

    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert len(train(tmp_path, callback, stop).losses) == 2
    assert moved(callback.report())


class StoppedError(Exception):
    """What the middle of a training raises here."""


def fail(state, control, model):
    raise StoppedError


@pytest.mark.parametrize("error", [StoppedError, KeyboardInterrupt])
def test_after_an_exception_the_next_forward_finds_no_hooks(tmp_path, error):
    def fail(state, control, model):
        raise error

    callback = MemswapCallback(**tiny.swapping(tmp_path))
    model = llama()
    with pytest.raises(error):
        train(tmp_path, callback, fail, model=model)
    model(torch.arange(3, 9)[None])
    assert_no_hooks(model)
    assert moved(callback.report()) and callback.manager is None


def test_a_with_block_takes_the_hooks_off_at_once_where_training_raises(tmp_path):
    model = llama()
    with pytest.raises(StoppedError), MemswapCallback(**tiny.swapping(tmp_path)) as callback:
        train(tmp_path, callback, fail, model=model)
    assert_no_hooks(model)


def test_a_cell_that_is_run_again_manages_the_same_model_again(tmp_path):
    """Its training raised, and its Trainer and its callback are others the second time."""
    expected = train(tmp_path)
    model = llama()
    with pytest.raises(StoppedError):
        train(tmp_path, MemswapCallback(**tiny.swapping(tmp_path)), fail, model=model)
    model.load_state_dict(llama().state_dict())
    model.zero_grad()
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(train(tmp_path, callback, model=model), expected)


def test_several_trainings_in_one_process_with_one_callback(tmp_path):
    expected = train(tmp_path)
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    for _ in range(2):
        assert_same_bits(train(tmp_path, callback), expected)
        assert moved(callback.report())


def test_a_model_that_somebody_manages_already_is_refused(tmp_path):
    import memswap

    model = llama()
    with memswap.manage(model), pytest.raises(ValueError, match="managed already"):
        train(tmp_path, MemswapCallback(), model=model)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
def test_layers_that_inductor_compiled_keep_every_bit(tmp_path):
    def compiled():
        torch._dynamo.reset()
        model = llama(layers=2)
        for layer in model.model.layers:
            layer.compile()
        return model

    expected = train(tmp_path, model=compiled())
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(train(tmp_path, callback, model=compiled()), expected)
    assert moved(callback.report())


def test_a_model_that_is_compiled_as_a_whole_keeps_its_bits(tmp_path):
    torch._dynamo.reset()
    compiles = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    expected = train(tmp_path, **compiles)
    torch._dynamo.reset()
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(train(tmp_path, callback, **compiles), expected)
    assert moved(callback.report())
    assert "compiled as a whole" in callback.report()


def test_two_callbacks_in_one_training_are_refused(tmp_path):
    callbacks = [MemswapCallback(), MemswapCallback()]
    trainer = new_trainer(tmp_path, callbacks)
    with pytest.raises(ValueError, match="managed already"):
        trainer.train()


def test_a_saved_and_loaded_model_has_no_hooks(tmp_path):
    import copy

    model = llama()
    twins = []

    def copied(state, control, model):
        twins.append(copy.deepcopy(model))

    train(tmp_path, MemswapCallback(**tiny.swapping(tmp_path)), copied, model=model, steps=1)
    twins[0](torch.arange(3, 9)[None])
    assert set(twins[0].state_dict()) == set(model.state_dict())
