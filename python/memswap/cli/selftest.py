"""``python -m memswap selftest``: does memswap work on this device? Well under a minute.

For machines that memswap's own tests have never seen. Each check compares raw bits; the report is a
file to send back.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import memswap
from memswap._native import native
from memswap.cli.arguments import file, write
from memswap.cli.bench.environment import describe_environment
from memswap.cli.measure import settle_math_library
from memswap.cli.model_options import check_device, default_device
from memswap.cli.table import format_seconds

ACTIONS = (memswap.Action.SWAP, memswap.Action.ENCODE, memswap.Action.ENCODE_SWAP)
MIB = 1 << 20
RATE_ELEMENTS = 8 * MIB
"""Of the tensor whose copying, encoding and decoding is timed."""


class NothingToCheckError(Exception):
    """The check says nothing here; the message says why."""


class WrongError(Exception):
    """What a check has found."""


def expect(true: bool, words: str) -> None:
    """Not by ``assert``: under ``python -O`` every check would pass."""
    if not true:
        raise WrongError(words)


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    outcome: str
    """passed, skipped or FAILED."""
    detail: str
    elapsed_s: float


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(raw(a), raw(b)))


def need_codec(device: torch.device) -> None:
    if native.codec_name(device) is None:
        raise NothingToCheckError(f"no codec for {device.type} in this build")


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---------------------------------------------------------------- the codec
def samples() -> dict[str, torch.Tensor]:
    """Tensors of many kinds in host memory, special values and odd lengths among them."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(100_003, generator=generator)
    bits = torch.randint(-(2**15), 2**15, (65_537,), generator=generator, dtype=torch.int16)
    return {
        "bf16, normal": normal.to(torch.bfloat16),
        "bf16, half of it zero": (normal * (normal > 0)).to(torch.bfloat16),
        "bf16, any bits": bits.view(torch.bfloat16),
        "fp16, normal": normal.to(torch.float16),
        "fp32, normal": normal,
        "fp32, infinite, not a number, tiny": torch.tensor(
            [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 3e38]
        ).repeat(1001),
        "int64, small": torch.randint(0, 50_000, (9_999,), generator=generator),
        "bool": normal > 0.5,
        "uint8": (normal * 16).to(torch.uint8),
        "fp32, one element": normal[:1],
    }


def check_encode(device: torch.device) -> str:
    """Encode on the device, decode there and on the CPU."""
    need_codec(device)
    ratios = []
    for name, host in samples().items():
        frame = memswap.encode(host.to(device))
        expect(same_bits(memswap.decode(frame), host), f"{name}: decode gave other bits")
        received = memswap.Frame.from_bytes(frame.to_bytes())
        expect(same_bits(memswap.decode(received), host), f"{name}: the CPU reads other bits")
        if name.endswith("normal"):
            ratios.append(f"{name.partition(',')[0]} {frame.ratio:.3f}x")
    return f"{len(samples())} tensors; normal numbers: {', '.join(ratios)}"


# ---------------------------------------------------------------- swapping, and order
def check_swap(device: torch.device) -> str:
    """One tensor that keeps its identity."""
    for host in samples().values():
        tensor = host.to(device, copy=True)
        expect(memswap.swap_out(tensor), "the pool had no room")
        memswap.swap_in(tensor)
        expect(same_bits(tensor, host), f"{host.dtype}: other bits came back")
    return f"{len(samples())} tensors"


class Multiply(torch.autograd.Function):  # type: ignore[misc]
    """Saves its input, and gives it back as the gradient: what was saved can be looked at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return saved * gradients[0]


class Load:
    """Work that takes the compute stream longer than the host needs to go on: some 5 ms."""

    def __init__(self, device: torch.device) -> None:
        self.matrix = torch.ones(512, 512, device=device, dtype=torch.bfloat16)
        self.products = 1
        for _ in range(2):  # the first time builds and loads the kernel
            synchronize(device)
            begin = perf_counter()
            self.begin()
            synchronize(device)
            elapsed_s = perf_counter() - begin
        self.products = max(1, min(200, int(5e-3 / elapsed_s)))

    def begin(self) -> None:
        for _ in range(self.products):
            torch.mm(self.matrix, self.matrix)


def saved_and_back(
    device: torch.device, load: Load, action: memswap.Action, seed: int, side: torch.Stream | None
) -> None:
    """Move a saved tensor while the device is busy, and compare the gradient.

    Args:
        device: to do it on.
        load: what keeps the device busy.
        action: what is done with the tensor.
        seed: of its numbers.
        side: the stream on which backward runs; None: the current one.

    Raises:
        WrongError: the gradient is another one.
        NothingToCheckError: the tensor stayed.
    """
    generator = torch.Generator().manual_seed(seed)
    host = torch.randn(MIB // 4, generator=generator).to(torch.bfloat16)
    scale = 2.0**seed  # exact in every floating-point format
    leaf = host.to(device).requires_grad_()
    saved = memswap.saved_tensors(policy=memswap.Policy(action=action, min_bytes=1))
    load.begin()
    with saved:
        product = leaf * scale
        loss = Multiply.apply(product)
        del product  # the bytes are away, or on their way; its memory is used again at once:
    debris = [torch.full_like(host, float("nan"), device=device) for _ in range(3)]
    if side is not None:
        here = torch.accelerator.current_stream(device)
        side.wait_stream(here)
        with side:
            loss.backward(torch.ones_like(loss))
        here.wait_stream(side)
    else:
        loss.backward(torch.ones_like(loss))
    del debris
    synchronize(device)
    stats = saved.stats()
    if stats.moved_storages == 0:
        raise NothingToCheckError(f"{action.value}: the tensor stayed ({', '.join(stats.kept)})")
    assert leaf.grad is not None
    expect(same_bits(leaf.grad, host * scale * scale), f"{action.value}: other bits came back")


def check_order(device: torch.device) -> str:
    """Nothing is read before it is written, nor freed before it is read, however busy a stream."""
    side = None if device.type == "cpu" else torch.Stream(device=device)
    load, rounds, kept = Load(device), 0, []
    for action in ACTIONS:
        try:
            for seed in range(4):
                for stream in {None, side}:
                    saved_and_back(device, load, action, seed, stream)
                    rounds += 1
        except NothingToCheckError as reason:
            kept.append(str(reason))
    if rounds == 0:
        raise NothingToCheckError("; ".join(kept))
    return "; ".join([f"{rounds} rounds", *kept])


def gradients_of(device: torch.device, action: memswap.Action | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [
        layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))
    ]
    model = nn.Sequential(*layers).to(device, torch.bfloat16)
    x = torch.randn(512, 256).to(device, torch.bfloat16)
    manager = None
    if action is not None:
        manager = memswap.manage(model, policy=memswap.Policy(action=action, min_bytes=1))
    found = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(x).float().square().mean().backward()
        found += [raw(p.grad) for p in model.parameters() if p.grad is not None]
    if manager is not None:
        stats = manager.stats()
        manager.remove()
        if stats.moved_storages == 0:
            raise NothingToCheckError(f"everything stayed ({', '.join(stats.kept)})")
    return found


def check_training(device: torch.device, action: memswap.Action) -> str:
    """Two steps of a small model, plain and managed: every gradient is the same."""
    plain = gradients_of(device, None)
    if not all(map(torch.equal, plain, gradients_of(device, None))):
        raise NothingToCheckError("without memswap, the device gives different gradients twice")
    expect(all(map(torch.equal, plain, gradients_of(device, action))), "gradients differ")
    return f"{len(plain)} gradients"


# ---------------------------------------------------------------- rates
def gbytes_per_s(work: Callable[[], object], nbytes: int, device: torch.device) -> float:
    """Bytes per second, in units of 1e9, of three runs after a first one.

    Args:
        work: what is timed.
        nbytes: that each run handles.
        device: that is waited for before and after.
    """
    work()
    synchronize(device)
    begin = perf_counter()
    for _ in range(3):
        work()
    synchronize(device)
    return round(3 * nbytes / (perf_counter() - begin) / 1e9, 2)


def check_rates(device: torch.device) -> str:
    """No verdict: how fast it is, roughly. `memswap bench codec` measures properly."""
    tensor = torch.randn(RATE_ELEMENTS).to(device, torch.bfloat16)
    nbytes, copy = tensor.nbytes, torch.empty_like(tensor)
    rates = {"copy": gbytes_per_s(lambda: copy.copy_(tensor), nbytes, device)}
    if native.codec_name(device) is not None:
        frame = memswap.encode(tensor)
        rates["encode"] = gbytes_per_s(lambda: memswap.encode(tensor), nbytes, device)
        rates["decode"] = gbytes_per_s(lambda: memswap.decode(frame), nbytes, device)
    return ", ".join(f"{name} {rate} GB/s" for name, rate in rates.items())


# ---------------------------------------------------------------- the command
RATES = "rates"
CHECKS: dict[str, Callable[[torch.device], str]] = {
    "encode and decode": check_encode,
    "swap out and in": check_swap,
    "order": check_order,
    **{f"training, {action.value}": partial(check_training, action=action) for action in ACTIONS},
    RATES: check_rates,
}


def run_check(name: str, check: Callable[[torch.device], str], device: torch.device) -> Check:
    """Run one check, whatever it raises.

    Args:
        name: of the check.
        check: says what it has found.
        device: to check.
    """
    begin = perf_counter()
    try:
        outcome, detail = "passed", check(device)
    except NothingToCheckError as reason:
        outcome, detail = "skipped", str(reason)
    except WrongError as error:
        outcome, detail = "FAILED", str(error)
    except Exception as error:  # whatever it is, the other checks are still of use
        outcome, detail = "FAILED", f"{type(error).__name__}: {error}"
    return Check(name, outcome, detail, round(perf_counter() - begin, 3))


def environment(device: torch.device) -> dict[str, Any]:
    found = describe_environment(device)
    found["codec"] = native.codec_name(device)
    try:
        found["torch_npu"] = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        found["torch_npu"] = None
    for name in ("TASK_QUEUE_ENABLE", "ASCEND_LAUNCH_BLOCKING", "ASCEND_TOOLKIT_HOME"):
        found[name] = os.environ.get(name)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=default_device(), help="cpu, cuda, npu, ...")
    parser.add_argument("--report", type=file, help="default: memswap-selftest-DEVICE.json")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="instead, try every kind of exchange between the ranks; run under torchrun",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds per exchange")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, write the report; 0 only if nothing failed and something was checked."""
    if arguments.distributed:
        from memswap.cli import selftest_distributed  # the only one that needs torch.distributed

        return selftest_distributed.run(arguments)
    check_device(arguments.device)
    settle_math_library()
    device = torch.device(arguments.device)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    checks = []
    for name, check in CHECKS.items():
        found = run_check(name, check, device)
        elapsed = format_seconds(found.elapsed_s)
        print(f"{name:<22}{found.outcome:<8} {elapsed:>9}  {found.detail}", flush=True)
        checks.append(found)
    outcomes = {check.outcome for check in checks if check.name != RATES}
    passed = "passed" in outcomes and "FAILED" not in outcomes
    report: Path = arguments.report or Path(f"memswap-selftest-{device.type}.json")
    content = {
        "passed": passed,
        "environment": environment(device),
        "checks": [asdict(check) for check in checks],
    }
    write(report, json.dumps(content, indent=1))
    verdict = "memswap works here" if passed else "memswap does NOT work here"
    ask = " Please send it: docs/ascend.md says where." if device.type == "npu" else ""
    print(f"\n{verdict}. The report is {report}.{ask}")
    return 0 if passed else 1
