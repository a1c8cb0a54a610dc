"""FSDP2's own tests, with `memswap.parallel.shard` in the place of `fully_shard`.

    python tests/integrations/fsdp2_tests.py FOLDER [--ranks 2] [--stock] [pytest arguments]

FOLDER has PyTorch's test/distributed/_composable/fsdp/test_fully_shard_*.py, tests for several
GPUs; here they run on a CPU, with gloo. ``--stock`` runs them with `fully_shard` itself: what fails
then says nothing about memswap. Nothing of theirs is in this repository. Prints a table;
docs/sharding.md has it.

A test that runs the same code for several configurations passes "in part" where some of these are
of `fully_shard` alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
from others_tests import Outcomes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal import common_distributed, common_fsdp, common_utils

from memswap.parallel import shard
from memswap.parallel.shard import ShardedModule

#: Folder to which ranks, which are processes, write what they left out.
LEFT_OUT = "MEMSWAP_FSDP2_LEFT_OUT"


class OfFsdp2Error(NotImplementedError):
    """What `fully_shard` takes and `shard` does not."""


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: fsdp.MixedPrecisionPolicy | None = None,
    offload_policy: fsdp.OffloadPolicy | None = None,
    ignored_params: Any = None,
    **unknown: Any,
) -> Any:
    """`shard`, called as FSDP2's tests call theirs."""
    if unknown:
        raise OfFsdp2Error(f"{next(iter(unknown))}=")
    if isinstance(offload_policy, fsdp.CPUOffloadPolicy):
        raise OfFsdp2Error("CPUOffloadPolicy")
    if reshard_after_forward not in (True, False, None):
        raise OfFsdp2Error("reshard_after_forward=int")
    if not any(not isinstance(one, DTensor) for one in module_parameters(module)):
        return module  # shard() refuses a call that has nothing to do, such as that of a bare root
    if mesh is None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return shard(
        module,
        mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        ignored_params=ignored_params or (),
    )


def module_parameters(module: Any) -> list[torch.nn.Parameter]:
    modules = [module] if isinstance(module, torch.nn.Module) else module
    return [parameter for one in modules for parameter in one.parameters()]


def run_subtests(
    test: Any, config: dict[str, list[Any]], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Theirs, which goes on behind a configuration that only `fully_shard` takes."""
    ran, left = 0, []

    def one(*given: Any, **more: Any) -> None:
        nonlocal ran
        try:
            fn(*given, **more)
            ran += 1
        except OfFsdp2Error as error:
            left.append(str(error))

    common_fsdp.run_subtests(test, config, one, *args, **kwargs)
    if left and not ran:
        raise OfFsdp2Error(left[0])
    if left:
        said = f"{ran} of {ran + len(left)} configurations; not: {', '.join(sorted(set(left)))}"
        name = test.id().split(".")[-1]
        Path(os.environ[LEFT_OUT], name).write_text(said, encoding="utf-8")


class FewRanks:
    """A plugin of pytest: tests of more ranks run on fewer."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def pytest_collection(self) -> None:
        self._asked = torch.accelerator.current_accelerator
        torch.accelerator.current_accelerator = lambda: torch.device("cpu")  # some ask at import

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for kind in {item.cls for item in items if isinstance(item, pytest.Function)}:
            wanted = kind.world_size
            if isinstance(wanted, property):
                kind.world_size = property(partial(self._at_most, wanted))
        # Whose ranks are threads come last: a process is not to be forked when it has had them.
        items.sort(key=lambda item: "MultiThread" in str(getattr(item, "cls", None).__mro__))

    def pytest_collection_finish(self) -> None:
        torch.accelerator.current_accelerator = self._asked

    def _at_most(self, wanted: property, test: Any) -> int:
        assert wanted.fget is not None
        return min(int(wanted.fget(test)), self._ranks)


def start_by_fork(test: Any) -> None:
    """Ranks are forked, so that they have what this process has put in the place of FSDP2."""
    test._start_processes(torch.multiprocessing.get_context("fork").Process)


def without_accelerator(ranks: int) -> None:
    """Tests that ask for GPUs, or that one sleeps, run on a CPU, as far as they can."""
    torch.accelerator.device_count = torch.cpu.device_count = lambda: ranks
    common_distributed.skip_if_lt_x_gpu = lambda *given, **options: lambda test: test
    common_utils.device_sleep = lambda *given: None
    common_utils.get_cycles_per_ms = lambda *given: 1.0
    skip_if = unittest.skipIf
    unittest.skipIf = lambda condition, why: skip_if(condition and "Sleep" not in why, why)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2, help="at most; a test may want fewer")
    parser.add_argument("--stock", action="store_true", help="with fully_shard itself")
    arguments, more = parser.parse_known_args()
    common_fsdp.FSDPTest._spawn_processes = start_by_fork
    without_accelerator(arguments.ranks)
    if not arguments.stock:
        common_fsdp.FSDPTestMixin.run_subtests = run_subtests
        common_fsdp.FSDPTestMultiThread.run_subtests = run_subtests
        for module in (fsdp, common_fsdp):
            module.fully_shard = fully_shard
        fsdp.FSDPModule = ShardedModule
    outcomes = Outcomes()
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--rootdir", str(arguments.folder)]
    files = [str(file) for file in sorted(arguments.folder.glob("test_fully_shard_*.py"))]
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LEFT_OUT] = folder
        pytest.main([*files, *options, *more], plugins=[outcomes, FewRanks(arguments.ranks)])
        for name, (outcome, _) in outcomes.rows.items():
            said = Path(folder, name.split("::")[-1])
            if outcome == "passed" and said.exists():
                outcomes.rows[name] = ("in part", said.read_text("utf-8"))
    print(outcomes.table())
    return 0 if outcomes.rows else 1


if __name__ == "__main__":
    sys.exit(main())
