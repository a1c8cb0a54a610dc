"""Saved bytes and step time with recipes: beside plain training and beside frames alone.

Each model is trained plainly, with everything encoded, and with `Action.RECOMPUTE`, in turns in one
process, and the gradients of all are compared bit by bit. The bytes are those that the layers have
saved at their peak, by memswap's account. transformers' models run where it is installed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from common import chosen_device, make_parser, stack_options, write_result
from llama import Llama, LlamaConfig
from torch import nn

import memswap
from memswap.cli.gpt import GPT
from memswap.cli.table import render_table

MODES = ("keep", "encode", "recompute")


@dataclass
class Case:
    """A model, and what makes its loss."""

    name: str
    model: nn.Module
    loss: Callable[[], torch.Tensor]


#: How a model computes: in bfloat16, or with float32 weights under autocast, whose cache holds all
#: casts of weights until the forward has ended; and the same without the cache.
PRECISIONS = ("bf16", "fp32 under autocast", "fp32 under autocast, no cache")


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    mixed = precision != "bf16"
    cache = not precision.endswith("no cache")
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed, cache_enabled=cache)


def cases(arguments: Any, device: torch.device) -> Iterator[Case]:
    """The models, each made when its turn comes."""
    layers, hidden = arguments.layers, arguments.hidden
    batch, sequence, vocabulary = arguments.batch, arguments.sequence, 1000
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, sequence), device=device)
    model: nn.Module = GPT(layers, hidden, hidden // 64, sequence).to(device, torch.bfloat16)
    demo = tokens % 256
    yield Case("demo GPT, bf16", model, lambda m=model: m(demo, demo))
    config = LlamaConfig(
        layers, hidden, 11 * hidden // 4, hidden // 64, hidden // 128, vocabulary, sequence
    )
    for precision in PRECISIONS:
        model = Llama(config).to(device)
        if precision == "bf16":
            model.to(torch.bfloat16)

        def loss(model: nn.Module = model, precision: str = precision) -> torch.Tensor:
            with autocast(device, precision):
                return model(tokens, tokens)

        yield Case(f"Llama blocks, {precision}", model, loss)
    try:
        import transformers
    except ImportError:
        return
    llama = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        vocab_size=vocabulary,
    )
    gpt2 = transformers.GPT2Config(
        n_embd=hidden,
        n_layer=layers,
        n_head=hidden // 64,
        n_positions=sequence,
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    for name, kind, settings, precision in (
        *(("HF Llama", transformers.LlamaForCausalLM, llama, one) for one in PRECISIONS),
        *(("HF GPT-2", transformers.GPT2LMHeadModel, gpt2, one) for one in PRECISIONS),
    ):
        model = kind(settings).to(device)
        if precision == "bf16":
            model.to(torch.bfloat16)
        model.train()

        def loss(model: nn.Module = model, precision: str = precision) -> torch.Tensor:
            with autocast(device, precision):
                return model(input_ids=tokens, labels=tokens, use_cache=False).loss

        yield Case(f"{name}, {precision}", model, loss)


def step(case: Case) -> float:
    """Seconds of one forward and backward."""
    case.model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    case.loss().backward()
    return time.perf_counter() - began


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row for each mode, timed in turns with plain training."""
    step(case)
    expected = gradients(case.model)
    rows = []
    for mode in MODES:
        plain_s, managed_s = [], []
        manager = memswap.manage(case.model, memswap.Policy(action=mode))
        for _ in range(4):  # recipes learn for two steps, frames for one
            step(case)
        equal = same_bits(gradients(case.model), expected)
        manager.reset_stats()
        for _ in range(rounds):
            managed_s.append(step(case))
        stats = manager.stats()
        manager.remove()
        for _ in range(rounds):
            plain_s.append(step(case))
        rows.append(
            {
                "model": case.name,
                "mode": mode,
                "peak_bytes": stats.peak_resident_bytes,
                "time": median(managed_s) / median(plain_s),
                "recipes": stats.recipe_storages // rounds,
                "recipe_bytes": stats.recipe_bytes // rounds,
                "same_bits": equal,
            }
        )
    whole = rows[0]["peak_bytes"]
    for row in rows:
        row["share"] = row["peak_bytes"] / whole
    return rows


def main() -> None:
    """Print a table."""
    parser = make_parser(__doc__)
    stack_options(parser)
    arguments = parser.parse_args()
    device = chosen_device(arguments.device)
    found: list[dict[str, Any]] = []
    for case in cases(arguments, device):
        found += measure(case, arguments.rounds)
    print(
        render_table(
            ("model", "action", "saved at the peak", "share", "step", "recipes", "bits"),
            [
                (
                    one["model"],
                    one["mode"],
                    f"{one['peak_bytes'] / 2**20:.1f} MiB",
                    f"{one['share']:.2f}",
                    f"{one['time']:.2f}x",
                    f"{one['recipes']} of {one['recipe_bytes'] / 2**20:.1f} MiB",
                    "the same" if one["same_bits"] else "DIFFER",
                )
                for one in found
            ],
        )
    )
    write_result(arguments.json, device, {"models": found})
    if not all(one["same_bits"] for one in found):
        raise SystemExit("gradients differ from plain training")


if __name__ == "__main__":
    main()
