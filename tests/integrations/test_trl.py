"""TRL's trainers with the same callback: SFT, DPO, GRPO and LoRA, with the bits of without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
tiny = pytest.importorskip("tiny")

from datasets import Dataset  # noqa: E402
from test_transformers import Gradients  # noqa: E402
from tiny import Trained, assert_no_hooks, assert_same_bits, llama, moved  # noqa: E402

from memswap.integrations.transformers import MemswapCallback  # noqa: E402

pytestmark = pytest.mark.cpu_only

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}


def lines(count: int) -> list[str]:
    """Lines of Python's own sources."""
    text = tiny.read_corpus(1 << 16).decode("utf-8", "ignore")
    return [line for line in text.splitlines() if len(line) > 30][:count]


def settings(kind: type, folder, **options: Any) -> Any:
    return kind(
        output_dir=str(folder),
        max_steps=options.pop("max_steps", 3),
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=options.pop("bf16", False),
        disable_tqdm=True,
        **options,
    )


def sft(folder, callbacks, lora, **options):
    options = {"max_length": 64, **options}
    return trl.SFTTrainer(
        llama(),
        args=settings(trl.SFTConfig, folder, **options),
        train_dataset=Dataset.from_dict({"text": lines(12)}),
        eval_dataset=Dataset.from_dict({"text": lines(4)}),
        processing_class=tiny.tokenizer(),
        peft_config=peft.LoraConfig(**LORA) if lora else None,
        callbacks=callbacks,
    )


def dpo(folder, callbacks, lora, **options):
    texts = lines(24)
    pairs = {
        "prompt": [text[:10] for text in texts[:12]],
        "chosen": [text[10:] for text in texts[:12]],
        "rejected": [text[10:] for text in texts[12:]],
    }
    return trl.DPOTrainer(
        llama(),
        ref_model=None if lora else llama(),  # with LoRA it is the model without its adapter
        args=settings(trl.DPOConfig, folder, max_length=64, **options),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=tiny.tokenizer(),
        peft_config=peft.LoraConfig(**LORA) if lora else None,
        callbacks=callbacks,
    )


def grpo(folder, callbacks, lora, **options):
    def length(completions, **kwargs):
        return [float(len(set(one))) for one in completions]

    return trl.GRPOTrainer(
        llama(),
        reward_funcs=length,
        args=settings(
            trl.GRPOConfig, folder, num_generations=2, max_completion_length=12, **options
        ),
        train_dataset=Dataset.from_dict({"prompt": [text[:16] for text in lines(12)]}),
        processing_class=tiny.tokenizer(),
        peft_config=peft.LoraConfig(**LORA) if lora else None,
        callbacks=callbacks,
    )


def train(make, folder, callback=None, lora=False, **options: Any) -> Trained:
    gradients = Gradients()
    trainer = make(folder, [gradients, *([callback] if callback else [])], lora, **options)
    torch.manual_seed(0)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert_no_hooks(trainer.model)
    return Trained.of(trainer.model, gradients.kept, losses)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_trainers_of_trl_give_the_same_bits(tmp_path, make, lora):
    expected = train(make, tmp_path, lora=lora)
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(train(make, tmp_path, callback, lora), expected)
    assert moved(callback.report()), f"nothing moved:\n{callback.report()}"
    assert "4 LlamaDecoderLayer" in callback.report()


#: TRL's trainers checkpoint their layers unless they are told not to.
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(
            sft,
            {"packing": True, "gradient_accumulation_steps": 2},
            id="sft, packing",
        ),
        pytest.param(
            sft,
            {"gradient_checkpointing": False, "eval_strategy": "steps", "eval_steps": 1},
            id="sft, evaluation, no checkpointing",
        ),
        pytest.param(sft, {"bf16": True, "gradient_checkpointing": False}, id="sft, bf16"),
        pytest.param(
            dpo,
            {"gradient_accumulation_steps": 2, "gradient_checkpointing": False},
            id="dpo, accumulation, no checkpointing",
        ),
        pytest.param(dpo, {"bf16": True}, id="dpo, bf16"),
        pytest.param(
            grpo,
            {"gradient_accumulation_steps": 2, "gradient_checkpointing": False},
            id="grpo, accumulation, no checkpointing",
        ),
        pytest.param(grpo, {"num_iterations": 2, "bf16": True}, id="grpo, iterations, bf16"),
    ],
)
def test_what_else_a_trainer_does_keeps_the_bits(tmp_path, make, options):
    expected = train(make, tmp_path, **options)
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(train(make, tmp_path, callback, **options), expected)
    assert moved(callback.report()), callback.report()


def test_several_trainings_in_one_process_with_one_callback(tmp_path):
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    for make in (sft, dpo):
        assert_same_bits(train(make, tmp_path, callback), train(make, tmp_path))
        assert moved(callback.report()), callback.report()


def test_two_that_move_the_same_tensors_are_refused(tmp_path):
    """TRL's own looks for an accelerator before training begins, so the callback is asked here."""
    arguments = settings(trl.SFTConfig, tmp_path, activation_offloading=True)
    model = llama()
    with pytest.raises(ValueError, match="activation_offloading=True"):
        MemswapCallback().on_train_begin(arguments, None, None, model=model)
    assert_no_hooks(model)
