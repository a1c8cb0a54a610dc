"""One step of a transformers model without weights: what it would have on a device, and when.

The model is made on the meta device, where tensors have shapes and no memory, and trains one step
there. A dispatch mode sees every operator's outputs, so it knows which storages are alive at any
moment, and what for. Weights in float32 are trained as most do, with bfloat16 by autocast, which
serves no meta tensors: those are the processor's then, as a `FakeTensorMode` has them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What a storage of a step is, beside weights and state: places in `Sizes.marks`.
GRADIENT, ACTIVATION, WORKSPACE = range(3)

#: What a model's attention is called here.
_ATTENTION = "memswap_plan"


@dataclass(frozen=True)
class Sizes:
    """What one step of a model has, as bytes and operations."""

    model: str
    parameters: int
    weights: int
    """Of parameters and buffers."""
    state: tuple[int, ...]
    """Of the optimizer, parameter by parameter."""
    step_bytes: int
    """What the optimizer's step allocates for itself, over all parameters at once."""
    activations: int
    """Saved for backward when forward ends, each storage once."""
    marks: tuple[tuple[int, int, int], ...]
    """After each operator of forward and backward: bytes of gradients, activations, workspace."""
    forward_marks: int
    """How many of `marks` are forward's."""
    layers: int
    forward_flop: float
    batch: int = 1
    of_images: bool = False

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self.marks[-1][GRADIENT]

    @property
    def state_bytes(self) -> int:
        """Bytes of all of the optimizer's state."""
        return sum(self.state)

    def movable(self) -> int:
        """Bytes of activations that can be away: all layers' but two."""
        return int(self.activations * max(0, self.layers - 2) / self.layers)

    def of_batch(self, batch: int) -> Sizes:
        """The same for another number of samples: activations and workspace are as many times."""
        times = batch / self.batch
        return replace(
            self,
            batch=batch,
            activations=int(self.activations * times),
            marks=tuple((g, int(a * times), int(w * times)) for g, a, w in self.marks),
            forward_flop=self.forward_flop * times,
        )

    def without_gradients(self) -> Sizes:
        """The same where each gradient is used up as soon as it is there."""
        return replace(self, marks=tuple((0, a, w) for _, a, w in self.marks))


def measure(config: Path, batch: int, length: int, optimizer: str, weights: torch.dtype) -> Sizes:
    """Bytes and operations of a step of a transformers configuration.

    Args:
        config: its config.json.
        batch: samples of a step.
        length: tokens of each; images have their own.
        optimizer: a class of torch.optim, in any case, or "none".
        weights: dtype of weights, gradients and state. Products are of bfloat16.

    Raises:
        ImportError: transformers is not installed.
        ValueError: there is no such optimizer, or the model cannot be run without weights.
        OSError: the file cannot be read.
    """
    model = _on_meta(config, weights)
    attention_flop = _register_attention(causal="CausalLM" in type(model).__name__)
    model.set_attn_implementation(_ATTENTION)
    _check_length(model, length)
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=_products_of_experts())
    with _tensors_of(model, weights) as device:
        live = LiveBytes(model)
        try:
            inputs = _inputs(model, batch, length, device)
            with live, live.saving():
                with counter, torch.autocast("cpu", torch.bfloat16, enabled=device == "cpu"):
                    loss = _loss(model(**inputs))
                forward_marks = len(live.marks)
                activations = live.totals[ACTIVATION]
                loss.backward()
                del loss
                live.mark()  # the last gradient is known as one since its operator
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            instead = "; try --weights bf16" if device == "cpu" else ""
            raise ValueError(
                f"{type(model).__name__} cannot be run without weights, on the {device} device: "
                f"{str(error).splitlines()[0]}{instead}"
            ) from error
        state, step_bytes = _state(model, optimizer)
    return Sizes(
        model=type(model).__name__,
        parameters=sum(one.numel() for one in model.parameters()),
        weights=live.owned_nbytes,
        state=state,
        step_bytes=step_bytes,
        activations=activations,
        marks=tuple(live.marks),
        forward_marks=forward_marks,
        layers=max(1, getattr(_text_of(model), "num_hidden_layers", 1)),
        forward_flop=counter.get_total_flops() + sum(attention_flop),
        batch=batch,
        of_images=model.main_input_name == "pixel_values",
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that are alive, by what they are for, after each operator.

    Args:
        model: whose weights are no part of it.
        others: storages that are none either.
    """

    def __init__(self, model: Any, others: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        weights = {_key(one): one for one in (*model.parameters(), *model.buffers())}
        self.owned_nbytes = sum(one.untyped_storage().nbytes() for one in weights.values())
        self._owned = {*weights, *map(_key, others)}
        self._alive: dict[int, tuple[Any, int, int]] = {}
        self._handles = [
            one.register_post_accumulate_grad_hook(lambda one: self._is(one.grad, GRADIENT))
            for one in model.parameters()
            if one.requires_grad
        ]
        self.totals = [0, 0, 0]
        self.marks: list[tuple[int, int, int]] = []

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves in here is an activation for as long as it lives."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._is(tensor, ACTIVATION)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                self._see(one)
        self.mark()
        return out

    def mark(self) -> None:
        """Note what is alive now."""
        gradients, activations, workspace = self.totals
        self.marks.append((gradients, activations, workspace))

    def _see(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._alive or key in self._owned:
            return
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        self._alive[key] = ref(storage, partial(self._gone, key)), nbytes, WORKSPACE
        self.totals[WORKSPACE] += nbytes

    def _gone(self, key: int, _: Any) -> None:
        _, nbytes, kind = self._alive.pop(key)
        self.totals[kind] -= nbytes

    def _is(self, tensor: torch.Tensor, kind: int) -> None:
        key = _key(tensor)
        if key in self._alive:
            storage, nbytes, before = self._alive[key]
            self._alive[key] = storage, nbytes, kind
            self.totals[before] -= nbytes
            self.totals[kind] += nbytes


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


# ---------------------------------------------------------------- the model
class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Saves what a fused attention does: its inputs, its output and a number for each row."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, length, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _on_meta(path: Path, weights: torch.dtype) -> Any:
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ImportError("--config needs transformers: pip install transformers") from error
    transformers.utils.logging.set_verbosity_error()
    try:
        text = json.loads(path.read_text("utf-8"))
        config = transformers.AutoConfig.for_model(**text)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--config {path}: expected the config.json of a transformers model, which says its "
            f"model_type: {str(error).splitlines()[0]}"
        ) from error
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    with torch.device("meta"):
        if kind is None:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=weights)
        else:
            model = kind._from_config(config, dtype=weights)
    model.config.use_cache = False
    return model.train()


def _register_attention(causal: bool) -> list[int]:
    """Makes `memswap_plan` an attention of transformers'; where its operations are counted."""
    modeling: Any = import_module("transformers.modeling_utils")
    flop: list[int] = []

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        batch, heads, rows, width = q.shape
        whole = 2 * batch * heads * rows * k.shape[-2] * (width + v.shape[-1])
        flop.append(whole // 2 if causal else whole)
        lower = torch.is_autocast_enabled("cpu")
        parts = [one.to(torch.bfloat16) if lower else one for one in (q, k, v)]
        return _Attention.apply(*parts), None

    modeling.ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, attend)
    return flop


def _products_of_experts() -> dict[Any, Any]:
    """What FlopCounterMode does not count: products of each expert's rows with its weights."""
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)

    def flop(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
        operations: int = 2 * rows[-2] * rows[-1] * weights[-1]
        return operations

    return {} if grouped is None else {grouped: flop}


@contextlib.contextmanager
def _tensors_of(model: Any, weights: torch.dtype) -> Iterator[str]:
    """A step's tensors have no memory in here; the name of the device that they say they are on."""
    if weights is not torch.float32:
        yield "meta"
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model._apply(lambda one: torch.empty(one.shape, dtype=one.dtype, device="cpu"))
        model.tie_weights()
        yield "cpu"


def _text_of(model: Any) -> Any:
    """The part of a configuration that is about text, where it has several."""
    return model.config.get_text_config()


def _check_length(model: Any, length: int) -> None:
    if model.main_input_name == "pixel_values":
        return
    longest = getattr(_text_of(model), "max_position_embeddings", length)
    if length > longest:
        raise ValueError(
            f"--seq {length}: {type(model).__name__} has positions for {longest}; give --seq "
            f"{longest} or less"
        )


def _inputs(model: Any, batch: int, length: int, device: str) -> dict[str, torch.Tensor]:
    """A batch, with labels where the model computes a loss of them."""
    config = model.config
    names = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        side = config.image_size
        size = (batch, config.num_channels, side, side)
        dtype = next(model.parameters()).dtype
        inputs = {"pixel_values": torch.zeros(size, dtype=dtype, device=device)}
        labels = torch.zeros(batch, dtype=torch.long, device=device)
    else:
        labels = torch.zeros(batch, length, dtype=torch.long, device=device)
        inputs = {"input_ids": labels}
        if type(model).__name__.endswith("SequenceClassification"):
            labels = labels[:, 0]
    return {**inputs, "labels": labels} if "labels" in names else inputs


def _loss(out: Any) -> torch.Tensor:
    """The model's own; where it has none, the sum of what it gives."""
    loss = getattr(out, "loss", None)
    if loss is not None:
        found: torch.Tensor = loss
        return found
    first: torch.Tensor = out[0]
    return first.float().sum()


# ---------------------------------------------------------------- its optimizer
def _state(model: Any, name: str) -> tuple[tuple[int, ...], int]:
    """Bytes that an optimizer keeps, parameter by parameter, and what its step allocates beside.

    All parameters are stepped together where it can (`foreach`), as on an accelerator by default.
    """
    if name.lower() == "none":
        return (), 0
    kinds = {key.lower(): one for key, one in vars(torch.optim).items() if isinstance(one, type)}
    kind = kinds.get(name.lower())
    if kind is None or kind is torch.optim.Optimizer or not issubclass(kind, torch.optim.Optimizer):
        known = sorted(
            key
            for key, one in kinds.items()
            if issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
        )
        raise ValueError(f"--optimizer {name}: expected one of {', '.join(known)}, or none")
    parameters = [one for one in model.parameters() if one.grad is not None]
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    if "foreach" in inspect.signature(kind).parameters:
        options["foreach"] = True
    try:
        optimizer = kind(parameters, **options)
        optimizer.step()
        tensors = [list(_tensors(optimizer.state.get(one, {}))) for one in parameters]
        gradients = [one.grad for one in parameters]
        with LiveBytes(model, [*gradients, *(one for row in tensors for one in row)]) as live:
            optimizer.step()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"--optimizer {name}: {str(error).splitlines()[0]}") from error
    state = tuple(sum(one.numel() * one.element_size() for one in row) for row in tensors)
    return state, max(map(sum, live.marks), default=0)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield value
