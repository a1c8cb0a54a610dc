"""MindSpeed's tensor swap: its names and call patterns on memswap's groups.

What was one for the whole process there is an :class:`AsyncSwapHandler` that contexts are given::

    handler = AsyncSwapHandler()
    contexts = [TensorSwapContext("model.layers.*", handler=handler) for _ in model.layers]

Two models have two handlers and do not meet. A context without a handler has one of its own, and so
knows no neighbours whose tensors it could ask for in advance. Bytes go to a pool that is used again
and again, nothing is resized, and the caller's tensors keep their memory for as long as the caller
holds them. docs/migration.md shows before and after.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import nn

from memswap._native import native
from memswap.activations import checked_policy
from memswap.engine.action import Action, TensorInfo
from memswap.engine.autograd import is_parameter
from memswap.engine.durations import stream_of
from memswap.groups import Added, Group, Groups
from memswap.layer_chain import Track
from memswap.modules import ModuleSwap, swap_modules
from memswap.planning.policy import Policy, Restricted

if TYPE_CHECKING:
    from memswap.engine.group import Generation
    from memswap.engine.stats import Stats
    from memswap.engine.transfer import Pool

CheckFn = Callable[[torch.Tensor], bool]


class TensorLocation(enum.Enum):
    """Where a swapped tensor's bytes are."""

    DEVICE = "device"
    HOST = "host"


def is_valid_for_swap(tensor: torch.Tensor, custom_check_fn: CheckFn | None = None) -> bool:
    """Whether a tensor may be swapped: a plain one with bytes, no parameter nor a view of one."""
    if is_parameter(tensor) or native.capture(tensor) is None:
        return False
    return custom_check_fn is None or bool(custom_check_fn(tensor))


class TensorKeyManager:
    """Numbers the tensors of each layer, in the order in which they are saved."""

    def __init__(self) -> None:
        self._layer = -1
        self._counts: dict[int, int] = {}

    def get_key(self, layer_idx: int) -> tuple[tuple[int, int], bool]:
        """``(layer, index)``, and whether the layer before has completed."""
        completed = False
        if layer_idx < self._layer:
            self._counts = {}
        elif layer_idx > self._layer:
            completed = layer_idx != 0
        if layer_idx != self._layer:
            self._counts[layer_idx] = 0
        self._layer = layer_idx
        self._counts[layer_idx] += 1
        return (layer_idx, self._counts[layer_idx] - 1), completed

    def get_prefetch_keys(self, layer_idx: int, tensor_idx: int) -> list[tuple[int, int]]:
        """The keys of the layer before that belong to a tensor, in proportion to its place.

        Empty where that layer saved nothing.
        """
        before, here = self._counts.get(layer_idx - 1, 0), self._counts.get(layer_idx, 0)
        if not before or not here:
            return []
        first, last = tensor_idx * before // here, (tensor_idx + 1) * before // here
        return [(layer_idx - 1, index) for index in range(first, last)]


class SwapTensor:
    """A tensor that a handler has swapped. Its memory is free once the caller drops the tensor."""

    def __init__(self, added: Added, key: tuple[int, int], generation: Generation) -> None:
        self.key = key
        self.generation = generation
        self._added = added

    @property
    def device_tensor(self) -> torch.Tensor:
        """The tensor; brought back now if it is away."""
        return self._added.tensor()

    @property
    def current_location(self) -> TensorLocation:
        """Where the bytes are, as far as the calls so far say."""
        return TensorLocation.HOST if self._added.away else TensorLocation.DEVICE

    def async_d2h(self, stream: torch.Stream | None = None) -> None:
        """Start sending this tensor and what was swapped with it; on the lane's own stream."""
        self.generation.launch_offload()

    def wait_d2h_finished(
        self, stream: torch.Stream | None = None, should_wait_streams: bool = True
    ) -> None:
        """What follows comes after the send. The order that is asked for is always kept."""
        self.generation.wait_offload()

    def async_h2d(
        self,
        h2d_stream: torch.Stream | None = None,
        should_resize_storage: bool = True,
        working_stream: torch.Stream | None = None,
    ) -> None:
        """Start bringing this tensor and what was swapped with it back, into new memory."""
        self.generation.launch_load()


class AsyncSwapHandler:
    """The engine behind contexts: one for each model.

    Args:
        custom_check_fn: whether a tensor may be swapped, for callers and contexts without a check.
        policy: memswap's own terms; default: swap everything, of any size.
        pool: where bytes go; see :class:`memswap.saved_tensors`.
    """

    def __init__(
        self,
        custom_check_fn: CheckFn | None = None,
        *,
        policy: Policy | None = None,
        pool: Pool | None = None,
    ) -> None:
        swap = Policy(Action.SWAP, min_bytes=1)
        self.custom_check_fn = custom_check_fn
        chosen = checked_policy(swap if policy is None else policy)
        # Patterns name units, and the units here have names of this file's own.
        chosen = replace(chosen, include=(), exclude=())
        checks: dict[str, CheckFn | None] = {}

        def allows(tensor: torch.Tensor, info: TensorInfo) -> bool:
            check = checks.get(info.unit)
            return check is None or check(tensor)

        self._checks = checks  # not through self: the engine must not own the handler
        self.engine = Groups.of(Restricted(chosen, allows), pool)
        self._tracks: dict[tuple[str, bool], Track] = {}
        self._keys = TensorKeyManager()
        self._layers: dict[int, Group] = {}
        self._swapped: WeakValueDictionary[tuple[int, int], SwapTensor] = WeakValueDictionary()

    def set_custom_check_fn(self, fn: CheckFn | None) -> None:
        """The check from now on."""
        self.custom_check_fn = fn

    def stats(self) -> Stats:
        """What was done so far."""
        return self.engine.stats()

    # --- for contexts -----------------------------------------------------------------------------

    def join(self, module_tag: str, prefetch: bool) -> tuple[Track, int]:
        """The next layer of a tag."""
        key = (module_tag, prefetch)
        if key not in self._tracks:
            self._tracks[key] = Track(self.engine, distance=1 if prefetch else 0)
        track = self._tracks[key]
        track.groups.append(self.engine.new(f"{module_tag}[{len(track.groups)}]"))
        return track, len(track.groups) - 1

    def check_for(self, group: Group, fn: CheckFn | None) -> None:
        """The check of one context: nobody else's."""
        self._checks[group.name] = self.custom_check_fn if fn is None else fn

    # --- one tensor after another, as saved-tensor hooks of one's own would -----------------------

    def swap_out_cur_and_release_prev(
        self, tensor: torch.Tensor, layer_idx: int, layer_nums: int
    ) -> torch.Tensor | SwapTensor:
        """Swap a tensor out and wait for the layer before; the tensor itself if it may not."""
        if not is_valid_for_swap(tensor, self.custom_check_fn):
            return tensor
        key, completed = self._keys.get_key(layer_idx)
        if completed:
            self.release_device_tensor(layer_idx - 1)
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self.engine.new(f"layer {layer_idx}")
        group = self._layers[layer_idx]
        generation = group.begin() if key[1] == 0 else group.newest
        swapped = SwapTensor(group.add(tensor), key, generation)
        self._swapped[key] = swapped
        if layer_idx < layer_nums - 1:
            generation.launch_offload()
        return swapped

    def wait_cur_and_prefetch_next(
        self, tensor: torch.Tensor | SwapTensor, prefetch: bool = True
    ) -> torch.Tensor:
        """The tensor, brought back; the layer before comes after it."""
        if not isinstance(tensor, SwapTensor):
            return tensor
        if prefetch:
            self.prefetch_tensors(*tensor.key)
        return tensor.device_tensor

    def exist(self, key: tuple[int, int]) -> bool:
        """Whether a tensor of this key is alive."""
        return key in self._swapped

    def release_device_tensor(self, layer_idx: int) -> None:
        """What follows comes after the sends of a layer; nothing if it saved nothing."""
        group = self._layers.get(layer_idx)
        if group is not None and group.newest.launched:
            group.newest.wait_offload()

    def prefetch_tensors(
        self,
        layer_idx: int,
        tensor_idx: int,
        h2d_stream: torch.Stream | None = None,
        d2h_stream: torch.Stream | None = None,
    ) -> None:
        """Start bringing back what comes after a tensor in backward."""
        for key in self._keys.get_prefetch_keys(layer_idx, tensor_idx):
            swapped = self._swapped.get(key)
            if swapped is not None and swapped.generation.launched:
                swapped.generation.launch_load()

    @property
    def d2h_stream(self) -> torch.Stream:
        """The stream that sends."""
        return self._stream("send_stream", "d2h_stream")

    @property
    def h2d_stream(self) -> torch.Stream:
        """The stream that brings back."""
        return self._stream("fetch_stream", "h2d_stream")

    def _stream(self, ours: str, name: str) -> torch.Stream:
        for route in self.engine.saver.open_routes():
            packed = getattr(route.lane, ours, None)
            if packed is not None:
                return stream_of(packed)
        raise NotImplementedError(
            f"AsyncSwapHandler.{name}: no tensor of an accelerator was swapped yet, and tensors in "
            "host memory are copied by threads"
        )


class TensorSwapContext:
    """Swaps what one layer's forward saves: a context manager around it.

    Args:
        module_tag: contexts of one handler with the same tag are the layers of one tower, in the
            order in which they are made. The last layer stays.
        custom_check_fn: whether a tensor may be swapped; for this context alone.
        prefetch: whether backward brings the layer before back in advance.
        handler: the engine, shared by the contexts of a model.
    """

    def __init__(
        self,
        module_tag: str = "default",
        custom_check_fn: CheckFn | None = None,
        prefetch: bool = True,
        *,
        handler: AsyncSwapHandler | None = None,
    ) -> None:
        self.module_tag = module_tag
        self.prefetch = prefetch
        self.swap_handler = AsyncSwapHandler() if handler is None else handler
        self._track, self.layer_idx = self.swap_handler.join(module_tag, prefetch)
        self._entered: list[bool] = []
        self.set_custom_check_fn(custom_check_fn)

    def __enter__(self) -> TensorSwapContext:
        self._entered.append(self._track.enter(self.layer_idx, dict))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._entered.pop():
            self._track.leave(self.layer_idx)

    def set_custom_check_fn(self, fn: CheckFn | None) -> None:
        """This context's check from now on; None: the handler's."""
        self.swap_handler.check_for(self._track.groups[self.layer_idx], fn)

    @property
    def layer_nums(self) -> int:
        """How many layers the tag has so far."""
        return len(self._track.groups)


def swap_activation_modules(
    model: nn.Module | Mapping[str, nn.Module],
    plan: str | Sequence[str],
    *,
    pool: Pool | None = None,
) -> ModuleSwap:
    """Swap the input of each module that matches the plan: :func:`memswap.swap_modules`."""
    policy = Policy(Action.SWAP, min_bytes=1)
    return swap_modules(model, plan, only_input=True, policy=policy, pool=pool)
