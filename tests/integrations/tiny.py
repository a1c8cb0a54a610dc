"""Tiny models made from configurations, text of the machine, and what a training is compared by."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import nn

import memswap
from memswap.cli.corpus import read_corpus

VOCABULARY = 256
LENGTH = 64


def llama(layers: int = 4, seed: int = 0) -> Any:
    """A Llama of 64 hidden numbers, with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY + 64,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def windows(count: int, length: int = LENGTH) -> torch.Tensor:
    """Bytes of Python's own sources: int64 ``[count, length]``."""
    text = torch.frombuffer(bytearray(read_corpus(count * length)), dtype=torch.uint8)
    return text[: count * length].long().view(count, length)


def examples(count: int, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """The same for transformers' Trainer: a list is a dataset."""
    return [{"input_ids": one, "labels": one} for one in windows(count, length)]


def swapping(folder: Path) -> dict[str, Any]:
    """Options under which even tensors of tiny models move."""
    return {
        "policy": memswap.Policy(memswap.Action.SWAP, min_bytes="1KiB"),
        "pool": memswap.DiskPool(folder, budget="256MiB"),
    }


@dataclass
class Trained:
    """What a training left behind, to be compared with another by its bits."""

    weights: dict[str, torch.Tensor]
    gradients: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, gradients: list[torch.Tensor], losses: list[float]) -> Trained:
        weights = {name: one.detach().clone() for name, one in model.named_parameters()}
        return cls(weights, gradients, losses)


def assert_same_bits(found: Trained, expected: Trained) -> None:
    """Losses, gradients of each step and weights are equal in every bit."""
    assert found.losses == expected.losses, "losses differ from the training without memswap"
    assert len(found.gradients) == len(expected.gradients) > 0, "no gradients were compared"
    for place, (ours, plain) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert bits(ours).equal(bits(plain)), f"gradient {place} differs from the one without"
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in found.weights.items():
        assert bits(weight).equal(bits(expected.weights[name])), f"{name} differs after training"


def on_two_ranks(run: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a module in two processes of their own, with what torchrun tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = processes.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(number, port, run, arguments, results), daemon=True)
        for number in range(2)
    ]
    for one in ranks:
        one.start()
    said = [results.get(timeout=240) for _ in ranks]
    for one in ranks:
        one.join(30)
        if one.is_alive():
            one.kill()
    assert said == ["", ""], "\n".join(said)


def _rank(number: int, port: int, run: Callable[..., None], arguments: Any, results: Any) -> None:
    """One of these processes; says what is wrong, if anything is."""
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
    )
    try:
        run(*arguments)
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


def accelerate_shards_on_a_cpu() -> None:
    """Has accelerate take a plugin for FSDP on a CPU, too: it takes DDP there without a word."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin_sharded


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bytes of a tensor; of one that is sharded, those of this rank."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_no_hooks(model: nn.Module) -> None:
    """Nothing of memswap's is on any module."""
    left = [
        f"{name or 'the model'}: {hook!r}"
        for name, module in model.named_modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
        if "memswap" in _module_of(hook)
    ]
    assert not left, f"hooks of memswap are left on {left}"


def _module_of(hook: Callable[..., Any]) -> str:
    owner = getattr(hook, "__self__", hook)
    return f"{type(owner).__module__} {getattr(hook, '__module__', '')}"


def has_hooks(model: nn.Module) -> bool:
    """Whether something of memswap's is on a module."""
    try:
        assert_no_hooks(model)
    except AssertionError:
        return True
    return False


def moved(report: str) -> bool:
    """Whether a report says that storages moved."""
    line = next((line for line in report.splitlines() if line.startswith("moved ")), "moved 0 0")
    return int(line.split()[1]) > 0


def of_kind(kind: str) -> Any:
    """A tiny model of transformers', of one of the kinds that people train."""
    import transformers

    makers: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=2)
        ),
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=64,
            )
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
            )
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                num_local_experts=2,
            )
        ),
        "mamba": lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3)
        ),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
            )
        ),
    }
    torch.manual_seed(0)
    return makers[kind]()


def tokenizer() -> Any:
    """Bytes as tokens, with the three that a Llama here knows as special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = special | {letter: place for place, letter in enumerate(letters, start=3)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
