"""Fine-tune with transformers' Trainer: one callback, no layer names.

    pip install transformers accelerate
    python examples/finetune_trainer.py [a model's name or folder]

Without a name it trains a small Llama with random weights on the sources of Python's own library,
so that it runs anywhere in a minute.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from memswap.integrations.transformers import MemswapCallback

SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def dataset(length: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Windows of text, one byte a token."""
    text = Path(argparse.__file__).read_bytes()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * length].long()
    return [{"input_ids": one, "labels": one} for one in windows.view(count, length)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    name = parser.parse_args().model
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(name) if name else LlamaForCausalLM(SMALL)
    callback = MemswapCallback()  # all there is to add, and `callbacks=` below; or budget="70%"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.accelerator.is_available(),
            max_steps=12,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            bf16=True,
            logging_steps=4,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=dataset(256, 64), callbacks=[callback])
        trainer.train()
    print(callback.report())


if __name__ == "__main__":
    main()
