"""``python -m memswap selftest --distributed``: one tiny exchange per lane, on every rank."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import memswap
from memswap.cli.table import render_table
from memswap.parallel.comm import ProcessGroupComm, check_lanes


def run(arguments: argparse.Namespace) -> int:
    """Check the ranks that torchrun started; rank 0 prints. The exit status is 0 if all is well."""
    if "RANK" not in os.environ:
        print(
            "memswap selftest --distributed: found no ranks; start them with torchrun, as in\n"
            "  torchrun --nproc-per-node 2 -m memswap selftest --distributed",
            file=sys.stderr,
        )
        return 2
    device = _device()
    dist.init_process_group(
        timeout=timedelta(seconds=arguments.timeout),
        device_id=None if device.type == "cpu" else device,
    )
    comm = ProcessGroupComm()
    configuration = f"memswap {memswap.__version__}, torch {torch.__version__}, {device.type}"
    results = list(check_lanes(comm, device, configuration))
    failed = [(name, wrong) for name, wrong in results if wrong]
    if comm.rank == 0:
        rows = [(name, "FAILED" if wrong else "ok") for name, wrong in results]
        print(f"{comm.size} ranks, {dist.get_backend_config()}, {configuration}")
        print(render_table(("exchange, as rank 0 sees it", "result"), rows), flush=True)
    for name, wrong in failed:  # every rank speaks for itself: the others may be out of reach
        print(f"memswap selftest: {name}: {wrong}", file=sys.stderr, flush=True)
    if not failed:
        dist.barrier()  # nobody leaves while another one still exchanges
        dist.destroy_process_group()
    return 1 if failed else 0


def _device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device
