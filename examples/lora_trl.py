"""Fine-tune an adapter (LoRA) with TRL's SFTTrainer: the same callback as for any Trainer.

    pip install trl peft
    python examples/lora_trl.py

It trains a small Llama with random weights on Python's own sources, so that it runs anywhere
in a minute. Put a model's name in the place of `model` and your data set in that of `texts`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from memswap.integrations.transformers import MemswapCallback


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One byte a token, and no file to download."""
    letters = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens = {letter: place for place, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="</s>"
    )


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    text = Path(argparse.__file__).read_text("utf-8")
    texts = [text[place : place + 300] for place in range(0, 30_000, 300)]
    callback = MemswapCallback()  # in the place of activation_offloading=True
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(
                output_dir=folder,
                use_cpu=not torch.accelerator.is_available(),
                max_steps=12,
                per_device_train_batch_size=4,
                max_length=256,
                logging_steps=4,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=byte_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
            callbacks=[callback],
        )
        trainer.train()
    print(callback.report())


if __name__ == "__main__":
    main()
