"""An offloader by hand, right or with one of four deliberate bugs."""

from __future__ import annotations

import torch

import simdev

DEVICE = simdev.NAME


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Each saved tensor of an operator's goes to pinned memory and back, on a stream of its own."""

    def __init__(self, bug: str | None = None) -> None:
        self.side = torch.Stream(device=DEVICE)
        self.offloaded = 0

        def pack(tensor):
            if tensor.device.type != DEVICE or tensor.numel() < 256 or tensor.is_leaf:
                return tensor
            self.offloaded += 1
            main = torch.accelerator.current_stream()
            if bug != "leave does not wait for compute":
                self.side.wait_stream(main)
            with self.side:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor, non_blocking=True)
            if bug != "freed without record_stream":
                tensor.record_stream(self.side)
            return host

        def unpack(saved):
            if saved.device.type == DEVICE:
                return saved
            main = torch.accelerator.current_stream()
            with self.side:
                tensor = torch.empty(saved.shape, dtype=saved.dtype, device=DEVICE)
                tensor.copy_(saved, non_blocking=True)
            if bug != "return is not awaited":
                main.wait_stream(self.side)
            if bug != "returned tensor belongs to the side stream":
                tensor.record_stream(main)
            return tensor

        super().__init__(pack, unpack)
