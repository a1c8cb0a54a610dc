"""Ways to take less memory for saved activations, side by side: six models, each way in a process.

For each model: plain training, memswap with frames alone, with recipes and frames, and under a
budget; `torch.utils.checkpoint` around each layer, the same with a selective policy that keeps
products, and `torch.compile` with `activation_memory_budget`. The memory of a step is what it takes
beyond what was taken before it (and before memswap was there, which keeps room for frames from step
to step): of the process on a CPU, by the kernel's account, and of the device elsewhere, by its
allocator's. Gradients of memswap's ways are compared with plain training bit by
bit. transformers' classes are made from small configurations, with random weights, where it is
installed. A row that takes too long (a compiler of unrolled loops) is given up, and says so.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import chosen_device, make_parser, stack_options, synchronize, write_result
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memswap
from memswap.cli.gpt import GPT
from memswap.cli.table import render_table

WAYS = ("plain", "frames", "recipes", "budget 60%", "checkpoint", "selective", "compile")
OURS = ("frames", "recipes", "budget 60%")
MODELS = ("demo GPT", "HF Llama", "HF GPT-2", "ViT", "Mamba", "Mixtral")

VOCABULARY = 1000

#: Without its kernels Mamba goes through a sequence token by token, in Python: its sequences are
#: shorter by this factor, and there are more of them.
SHORTER_FOR_MAMBA, MORE_FOR_MAMBA = 32, 4

#: Products, whose results the selective policy keeps.
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)

Made = tuple[nn.Module, nn.ModuleList, Callable[[], torch.Tensor]]


def make(name: str, arguments: Any, device: torch.device) -> Made:
    """A model on a device, its layers, and what makes its loss."""
    layers, hidden = arguments.layers, arguments.hidden
    batch, sequence, heads = arguments.batch, arguments.sequence, arguments.hidden // 64
    if name == "Mamba":
        batch, sequence = batch * MORE_FOR_MAMBA, max(sequence // SHORTER_FOR_MAMBA, 1)
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    tokens = torch.randint(256, (batch, sequence), device=device)
    if name == "demo GPT":
        model: nn.Module = GPT(layers, hidden, heads, sequence).to(device, dtype)
        return model, model.layers, lambda: model(tokens, tokens)
    import transformers as hf

    stack = {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": VOCABULARY}
    attention = {"num_attention_heads": heads, "intermediate_size": 11 * hidden // 4}
    if name == "HF Llama":
        config = hf.LlamaConfig(**stack, **attention, num_key_value_heads=heads // 2)
        model = hf.LlamaForCausalLM(config)
        blocks = model.model.layers
    elif name == "HF GPT-2":
        config = hf.GPT2Config(
            n_embd=hidden, n_layer=layers, n_head=heads, n_positions=sequence,
            vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        )  # fmt: skip
        model = hf.GPT2LMHeadModel(config)
        blocks = model.transformer.h
    elif name == "Mamba":
        config = hf.MambaConfig(**stack, state_size=8)
        model = hf.MambaForCausalLM(config)
        blocks = model.backbone.layers
    elif name == "Mixtral":
        config = hf.MixtralConfig(
            **stack, **attention, num_key_value_heads=heads // 2, num_local_experts=4
        )
        model = hf.MixtralForCausalLM(config)
        blocks = model.model.layers
    else:
        side = 14 * 16  # 196 patches and the class
        config = hf.ViTConfig(
            num_hidden_layers=layers, hidden_size=hidden, image_size=side, **attention
        )
        model = hf.ViTForImageClassification(config).to(device, dtype).train()
        images = torch.randn(max(1, batch * sequence // 197), 3, side, side).to(model.dtype)
        images = images.to(device)
        labels = torch.zeros(len(images), dtype=torch.long, device=device)
        encoder = model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers
        return model, encoder, lambda: model(pixel_values=images, labels=labels).loss
    model.to(device, dtype).train()
    return model, blocks, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what products gave, and make everything else again."""
    kept = op in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(layers: nn.ModuleList, selective: bool) -> None:
    """Have each layer's call run under `torch.utils.checkpoint`."""
    more: dict[str, Any] = {"use_reentrant": False}
    if selective:
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_products)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **more)


def apply(way: str, model: nn.Module, layers: nn.ModuleList) -> memswap.types.Manager | None:
    """Change a model, or its layers, in one of the ways."""
    if way in ("frames", "recipes"):
        return memswap.manage(model, memswap.Policy("encode" if way == "frames" else None))
    if way.startswith("budget"):
        return memswap.manage(model, budget=way.split()[1])
    if way in ("checkpoint", "selective"):
        checkpointed(layers, selective=way == "selective")
    elif way == "compile":
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = 0.5
        for layer in layers:
            layer.compile()
    return None


def saved_bytes(
    way: str, model: nn.Module, layers: nn.ModuleList, step: Callable[[], object]
) -> int:
    """What a way that is not memswap's has saved at its peak, in a step that memswap counts.

    What torch's checkpoint keeps and computes again only torch knows: memswap's, which does the
    same and tells, takes its place for this step.
    """
    if way in ("checkpoint", "selective"):
        policy_fn = keep_products if way == "selective" else None
        for layer in layers:
            del layer.forward
            layer.forward = functools.partial(
                memswap.checkpoint, layer.forward, policy_fn=policy_fn
            )
    # Under a budget what a region computes again counts as well.
    with memswap.manage(model, memswap.Policy("keep"), budget="1TiB") as manager:
        step()
        return manager.stats().peak_resident_bytes


def taken_bytes(device: torch.device) -> int:
    """What is taken now. From here on, what is taken at most begins anew."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return torch.accelerator.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_bytes("VmRSS")


def most_bytes(device: torch.device) -> int:
    """What was taken at most since `taken_bytes`."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resident_bytes("VmHWM")


def resident_bytes(key: str) -> int:
    """Of this process: now (``VmRSS``), or at most since the last reset (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def run_row(name: str, way: str, arguments: Any) -> dict[str, Any]:
    """Train one model in one way, in this process."""
    device = chosen_device(arguments.device)
    model, layers, loss = make(name, arguments, device)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        synchronize(device)
        began = time.perf_counter()
        loss().backward()
        synchronize(device)
        return time.perf_counter() - began

    for _ in range(2):  # what libraries keep for themselves is no way's own
        step()
    model.zero_grad(set_to_none=True)
    importlib.import_module("torch._dynamo")  # memswap imports it: as large as all saved bytes
    gc.collect()
    before = taken_bytes(device)
    manager = apply(way, model, layers)
    try:
        for _ in range(6):  # recipes learn for four steps, budgets for three; compiling takes one
            step()
            if manager is not None:
                manager.wait_for_plan()
    except memswap.BudgetError as error:
        needs = f"needs {error.smallest_bytes / 2**20:.1f} MiB at least"
        return {"model": name, "way": way, "failure": needs, "smallest_bytes": error.smallest_bytes}
    if manager is not None:
        manager.reset_stats()
    model.zero_grad(set_to_none=True)
    beside = taken_bytes(device)  # and the peak begins anew
    if manager is None:  # a compiler's code is in no step; what memswap keeps for frames is
        before = beside
    times = [step() for _ in range(arguments.rounds)]
    taken = most_bytes(device) - before
    digest = hashlib.blake2b()
    for parameter in model.parameters():
        if parameter.grad is not None:
            digest.update(parameter.grad.cpu().view(torch.uint8).numpy().tobytes())
    row = {"model": name, "way": way, "step_bytes": taken, "step_s": median(times)}
    if manager is not None:
        row["saved_peak_bytes"] = manager.stats().peak_resident_bytes
    else:
        row["saved_peak_bytes"] = saved_bytes(way, model, layers, step)
    return {**row, "gradients": digest.hexdigest()}


def row_apart(name: str, way: str, most_seconds: float) -> dict[str, Any]:
    """The same in a process of its own; without numbers where this way cannot run the model."""
    # Freed memory goes back to the system, as in the demo. A compiler's own processes would be
    # looked for by whoever ends a row.
    own = {
        "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    row = {"model": name, "way": way}
    process = subprocess.Popen(
        [sys.executable, *sys.argv, "--row", name, way],
        env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=most_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and the compilers that it has started
        process.communicate()
        return {**row, "failure": f"more than {most_seconds:.0f} s"}
    if process.returncode != 0:
        return {**row, "failure": (errors.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def compared(rows: list[dict[str, Any]]) -> None:
    """Add each row's shares of the plain one of its model."""
    plain = {row["model"]: row for row in rows if row["way"] == "plain"}
    for row in rows:
        base = plain.get(row["model"], {"failure": "not asked for"})
        if "failure" in row or "failure" in base:
            continue
        row["time"] = row["step_s"] / base["step_s"]
        row["step_share"] = row["step_bytes"] / base["step_bytes"]
        if "saved_peak_bytes" in row and base["saved_peak_bytes"]:  # small storages do not count
            row["saved_share"] = row["saved_peak_bytes"] / base["saved_peak_bytes"]
        row["same_bits"] = row["gradients"] == base["gradients"]


def as_text(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "time" not in row:
        return [row["model"], row["way"], "-", "-", "-", row.get("failure", "no plain row")[:60]]
    saved = f"{row['saved_share']:.2f}" if "saved_share" in row else "-"
    bits = "the same" if row["same_bits"] else "differ"
    share = f"{row['step_bytes'] / 2**20:.0f} MiB, {row['step_share']:.2f}"
    return [row["model"], row["way"], saved, share, f"{row['time']:.2f}x", bits]


def main() -> None:
    """Print a table; fail where memswap changed a bit."""
    parser = make_parser(__doc__)
    stack_options(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--row-seconds", type=float, default=90, help="most that one row may take")
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "WAY"), help="one row, as JSON")
    arguments = parser.parse_args()
    device = chosen_device(arguments.device)
    if arguments.row:
        print(json.dumps(run_row(*arguments.row, arguments)))
        return
    models = arguments.models
    if importlib.util.find_spec("transformers") is None:
        models = [name for name in models if name == MODELS[0]]
        print(f"transformers is not installed: {models or 'no model'} alone", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for name in models:
        for way in arguments.ways:
            began = time.perf_counter()
            rows.append(row_apart(name, way, arguments.row_seconds))
            took_s = time.perf_counter() - began
            outcome = rows[-1].get("failure", "done")
            print(f"{name}, {way}: {outcome}, {took_s:.0f} s", file=sys.stderr, flush=True)
        compared(rows)
        write_result(arguments.json, device, {"rows": rows}, tell=False)
    titles = ("model", "way", "saved, peak", "step's memory", "step", "gradients")
    print(render_table(titles, [as_text(row) for row in rows]))
    write_result(arguments.json, device, {"rows": rows})
    answered = [row for row in rows if row["way"] in OURS and "smallest_bytes" not in row]
    if not all(row.get("same_bits", False) for row in answered):
        raise SystemExit("memswap's gradients differ from plain training, or a row of it failed")


if __name__ == "__main__":
    main()
