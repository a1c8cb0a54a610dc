"""Host time that memswap's hooks cost per saved tensor, pack and unpack together.

Every mode builds the same graph: a chain of nodes that each save one fresh tensor and read it back
in backward. What a node costs without hooks is measured as well and taken off, so a row is the
price of its hooks. On an accelerator the device works behind the host and is not waited for inside
the measured time; on a CPU copying is the host's own work and is in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from common import make_parser, summarize, synchronize, write_result

import memswap
from memswap.cli.bench.timing import alternate
from memswap.cli.table import format_ratio, render_table
from memswap.engine.units import format_bytes

BASELINE = "identity hook"


class SaveOne(torch.autograd.Function):
    """Saves one tensor, passes the gradient through and computes nothing."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(payload)
        return chain.view_as(chain)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        return gradient, None


def run_once(
    context: Callable[[], AbstractContextManager[Any]],
    tensors: int,
    elements: int,
    device: torch.device,
) -> float:
    """Return the host seconds of one forward and one backward."""
    leaf = torch.zeros((), device=device, requires_grad=True)
    synchronize(device)
    began = time.perf_counter()
    with context():
        chain = leaf
        for _ in range(tensors):
            payload = torch.empty(elements, dtype=torch.bfloat16, device=device)
            chain = SaveOne.apply(chain, payload)
    chain.backward()
    elapsed_s = time.perf_counter() - began
    synchronize(device)
    return elapsed_s


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=200, help="saved per graph")
    parser.add_argument("--tensor-bytes", type=int, default=256 << 10)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    elements = arguments.tensor_bytes // 2

    keep = memswap.Policy(action=memswap.Action.KEEP, min_bytes=0)
    swap = memswap.Policy(action=memswap.Action.SWAP, min_bytes=0)
    pool = memswap.DiskPool() if device.type == "cpu" else memswap.HostPool()
    pin = device.type != "cpu"
    save_on_cpu = "save_on_cpu(pin_memory=True)" if pin else "save_on_cpu (no copy on a CPU)"
    hooks = torch.autograd.graph.saved_tensors_hooks
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "no hooks": nullcontext,
        BASELINE: lambda: hooks(lambda tensor: tensor, lambda tensor: tensor),
        "memswap, KEEP": lambda: memswap.saved_tensors(keep),
        "memswap, SWAP": lambda: memswap.saved_tensors(swap, pool=pool),
        save_on_cpu: lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin),
    }
    measures = {
        name: lambda context=context: run_once(context, arguments.tensors, elements, device)
        for name, context in contexts.items()
    }
    collected = alternate(measures, arguments.rounds, warm_up=2)

    # Differences within a round: both saw the same machine, however busy it was.
    bare = collected["no hooks"]
    price = {
        name: statistics.median(one - other for one, other in zip(seconds, bare, strict=True))
        / arguments.tensors
        for name, seconds in collected.items()
    }
    baseline_us = statistics.median(collected[BASELINE]) / arguments.tensors * 1e6
    rows, result = [], {}
    for name, seconds in collected.items():
        whole_us = statistics.median(seconds) / arguments.tensors * 1e6
        result[name] = {
            "hooks_us_per_tensor": price[name] * 1e6,
            "node_us": {
                key: value if key == "count" else value / arguments.tensors * 1e6
                for key, value in summarize(seconds).items()
            },
        }
        hooks_us = "" if name == "no hooks" else f"{price[name] * 1e6:.2f}"
        rows.append([name, f"{whole_us:.2f}", format_ratio(whole_us, baseline_us), hooks_us])
    print(
        f"{device}: {arguments.tensors} saved tensors of {format_bytes(arguments.tensor_bytes)}, "
        f"medians of {arguments.rounds} alternating runs"
    )
    print(render_table(["", "us per node", f"against {BASELINE}", "of it hooks, us"], rows))
    options = {"tensors": arguments.tensors, "tensor_bytes": arguments.tensor_bytes}
    write_result(
        arguments.json, device, {"baseline": BASELINE, "options": options, "modes": result}
    )


if __name__ == "__main__":
    main()
