"""Gradients on a real GPU are the plain ones: streams, devices, autocast, captured graphs.

Needs --device cuda.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from gpu_training import Region, check, new_input, new_model, new_pool, train
from helpers import assert_same_gradients, gradients
from torch.nn.attention import SDPBackend, sdpa_kernel

import memswap

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("prefetch_bytes", ["auto", 0, "1MiB"])
def test_gradients_are_bit_identical(device: torch.device, prefetch_bytes: Any) -> None:
    check(device, train, prefetch_bytes=prefetch_bytes)


# ---------------------------------------------------------------- streams
def test_training_on_streams_of_the_users_own(device: torch.device) -> None:
    def program(on: torch.device, region: Region) -> list[torch.Tensor | None]:
        streams = [torch.cuda.Stream(on) for _ in range(2)]
        found: list[torch.Tensor | None] = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(on))
            with torch.cuda.stream(stream):
                found += train(on, region, steps=2)
        torch.cuda.synchronize(on)
        return found

    check(device, program, prefetch_bytes=0)


def test_two_devices(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    def program(on: torch.device, region: Region) -> list[torch.Tensor | None]:
        other = torch.device("cuda", 1)
        first, second = new_model(on, seed=0), new_model(other, seed=1)
        for step in range(3):
            with region():
                x = new_input(on, seed=step)
                for layer in first.layers:
                    x = layer(x)
                loss = second(x.to(other))
            loss.backward()
            del loss, x
        return gradients(first) + gradients(second)

    check(device, program)


# ---------------------------------------------------------------- what large models use
def test_a_bf16_transformer_with_autocast_and_flash_attention(device: torch.device) -> None:
    def program(on: torch.device, region: Region) -> list[torch.Tensor | None]:
        model = new_model(on)
        found: list[torch.Tensor | None] = []
        for step in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION), region():
                    loss = model(new_input(on, seed=step))
            loss.backward()
            del loss
            found += gradients(model)
            model.zero_grad(set_to_none=True)
        return found

    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    repeated = [program(device, contextlib.nullcontext) for _ in range(2)]
    assert_same_gradients(*repeated)  # or the comparison would say nothing
    check(device, program)


@pytest.mark.parametrize("action", ["swap", "encode", "encode_swap"])
def test_a_captured_graph_keeps_its_tensors_and_says_so(device: torch.device, action: str) -> None:
    """Nothing leaves inside a capture: the graph would replay copies into blocks of others."""

    def gradients_of_replay(region: Region) -> list[torch.Tensor | None]:
        model, x = new_model(device), new_input(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # as torch.cuda.graph's documentation warms up
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                model(x).backward()
        torch.cuda.current_stream(device).wait_stream(side)
        model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), region():
            loss = model(x)
            loss.backward()
        x.copy_(new_input(device, seed=7))
        graph.replay()
        torch.cuda.synchronize(device)
        found = gradients(model)
        graph.reset()
        return found

    expected = gradients_of_replay(contextlib.nullcontext)
    policy = memswap.Policy(action=memswap.Action(action), min_bytes=1)
    saved = memswap.saved_tensors(policy, pool=new_pool(device))
    with saved:  # the lane and the pool exist before the capture, as in a run that captures later
        new_model(device)(new_input(device)).backward()
    saved.reset_stats()
    found = gradients_of_replay(lambda: saved)
    assert_same_gradients(found, expected)
    stats = saved.stats()
    assert stats.moved_storages == 0, "a storage left inside a capture"
    assert stats.kept["stream capture"].tensors > 0
