"""Whatever streams and devices a program uses, managed training is silent and bit-identical."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, assert_nothing_left, assert_same_gradients, new_input, new_stack
from race_workloads import (
    DEVICE,
    Region,
    backward_on_another_stream,
    new_pool,
    on_host,
    one_stream_of_the_users_own,
    plain,
    two_streams,
)
from torch import nn

import memswap
from memswap._native import native
from simdev import _C

OTHER = torch.device(DEVICE.type, 1)
Program = Callable[[Region], list[torch.Tensor]]


def check(program: Program, **options: Any) -> memswap.types.Stats:
    """The program plain and managed, in the laboratory of the running test."""
    expected = program(plain)
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), **options)
    found = program(lambda: saved)
    assert_same_gradients(found, expected)
    torch.accelerator.synchronize()
    stats = saved.stats()
    assert stats.moved_storages > 0, "nothing moved: the test says nothing"
    assert_nothing_left(stats)
    return stats


@pytest.fixture(params=["auto", 0], ids=["prefetch", "demand"])
def prefetch_bytes(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_training_on_a_stream_of_the_users_own(prefetch_bytes: Any) -> None:
    check(one_stream_of_the_users_own, prefetch_bytes=prefetch_bytes)


def test_forward_on_one_stream_and_the_call_of_backward_on_another(prefetch_bytes: Any) -> None:
    check(backward_on_another_stream, prefetch_bytes=prefetch_bytes)


class Branches(nn.Module):
    """Two branches on two streams, joined by events, twice."""

    def __init__(self, streams: list[torch.Stream]) -> None:
        super().__init__()
        self.streams = streams
        self.trunk = nn.Linear(16, 16)
        self.branches = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        main = torch.accelerator.current_stream()
        for level in range(2):
            x = self.trunk(x).tanh()
            held.append(x)
            outputs = []
            for stream, branch in zip(self.streams, self.branches[2 * level :], strict=False):
                stream.wait_stream(main)
                with stream:
                    x.record_stream(stream)
                    outputs.append(branch(x).sigmoid() * x)
                held.append(outputs[-1])
            for stream, output in zip(self.streams, outputs, strict=True):
                main.wait_stream(stream)
                output.record_stream(main)
            x = outputs[0] * outputs[1] + x
        return x.square().mean()


def test_branches_on_several_streams_with_events_between(prefetch_bytes: Any) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Branches([torch.Stream(device=DEVICE) for _ in range(2)]).to(DEVICE)
        for step in range(3):
            held: list[torch.Tensor] = []
            with region():
                loss = model(new_input(DEVICE, seed=step), held)
            held.clear()
            loss.backward()
            del loss
        return on_host([parameter.grad for parameter in model.parameters()])

    check(program, prefetch_bytes=prefetch_bytes)


@pytest.mark.parametrize("held", [True, False], ids=["held", "recorded"])
def test_a_tensor_allocated_on_one_stream_and_saved_on_another(
    held: bool, prefetch_bytes: Any
) -> None:
    """Both ways in which a program may do that: keep it until the streams join, or record it."""

    def program(region: Region) -> list[torch.Tensor]:
        a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
        torch.manual_seed(0)
        weight = torch.randn(64, 64).to(DEVICE).requires_grad_()
        a.wait_stream(torch.accelerator.current_stream())
        b.wait_stream(torch.accelerator.current_stream())
        for step in range(4):
            with a:
                x = torch.full((64, 64), 1.0 + step, device=DEVICE)
                x.record_stream(b)
            b.wait_stream(a)
            with b:
                with region():
                    loss = ((x @ weight).tanh() * x).sum()
                if not held:
                    del x
                with a:  # memory that goes back to stream a is written again at once
                    junk = [torch.full((64, 64), 7.0, device=DEVICE) for _ in range(3)]
                loss.backward()
                del junk, loss
            if held:
                a.wait_stream(b)
                del x
        with b:
            return on_host([weight.grad])

    check(program, prefetch_bytes=prefetch_bytes)


def test_memory_of_another_streams_pool_is_not_freed_under_a_send() -> None:
    """Every use of x is ordered before stream a goes on, so dropping the graph later is legal.

    The lane has only ever seen stream b. The send of x reads after the uses that the program knows
    of; whoever frees x must order stream a, whose memory it is, after the send.
    """

    def program(region: Region) -> list[torch.Tensor]:
        a, b = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
        torch.manual_seed(0)
        weight = torch.randn(64, 64).to(DEVICE).requires_grad_()
        a.wait_stream(torch.accelerator.current_stream())
        b.wait_stream(torch.accelerator.current_stream())
        kept = []
        for step in range(3):
            with a:
                x = torch.full((64, 64), 1.0 + step, device=DEVICE)
            b.wait_stream(a)
            with b, region():
                y = (x * weight).tanh()
            used = b.record_event()
            del x
            with b:
                kept.append(y.detach().clone())
                a.wait_event(used)
                a.wait_stream(b)
                del y  # the graph goes; plain, x goes back to stream a, which has waited for b
        with b:
            return on_host(kept)

    expected = program(plain)
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
    found = program(lambda: saved)
    assert_same_gradients(found, expected)
    assert saved.stats().moved_storages > 0


def test_two_models_on_two_streams_that_never_meet(prefetch_bytes: Any) -> None:
    check(two_streams, prefetch_bytes=prefetch_bytes)


def test_the_current_stream_changes_between_one_save_and_the_next(prefetch_bytes: Any) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        streams = [torch.accelerator.current_stream()]
        streams += [torch.Stream(device=DEVICE) for _ in range(3)]
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)]).to(DEVICE)
        for step in range(3):
            x = new_input(DEVICE, seed=step)
            held = [x]
            with region():
                for number, layer in enumerate(layers):
                    stream = streams[(number + step) % 4]
                    stream.wait_stream(streams[(number + step - 1) % 4])
                    with stream:
                        if number == 0:
                            stream.wait_stream(streams[0])
                        x.record_stream(stream)
                        x = layer(x).tanh()
                        held.append(x)
            streams[0].wait_stream(stream)
            x.record_stream(streams[0])
            loss = x.square().mean()
            held.clear()
            del x
            loss.backward()
            del loss
        return on_host([parameter.grad for parameter in layers.parameters()])

    check(program, prefetch_bytes=prefetch_bytes)


def test_only_memory_of_another_stream_waits_for_recorded_streams_when_it_is_freed(
    request: pytest.FixtureRequest,
) -> None:
    """The slow way (record_stream) is taken where it is needed, and only there."""

    def frees_in_waiting(stream: torch.Stream) -> int:
        main = torch.accelerator.current_stream()
        saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=0)
        most = 0
        for step in range(3):
            x = torch.full((64,), 1.0 + step, device=DEVICE)  # memory of the main stream
            leaf = torch.ones(64, device=DEVICE, requires_grad=True)
            stream.wait_stream(main)
            with stream:
                with saved:
                    loss = (leaf * x).sin().sum()
                del x
                most = max(most, _C.memory_stats(0)["deferred"])
                loss.backward()
                del loss
            most = max(most, _C.memory_stats(0)["deferred"])
            main.wait_stream(stream)
            del leaf
        torch.accelerator.synchronize()
        assert saved.stats().moved_storages > 0
        return most

    here = torch.accelerator.current_stream()
    assert frees_in_waiting(here) == 0, "record_stream in the hot path of a single stream"
    several = frees_in_waiting(torch.Stream(device=DEVICE))
    if "lazy" in request.node.name:
        assert several > 0, "another stream used the memory and the allocator was not told"


@pytest.mark.every_action("swap", "encode", "encode_swap")  # a recipe is no transfer
def test_record_stream_is_not_called_before_a_second_compute_stream_was_met() -> None:
    """It is not free everywhere: torch_npu records an event and puts the free off, for the owner
    of the memory as well."""
    main, other = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool())

    def calls_in_a_step(stream: torch.Stream) -> int:
        before = _C.memory_stats(0)["recorded"]
        leaf = torch.ones(4096, device=DEVICE, requires_grad=True)
        stream.wait_stream(main)
        with stream:
            with saved:
                loss = (leaf * 2).sin().exp().sum()
            loss.backward()
            del loss
        main.wait_stream(stream)
        torch.accelerator.synchronize()
        assert leaf.grad is not None
        return int(_C.memory_stats(0)["recorded"]) - before

    assert [calls_in_a_step(main) for _ in range(3)] == [0, 0, 0]
    assert calls_in_a_step(other) > 0, "the allocator was not told of the second stream"
    assert saved.stats().moved_storages > 0


def test_gathering_small_tensors_calls_record_stream_only_then_as_well() -> None:
    main, other = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    group = memswap.Group("small", EVERYTHING, pool=new_pool())

    def calls(stream: torch.Stream) -> int:
        before = _C.memory_stats(0)["recorded"]
        stream.wait_stream(main)
        with stream:
            added = [group.add(torch.full((900,), float(n), device=DEVICE)) for n in range(3)]
            group.launch_offload()
            group.wait_offload()
            group.launch_load()
            group.wait_load()
            assert [one.tensor()[0].item() for one in added] == [0, 1, 2]
            del added
        main.wait_stream(stream)
        torch.accelerator.synchronize()
        return int(_C.memory_stats(0)["recorded"]) - before

    assert [calls(main) for _ in range(2)] == [0, 0]
    assert calls(other) > 0, "the allocator was not told of the second stream"


def test_the_allocator_is_told_who_used_a_part_of_a_larger_storage() -> None:
    """Allocators pass over memory that is not their own; a part's belongs to the whole."""
    lane = native.StreamLane(DEVICE, max_leaving_bytes=0, chunk_bytes=1 << 20)
    pool = new_pool()
    whole = native.StorageRef(torch.ones(4096, dtype=torch.uint8, device=DEVICE))
    part = native.part(whole, 512, 1024)
    other = torch.Stream(device=DEVICE)
    other.wait_stream(torch.accelerator.current_stream())
    before = _C.memory_stats(0)["recorded"]
    with other:
        ticket = lane.send(part, pool.native.allocate(1024))
        ticket.wait()
    assert _C.memory_stats(0)["recorded"] > before, "the owner of the memory was not told"
    torch.accelerator.synchronize()


# ---------------------------------------------------------------- devices
@pytest.fixture
def second_device() -> torch.device:
    if _C.device_count < 2:
        pytest.skip("needs two simulated devices")
    return OTHER


def test_a_model_on_the_second_device(second_device: torch.device, prefetch_bytes: Any) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        model, found = new_stack(second_device, depth=2), []
        for step in range(2):
            with region():
                loss = model(new_input(second_device, seed=step))
            loss.backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return on_host(found)

    check(program, prefetch_bytes=prefetch_bytes)


def test_a_model_across_two_devices(second_device: torch.device, prefetch_bytes: Any) -> None:
    def program(region: Region) -> list[torch.Tensor]:
        torch.manual_seed(0)
        devices = [DEVICE, second_device]
        layers = nn.ModuleList([nn.Linear(16, 16).to(devices[i % 2]) for i in range(6)])
        found = []
        for step in range(3):
            x = new_input(DEVICE, seed=step)
            with region():
                for number, layer in enumerate(layers):
                    x = layer(x.to(devices[number % 2])).tanh()
                loss = x.square().mean()
            loss.backward()
            del loss, x
            found += [parameter.grad.clone() for parameter in layers.parameters()]
            layers.zero_grad(set_to_none=True)
        return on_host(found)

    check(program, prefetch_bytes=prefetch_bytes)


def test_one_manager_of_two_models_on_two_devices(second_device: torch.device) -> None:
    def program(managed: bool) -> list[torch.Tensor]:
        models = [new_stack(device, depth=1, seed=3) for device in (DEVICE, second_device)]
        layers = [layer for model in models for layer in model.layers]
        manager = memswap.manage(layers, EVERYTHING, pool=new_pool()) if managed else None
        found = []
        for step in range(3):
            losses = [
                model(new_input(device, seed=step))
                for model, device in zip(models, (DEVICE, second_device), strict=True)
            ]
            for loss in losses:
                loss.backward()
            del losses, loss
            for model in models:
                found += [parameter.grad.clone() for parameter in model.parameters()]
                model.zero_grad(set_to_none=True)
        if manager is not None:
            assert manager.stats().moved_storages > 0
            assert_nothing_left(manager.stats())
            manager.remove()
        return on_host(found)

    assert_same_gradients(program(True), program(False))


# ---------------------------------------------------------------- threads
def test_threads_with_streams_of_their_own_share_one_engine() -> None:
    """Autograd's thread state is per thread; so are current streams. The lane is shared."""
    saved = memswap.saved_tensors(EVERYTHING, pool=new_pool(), prefetch_bytes=4096)
    torch.accelerator.synchronize()

    def train(seed: int, region: Region, found: dict[int, Any]) -> None:
        try:
            stream = torch.Stream(device=DEVICE)
            with stream:
                generator = torch.Generator().manual_seed(seed)
                weights = [
                    torch.randn(16, 16, generator=generator).to(DEVICE).requires_grad_()
                    for _ in range(3)
                ]
                for step in range(4):
                    x = new_input(DEVICE, seed=step + seed)
                    with region():
                        for weight in weights:
                            x = (x @ weight).tanh()
                        loss = x.square().mean()
                    loss.backward()
                    del loss, x
                found[seed] = on_host([weight.grad for weight in weights])
        except BaseException as error:
            found[seed] = error

    expected: dict[int, Any] = {}
    for seed in range(3):
        train(seed, plain, expected)
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=train, args=(seed, lambda: saved, found)) for seed in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    for seed in range(3):
        if isinstance(found[seed], BaseException):
            raise found[seed]
        assert_same_gradients(found[seed], expected[seed])
    torch.accelerator.synchronize()
    assert saved.stats().moved_storages > 0
    assert_nothing_left(saved.stats())
