"""accelerate: `prepare` and a manager, on one process, on two under DDP and with FSDP2."""

from __future__ import annotations

import os
import socket
import traceback

import pytest
import torch
import torch.multiprocessing as processes

accelerate = pytest.importorskip("accelerate")
tiny = pytest.importorskip("tiny")

from tiny import Trained, assert_no_hooks, assert_same_bits, llama, moved  # noqa: E402

from memswap.integrations.accelerate import prepare  # noqa: E402
from memswap.integrations.states import unwrapped  # noqa: E402
from memswap.optimizers import managed_optimizer  # noqa: E402

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def _a_new_state():
    """accelerate keeps one state for a process, which refuses another precision."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's own part of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(accelerator, folder=None, accumulate=1) -> tuple[Trained, str]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(tiny.windows(12), batch_size=2)
    if folder is None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        manager = None
    else:
        model, optimizer, loader, manager = prepare(
            accelerator, model, optimizer, loader, optimizer="encode", **tiny.swapping(folder)
        )
        assert managed_optimizer(unwrapped(optimizer)) is not None
    gradients, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                gradients += [
                    local(one.grad).clone() for one in model.parameters() if one.grad is not None
                ]
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    report = ""
    if manager is not None:
        report = manager.report()
        manager.remove()
    assert_no_hooks(model)
    weights = {name: local(one).detach().clone() for name, one in model.named_parameters()}
    return Trained(weights, gradients, losses), report


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process_gives_the_same_bits(tmp_path, precision, accumulate):
    def new():
        return accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
        )

    expected, _ = train(new())
    found, report = train(new(), tmp_path)
    assert_same_bits(found, expected)
    assert moved(report), report


def rank(number: int, port: int, folder: str, how: str, results) -> None:
    """One of two processes: trains plain and managed, and says what is wrong, if anything is."""
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
        plugin = None
        if how == "FSDP2":
            plugin = accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )
        accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.num_processes == 2
        expected, _ = train(accelerator)
        accelerator.free_memory()
        found, report = train(accelerator, folder)
        assert_same_bits(found, expected)
        assert moved(report) and "4 " in report, report
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_two_processes_give_the_same_bits(tmp_path, how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = processes.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=rank, args=(number, port, str(tmp_path), how, results), daemon=True)
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


def test_no_model_that_trains_is_an_error():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="no model with trainable parameters"):
        prepare(accelerator, llama().requires_grad_(False))
