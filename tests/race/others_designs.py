"""Designs of other offloaders whose wrong gradients were reported in public, each rebuilt small.

Nothing is copied from them: each class is what a report says that an offloader did, in as few lines
as show it. docs/other-offloaders.md has the table, with the reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from race_workloads import DEVICE, Region, new_input, new_stack, on_host

Hooks = torch.autograd.graph.saved_tensors_hooks


def leave(tensor: torch.Tensor, side: torch.Stream) -> torch.Tensor:
    """A copy in pinned memory, made on another stream behind what that stream waits for."""
    with side:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)
    return host


def come_back(host: torch.Tensor, side: torch.Stream) -> torch.Tensor:
    """A copy on the device that the current stream may read, and that nobody overwrites."""
    main = torch.accelerator.current_stream()
    side.wait_stream(main)
    with side:
        tensor = torch.empty(host.shape, dtype=host.dtype, device=DEVICE)
        tensor.copy_(host, non_blocking=True)
    main.wait_stream(side)
    tensor.record_stream(main)
    return tensor


class Right(Hooks):
    """What all of them meant: every edge is there."""

    def __init__(self) -> None:
        self.side = torch.Stream(device=DEVICE)
        super().__init__(self.pack, self.unpack)

    def moves(self, tensor: torch.Tensor) -> bool:
        parameter = tensor.is_leaf and tensor.requires_grad
        return tensor.device.type == DEVICE.type and not parameter and tensor.dim() > 0

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self.moves(tensor):
            return tensor
        self.side.wait_stream(torch.accelerator.current_stream())
        return leave(tensor, self.side)

    def unpack(self, saved: Any) -> torch.Tensor:
        return saved if saved.device.type == DEVICE.type else come_back(saved, self.side)


class InlineReload(Right):
    """Reads the pinned buffer on the compute stream without waiting for what fills it."""

    def unpack(self, saved: Any) -> torch.Tensor:
        if saved.device.type == DEVICE.type:
            return saved
        return torch.empty_like(saved, device=DEVICE).copy_(saved, non_blocking=True)


class CloneOnCopyStream(Right):
    """Clones what has an offset on the copy stream, and gives that clone back in backward."""

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self.moves(tensor) or tensor.storage_offset() == 0:
            return super().pack(tensor)
        with self.side:
            return tensor.clone()


class KeyWithoutStrides(Right):
    """One copy for all saved tensors with one address and dtype, in the order of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[Any, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self.moves(tensor):
            return tensor
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if key not in self.copies or self.copies[key].numel() != tensor.numel():
            self.copies[key] = super().pack(tensor)
        return self.copies[key].view(tensor.shape)


class Emptied:
    """A tensor whose storage was emptied, and the copy that fills it again."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.host = host
        self.nbytes = tensor.untyped_storage().nbytes()

    def filled(self) -> torch.Tensor:
        storage = self.tensor.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.nbytes)
            self.tensor.copy_(self.host, non_blocking=True)
        return self.tensor


class EmptiesStorages(Right):
    """Empties the storage of whatever was saved when the forward ends, whoever else has it.

    One view's bytes are copied, and one view's come back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Emptied] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self.moves(tensor):
            return tensor
        self.side.wait_stream(torch.accelerator.current_stream())
        self.saved.append(Emptied(tensor, leave(tensor, self.side)))
        return self.saved[-1]

    def unpack(self, saved: Any) -> torch.Tensor:
        return saved.filled() if isinstance(saved, Emptied) else saved

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.accelerator.current_stream().wait_stream(self.side)
        for one in self.saved:
            one.tensor.untyped_storage().resize_(0)
        self.saved.clear()


class StreamAskedTooLate(Right):
    """Asks for the current stream inside the copy stream's context: it waits for itself."""

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self.moves(tensor):
            return tensor
        with self.side:
            self.side.wait_stream(torch.accelerator.current_stream())
        return leave(tensor, self.side)


class FreedOnCopyStream(Right):
    """What came back is the copy stream's memory: its next copy may overwrite it."""

    def unpack(self, saved: Any) -> torch.Tensor:
        if saved.device.type == DEVICE.type:
            return saved
        with self.side:
            tensor = torch.empty_like(saved, device=DEVICE).copy_(saved, non_blocking=True)
        torch.accelerator.current_stream().wait_stream(self.side)
        return tensor


class StreamOfTheBeginning(Right):
    """Remembers the compute stream that was current when it was made."""

    def __init__(self) -> None:
        self.compute = torch.accelerator.current_stream()
        super().__init__()

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self.moves(tensor):
            return tensor
        self.side.wait_stream(self.compute)
        return leave(tensor, self.side)


# ---------------------------------------------------------------- what is trained
def stack(region: Region) -> list[torch.Tensor]:
    """Gradients of three steps of a small stack."""
    model = new_stack(DEVICE, depth=3)
    found: list[torch.Tensor] = []
    for step in range(3):
        model.zero_grad(set_to_none=True)
        with region():
            loss = model(new_input(DEVICE, seed=step))
        loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return on_host(found)


def stack_on_another_stream(region: Region) -> list[torch.Tensor]:
    """The same on a stream that is not the one on which everything was made."""
    entered = region()  # as a trainer makes it: before the first step
    torch.accelerator.synchronize()
    with torch.Stream(device=DEVICE):
        return stack(lambda: entered)


def _trained(
    make: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, region: Region
) -> list[torch.Tensor]:
    found = []
    for _ in range(3):
        weight.grad = None
        with region():
            loss = make(weight)
        loss.backward()
        found.append(weight.grad.clone())
    return on_host(found)


def shifted(region: Region) -> list[torch.Tensor]:
    """Targets without the first one, as each language model's: a saved tensor with an offset."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.rand(65, 16, generator=generator).to(DEVICE)
    weight = torch.rand(64, 16, generator=generator).to(DEVICE).requires_grad_()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        hidden = targets * 1.5
        return (weight.exp() * hidden[1:]).sum() + (weight * hidden[:-1].clone()).square().sum()

    return _trained(loss, weight, region)


def transposed(region: Region) -> list[torch.Tensor]:
    """A square matrix and its transpose are saved."""
    weight = new_input(DEVICE, seed=1).flatten()[:64].view(8, 8).clone().requires_grad_()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        hidden = weight * 3
        return (hidden @ weight).sum() + (hidden.t() @ weight).square().sum()

    return _trained(loss, weight, region)


def shared(region: Region) -> list[torch.Tensor]:
    """Rotary cosines, computed once and used in each layer, which end after each other."""
    angles = new_input(DEVICE, seed=2).flatten()[:64].view(8, 8)
    weight = new_input(DEVICE, seed=3).flatten()[:64].view(8, 8).clone().requires_grad_()
    found = []
    for _ in range(2):
        weight.grad = None
        cosines = angles.cos()
        hidden = weight * 2
        for _layer in range(2):
            with region():
                hidden = (hidden * cosines).tanh()
        hidden.sum().backward()
        found.append(weight.grad.clone())
    return on_host(found)


def chunked(region: Region) -> list[torch.Tensor]:
    """Queries and keys are parts of one storage, and each is saved."""
    weight = new_input(DEVICE, seed=4).flatten()[:128].view(8, 16).clone().requires_grad_()

    def loss(weight: torch.Tensor) -> torch.Tensor:
        queries, keys = (weight * 2).chunk(2, dim=1)
        return (queries * keys).square().sum()

    return _trained(loss, weight, region)
