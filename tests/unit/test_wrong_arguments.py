"""What users write by mistake: the message says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memswap
from memswap.integrations.training import ManagedTraining

pytestmark = pytest.mark.cpu_only

MODEL = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16), 2, enable_nested_tensor=False)


def manage(*given: Any, **named: Any) -> Any:
    return memswap.manage(MODEL, *given, **named)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(MODEL.parameters())


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: manage("70%"), TypeError, "budget='70%'"),
        (lambda: manage("swap"), TypeError, "memswap.Policy(action='swap')"),
        (
            lambda: manage(memswap.Action.SWAP),
            TypeError,
            "memswap.Policy(action=memswap.Action.SWAP)",
        ),
        (lambda: manage(optimizer()), TypeError, "found AdamW, expected a memswap.Policy (for an"),
        (lambda: manage(budget=0.7), ValueError, "Write '70%' for this share"),
        (lambda: manage(budget=True), ValueError, "found True"),
        (lambda: manage(budget="24g"), ValueError, "Write '24GiB' or '24GB'"),
        (lambda: manage(budget="cuda:24GiB"), ValueError, "'device:70GiB'"),
        (lambda: memswap.Policy(min_bytes="1 M"), ValueError, "Write '1MiB' or '1MB'"),
        (lambda: memswap.Policy(action=1), TypeError, "found 1, expected a memswap.Action or its"),
        (lambda: manage(pool="/tmp/x"), TypeError, "memswap.DiskPool('/tmp/x')"),
        (
            lambda: memswap.manage_optimizer(MODEL),  # type: ignore[arg-type]
            TypeError,
            "found TransformerEncoder, expected a torch.optim.Optimizer that was made",
        ),
        (
            lambda: memswap.manage_optimizer(optimizer(), action="recompute"),
            ValueError,
            "expected one of keep, encode, swap, encode_swap",
        ),
        (
            lambda: memswap.swap_modules("layers.*", MODEL),  # type: ignore[arg-type]
            TypeError,
            "found TransformerEncoder, expected a pattern of names",
        ),
        (lambda: memswap.select_layers(3, "1"), TypeError, "found int, expected layers"),  # type: ignore[arg-type]
        (lambda: memswap.Windows(max_pending_bytes="x"), ValueError, "Windows(max_pending_bytes="),
        (lambda: memswap.HostPool("24"), ValueError, "Write '24GiB' for a size, or 24 or '24B'"),
        (lambda: memswap.HostPool(slab="64"), ValueError, "HostPool(slab=...)"),
        (lambda: memswap.DiskPool(budget="24"), ValueError, "Write '24GiB'"),
        (lambda: memswap.HostPool(0), ValueError, "HostPool(budget=...): found 0, expected 1 byte"),
        (lambda: memswap.HostPool("0GiB"), ValueError, "found '0GiB', expected 1 byte or more"),
        (lambda: memswap.HostPool(slab=0), ValueError, "or nothing for 64MiB"),
        (lambda: memswap.DiskPool(budget="0"), ValueError, "DiskPool(budget=...): found '0'"),
        (lambda: memswap.DiskPool(extent=0), ValueError, "or nothing for 256MiB"),
        (lambda: memswap.Policy(min_bytes="64"), ValueError, "Write '64GiB' for a size, or 64"),
        (lambda: manage(prefetch_bytes="64"), ValueError, "prefetch_bytes: expected auto or a"),
        (lambda: memswap.DiskPool(__file__), NotADirectoryError, "found a file, expected a folder"),
        (lambda: memswap.DiskPool("24GiB"), ValueError, "write DiskPool(budget='24GiB')"),
        (lambda: memswap.DiskPool(2**30), TypeError, "found int, expected a folder"),  # type: ignore[arg-type]
        (
            lambda: memswap.DiskPool("/nowhere/at", budget="1MiB"),
            FileNotFoundError,
            "no directory /nowhere",
        ),
        (lambda: manage(action="swap"), TypeError, "policy=memswap.Policy(action='swap')"),
        (lambda: manage(bugdet="70%"), TypeError, "found bugdet='70%', expected one of modules"),
        (
            lambda: memswap.saved_tensors(min_bytes="1MiB"),  # type: ignore[call-arg]
            TypeError,
            "saved_tensors(): found min_bytes='1MiB', expected policy=memswap.Policy(min_bytes=",
        ),
        (lambda: memswap.HostPool(device="gpu"), ValueError, "this torch sees"),
        (lambda: memswap.HostPool(pageable="no"), TypeError, "expected True or False"),  # type: ignore[arg-type]
        (lambda: memswap.profile("gpu"), ValueError, "profile(device='gpu'): this torch sees"),
        (
            lambda: manage(optimizer=True, budget="device:1GiB"),
            TypeError,
            "manage(optimizer=...): found bool, expected a torch.optim.Optimizer",
        ),
        (
            lambda: memswap.manage_optimizer(optimizer(), chunked="yes"),  # type: ignore[arg-type]
            TypeError,
            "chunked='yes'",
        ),
        (
            lambda: memswap.manage_optimizer(optimizer(), budget="1GiB"),  # type: ignore[call-arg]
            TypeError,
            "found budget='1GiB', expected one of optimizer, action, pool, room",
        ),
        (
            lambda: memswap.Policy(budget="70%"),  # type: ignore[call-arg]
            TypeError,
            "Policy(): found budget='70%', expected one of action",
        ),
        (
            lambda: memswap.parallel.ContextParallel(mask=True),  # type: ignore[arg-type]
            TypeError,
            "mask=True: expected the name of an argument",
        ),
        (
            lambda: memswap.parallel.ContextParallel(qkv="q"),
            TypeError,
            "qkv='q': expected several",
        ),
        (lambda: memswap.parallel.describe(3), TypeError, "found int, expected an nn.Module"),  # type: ignore[arg-type]
        (lambda: memswap.parallel.shard(3, None), TypeError, "found int, expected an nn.Module"),  # type: ignore[arg-type, type-var]
        (
            lambda: memswap.parallel.shard(MODEL, None, mp_policy="bf16"),  # type: ignore[arg-type]
            TypeError,
            "shard(mp_policy='bf16'): found str, expected a torch.distributed.fsdp.MixedPrecision",
        ),
        (
            lambda: memswap.parallel.shard(MODEL, None, reshard_after_forward=2),  # type: ignore[arg-type]
            TypeError,
            "shard(reshard_after_forward=2): found int, expected True, False or None",
        ),
        (
            lambda: memswap.parallel.shard(MODEL, None, ignored_params=torch.ones(1)),  # type: ignore[arg-type]
            TypeError,
            "found Tensor, expected parameters in a list or a set",
        ),
        (
            lambda: memswap.parallel.ContextParallel(ulysses="2"),  # type: ignore[arg-type]
            ValueError,
            "ulysses='2': expected 1 or more",
        ),
        (
            lambda: memswap.parallel.ContextParallel(sequence_length="4096"),  # type: ignore[arg-type]
            ValueError,
            "sequence_length='4096': expected 1 or more",
        ),
    ],
)
def test_the_message_says_what_to_write(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300, "a message of many lines hides what it says"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ManagedTraining(budget=0.7), ValueError, "Write '70%' for this share"),  # type: ignore[arg-type]
        (lambda: ManagedTraining("swap"), TypeError, "memswap.Policy(action='swap')"),  # type: ignore[arg-type]
        (lambda: ManagedTraining(pool="/tmp"), TypeError, "memswap.DiskPool('/tmp')"),  # type: ignore[arg-type]
        (lambda: ManagedTraining(windows=True), TypeError, "expected memswap.Windows"),  # type: ignore[arg-type]
        (
            lambda: ManagedTraining(group="dp"),
            TypeError,
            "group='dp': found str, expected a Process",
        ),
        (lambda: ManagedTraining(prefetch_bytes="much"), ValueError, "prefetch_bytes"),
        (
            lambda: ManagedTraining(action="swap"),  # type: ignore[call-arg]
            TypeError,
            "ManagedTraining(): found action='swap', expected policy=memswap.Policy(action='swap')",
        ),
        (lambda: ManagedTraining.from_config({"min_bytes": "64"}), ValueError, "64 or '64B'"),
        (lambda: ManagedTraining.from_config("budget=70%"), TypeError, "found str"),  # type: ignore[arg-type]
        (lambda: ManagedTraining(optimizer=optimizer()), ValueError, "found optimizer=AdamW"),  # type: ignore[arg-type]
    ],
)
def test_a_callback_refuses_when_it_is_made_and_not_when_training_begins(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


def test_an_optimizers_action_may_be_given_by_its_name() -> None:
    model = nn.Linear(64, 64)
    used = torch.optim.AdamW(model.parameters())
    managed = memswap.manage_optimizer(used, action="encode", min_bytes="4KiB")
    model(torch.randn(2, 64)).sum().backward()
    used.step()
    assert managed.statistics().away_bytes > 0
    managed.remove()
