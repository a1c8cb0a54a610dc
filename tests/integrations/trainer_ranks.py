"""One of several ranks that train with transformers' Trainer, plain and managed.

    torchrun --nproc-per-node 2 trainer_ranks.py DDP|FSDP2 FOLDER

Fails where a rank's gradients, weights or losses have other bits with memswap than without. Writes
how many reports memswap's log had on this rank to FOLDER/<rank>/reports, and the plan that was made
for all ranks to FOLDER/<rank>/plan.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from tiny import Trained, assert_no_hooks, assert_same_bits, examples, llama, moved

from memswap.integrations.transformers import MemswapCallback

LAYERS = {"DDP": "4 LlamaDecoderLayer", "FSDP2": "4 FSDPLlamaDecoderLayer"}
REPORTS = "reports"
PLAN = "plan"
BUDGETED_STEPS = 12  # enough for a plan, and to follow it
STEPS_TOGETHER = 20  # the same where ranks agree on when

#: What a training is like, by the options of its arguments.
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, checkpointing": {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
    },
    "bf16": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
}


class Looks(transformers.TrainerCallback):
    """Keeps this rank's own part of each gradient, and waits for a plan after each step."""

    def __init__(self, callback: MemswapCallback | None) -> None:
        self.gradients: list[torch.Tensor] = []
        self.callback = callback
        self.plan: Any = None
        self.found = ""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients += [one.grad.clone() for one in model.parameters()]

    def on_step_end(self, args, state, control, model, **kwargs):
        if self.callback is not None and self.callback.manager is not None:
            self.plan = self.callback.manager.wait_for_plan()
            self.found = str(self.callback.report())


class Reports(logging.Handler):
    """Counts the reports in a log."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += moved(record.getMessage())


def output(folder: Path, callback: MemswapCallback | None) -> Path:
    """Where checkpoints go: one folder for all ranks."""
    return folder.parent / ("plain" if callback is None else "managed")


def train(
    how: str,
    folder: Path,
    callback: MemswapCallback | None = None,
    resumes: str | None = None,
    **options: Any,
) -> tuple[Trained, Looks]:
    if how == "FSDP2":
        options["fsdp"] = True
        options["fsdp_config"] = {
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": options.pop("gradient_checkpointing", False),
        }
    looks = Looks(callback)
    trainer = transformers.Trainer(
        model=llama(),
        args=transformers.TrainingArguments(
            output_dir=str(output(folder, callback)),
            max_steps=options.pop("steps", 3),
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="steps" if "save_steps" in options else "no",
            use_cpu=True,
            ddp_backend="gloo",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=examples(32),
        eval_dataset=examples(4),
        callbacks=[looks, *([callback] if callback else [])],
    )
    trainer.train(resume_from_checkpoint=resumes)
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"]) > 1
    assert_no_hooks(trainer.model_wrapped)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return Trained.of(trainer.model, looks.gradients, losses), looks


def compare(how: str, folder: Path, name: str, options: dict[str, Any], **more: Any) -> Any:
    """A training with the callback has the bits of the one without it, on this rank.

    Returns:
        Its last plan.
    """
    print(f"{how}, {name}", flush=True)
    expected, _ = train(how, folder, **options)
    callback = MemswapCallback(**tiny.swapping(folder), **more)
    found, looks = train(how, folder, callback, **options)
    assert_same_bits(found, expected)
    assert callback.manager is None
    assert moved(callback.report()) and LAYERS[how] in callback.report(), looks.found
    assert (looks.plan is not None) == ("budget" in more), looks.found
    return looks.plan


def compare_resumed(how: str, folder: Path) -> None:
    """The same of a training that ends with a checkpoint, and of one that goes on from there."""
    print(f"{how}, resumed", flush=True)

    def whole(callback: MemswapCallback | None = None) -> Trained:
        train(how, folder, callback, steps=2, save_steps=2)
        checkpoint = output(folder, callback) / "checkpoint-2"
        return train(how, folder, callback, str(checkpoint), steps=4, save_steps=2)[0]

    expected = whole()
    callback = MemswapCallback(**tiny.swapping(folder), optimizer="encode")
    assert_same_bits(whole(callback), expected)
    assert moved(callback.report()) and "of state" in callback.report(), callback.report()


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2]) / os.environ["RANK"]
    folder.mkdir()
    tiny.accelerate_shards_on_a_cpu()
    log, reports = logging.getLogger("memswap"), Reports()
    log.setLevel(logging.INFO)
    log.addHandler(reports)
    for name, options in TRAININGS.items():
        compare(how, folder, name, options)
    compare(how, folder, "a budget", {"steps": BUDGETED_STEPS}, budget="60%")
    together = {"steps": STEPS_TOGETHER}
    plan = compare(how, folder, "one budget", together, budget="60%", group="world")
    (folder / PLAN).write_text(f"{plan.releases} {plan}".partition("measured")[0])
    compare(how, folder, "the optimizer's state away", {}, optimizer="encode")
    compare_resumed(how, folder)
    (folder / REPORTS).write_text(str(reports.count))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
