"""shard: weights sharded over ranks, gathered just in time. The call shape of fully_shard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from memswap._native import native
from memswap.engine.autograd import differentiable
from memswap.parallel.in_flight import listen, listen_no_more
from memswap.parallel.schedule import ShardContext
from memswap.parallel.unit import Stay, Unit

if TYPE_CHECKING:
    from types import FrameType

Module = TypeVar("Module", bound="nn.Module | Sequence[nn.Module]")

#: On a parameter that was sharded: the name of the unit that has it now.
_TAKEN = "_memswap_sharded_by"

#: On a parameter that has this rank's rows of a weight: who gathers it.
ROWS = "_memswap_rows_of"


def shard(
    module: Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | None = None,
    residency: Literal["use", "step"] = "use",
    unshard_in_backward: bool = True,
    anchor: str | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    context: ShardContext | None = None,
) -> Module:
    """Shard a module's parameters over the ranks of a mesh; gather them when they are needed.

    Works like :func:`torch.distributed.fsdp.fully_shard`: call it on each layer, then on the model
    for what is left. The module stays what it is, with :class:`ShardedModule` added to its class;
    parameters keep their names and become ``DTensor`` with ``Shard(0)`` outside of forward and
    backward, which is what optimizers, ``state_dict``, distributed checkpoints and
    ``clip_grad_norm_`` see. Make the optimizer afterwards.

    All parameters of one call are a unit: one all-gather before it is used, beside the compute of
    the unit before it, and one reduce-scatter (mean over the ranks) of its gradients, beside the
    backward of the unit after it. Ranks must hold the same values when they call this.

    Args:
        module: a module, or several that are one unit: tied weights have to be in one call.
        mesh: a 1-D mesh; or a 2-D one (replicate, shard): weights are sharded over its second
            dimension, and gradients reduced over both.
        reshard_after_forward: drop the weights after forward and gather them again for backward.
            Default: True, but False for a module with sharded modules inside, whose backward comes
            first.
        residency: ``"step"`` keeps weights through all forwards and backwards until a backward that
            reduces gradients has ended (see ``set_requires_gradient_sync``): for schedulers that
            run many microbatches.
        unshard_in_backward: False if backward needs no weights (an embedding): none are gathered.
        anchor: name of a submodule (``"attn.wo"``) before whose forward the next unit's all-gather
            is launched. Default: behind the last exchange of the unit's attention, as the pass
            before had it (:class:`ContextParallel` or :func:`exchange`), since both use the same
            links; where there is none, at the unit's start.
        shard_placement_fn: returns, for a parameter, ``Shard(dim)`` to shard it along another
            dimension than 0, or None. Gathered, such a parameter is not contiguous.
        mp_policy: dtypes of gathered parameters, of the reduction and of inputs and outputs. Where
            it names none for the reduction, gradients are reduced in the dtype of the gathered
            parameters, and from torch 2.15 on, as its policy says, in that of the shards.
        ignored_params: parameters to leave alone.
        context: shares slots and order with the units of that context. Default: that of the sharded
            modules inside ``module``, which thereby prefetch each other.

    Returns:
        ``module``.

    Raises:
        TypeError: no module, no mesh, or an option of another kind.
        ValueError: a parameter is tied to one of another unit, has one rank's rows of a weight that
            something else gathers, is a scalar or not contiguous; the
            anchor is no submodule; the module is sharded already.
        NotImplementedError: this torch cannot guard weights that are not there; a mesh of more than
            two dimensions, parameters that are DTensors or want gradients of another dtype than
            theirs (``grad_dtype``), a policy with an override per parameter.
    """
    if not native.can_lend:
        raise NotImplementedError(
            f"shard() needs torch 2.13 or newer, found {torch.__version__}: in older ones a "
            "storage that refuses to be read while its weights are elsewhere refuses for ever"
        )
    modules = _checked_modules(module)
    _check_options(
        reshard_after_forward=(
            reshard_after_forward,
            reshard_after_forward is None or isinstance(reshard_after_forward, bool),
            "True, False or None: shard() has no weights on a part of the ranks after forward",
        ),
        mp_policy=(
            mp_policy,
            mp_policy is None or isinstance(mp_policy, MixedPrecisionPolicy),
            "a torch.distributed.fsdp.MixedPrecisionPolicy, such as "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16), or None",
        ),
        shard_placement_fn=(
            shard_placement_fn,
            shard_placement_fn is None or callable(shard_placement_fn),
            "a function of a parameter that returns Shard(dim) or None",
        ),
        ignored_params=(
            ignored_params,
            isinstance(ignored_params, Collection) and not isinstance(ignored_params, torch.Tensor),
            "parameters in a list or a set",
        ),
        context=(
            context,
            context is None or isinstance(context, ShardContext),
            "a memswap.parallel.ShardContext, or None",
        ),
    )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"shard(mesh=...): found {type(mesh).__name__}, expected a DeviceMesh, such as "
            "torch.distributed.device_mesh.init_device_mesh('cuda', (ranks,))"
        )
    if mesh.ndim > 2:
        raise NotImplementedError(
            f"shard(): found a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}, expected 1 or "
            "2 (replicate, shard); pass mesh['name'] or flatten it (mesh._flatten)"
        )
    if residency not in ("use", "step"):
        raise ValueError(f"shard(): residency={residency!r}, expected 'use' or 'step'")
    policy = mp_policy or MixedPrecisionPolicy()
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise NotImplementedError(
            "shard(): found a policy with param_dtype_override_fn, expected one dtype for all "
            "parameters of a call; shard the modules that keep their own dtype in another call"
        )
    inner = [unit for one in modules for unit in _units_inside(one)]
    parameters = _own_parameters(modules, ignored_params)
    if not parameters:
        raise ValueError(
            "shard(): found no parameter that is not sharded or ignored already; nothing to do"
        )
    anchors = _anchors(modules, anchor)
    context = _context_for(inner, context)
    reshard = not inner if reshard_after_forward is None else reshard_after_forward
    name = f"{type(modules[0]).__name__}.{len(context.units)}"
    dims = [_dimension(parameter, shard_placement_fn) for parameter in parameters]
    comm = context.comm(mesh.get_group(mesh.ndim - 1))
    replicas = context.comm(mesh.get_group(0)) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    own_memory = bool(inner) or not reshard or residency == "step"
    stay = Stay(reshard, residency, unshard_in_backward, anchor, own_memory)
    unit = Unit(name, modules, parameters, dims, mesh, policy, comm, replicas, stay)
    context.add(unit)
    for parameter in parameters:
        setattr(parameter, _TAKEN, name)
    hooks = UnitHooks(unit, context)
    for one in modules:
        _name_units(one)
        kind: Any = type(one)
        one.__class__ = _sharded_class(kind)
        one._memswap_hooks = hooks
    hooks.install(modules, anchors)
    return module


class ShardedModule:
    """What :func:`shard` adds to a module's class."""

    _memswap_hooks: UnitHooks

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's weights now; they stay until :meth:`reshard` or until they were used.

        Args:
            async_op: return at once, with a handle whose ``wait()`` makes the weights usable.
        """
        hooks = self._memswap_hooks
        hooks.context.fetch(hooks.unit)
        hooks.unit.pinned = True
        handle = UnshardHandle(hooks)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Drop the unit's gathered weights; the parameters are DTensors again."""
        hooks = self._memswap_hooks
        hooks.context.release(hooks.unit)

    def set_requires_gradient_sync(self, requires_sync: bool, recurse: bool = True) -> None:
        """Whether backward reduces gradients; if not, they accumulate unsharded until it does."""
        for unit in self._units(recurse):
            unit.sync = requires_sync

    def set_gradient_divide_factor(self, factor: float, recurse: bool = True) -> None:
        """What the sum of the ranks' gradients is divided by; at first, the number of ranks.

        1 where ranks hold parts of one sequence and the loss is a mean over all of it.
        """
        for unit in self._units(recurse):
            unit.divide_factor = factor

    def _units(self, recurse: bool) -> Iterator[Unit]:
        for module in cast(nn.Module, self).modules() if recurse else [self]:
            if isinstance(module, ShardedModule):
                yield module._memswap_hooks.unit

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, also after a backward that raised where it had weights gathered."""
        self._memswap_hooks.context.recover()
        result: Iterator[tuple[str, nn.Parameter]]
        result = super().named_parameters(*args, **kwargs)  # type: ignore[misc]
        return result

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``cuda``, ``half``: they change the shards."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self._memswap_hooks.unit.lay_out()
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        raise NotImplementedError(
            "a sharded module cannot be copied: copy the model before shard(), or load its "
            "state_dict into another one"
        )


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, hooks: UnitHooks) -> None:
        self._hooks = hooks

    def wait(self) -> None:
        """The weights are usable, by what is launched from now on, under the module's names."""
        self._hooks.context.use(self._hooks.unit)
        self._hooks.unit.expose()


@dataclass(eq=False)
class UnitHooks:
    """The hooks on a unit's modules: what :func:`shard` leaves on each of them."""

    unit: Unit
    context: ShardContext
    """Decides what happens when calls of the modules begin and end."""

    def install(self, modules: Sequence[nn.Module], anchors: Sequence[nn.Module]) -> None:
        """Join the unit's modules, and the submodules before whose calls the next is gathered."""
        calls = self.unit.calls
        for module in modules:
            calls.add(module, None, self._begin, begins_first=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_loading)
        for anchor in anchors:
            calls.add(anchor, None, self._reach_anchor)

    def _begin(self, key: object, module: nn.Module, args: Any, kwargs: Any) -> UnitCall:
        return UnitCall(self, module, args, kwargs)

    def _reach_anchor(self, *call: Any) -> None:
        self.context.reach_anchor(self.unit)

    def _before_state_dict(self, *args: Any) -> None:
        self.unit.hide()  # it has the shards

    def _before_loading(self, *args: Any) -> None:
        self.context.release(self.unit)  # what was gathered will not be what the shards are


class UnitCall:
    """One forward call of a unit's module, and its backward.

    A frozen weight is read by operators that lead to no gradient of the unit's own. They lead to
    the call's inputs; only when those have their gradients has backward left the unit. So the
    backward of a call of a unit with frozen parameters is open until then.

    Args:
        hooks: of the unit.
        module: whose forward it is.
        args: of that forward.
        kwargs: the same by name.
    """

    def __init__(self, hooks: UnitHooks, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._hooks = hooks
        self._module = module
        self._inputs: tuple[Any, Any] | None = (args, kwargs)
        self._reads_frozen = False
        self._open = False

    def enter(self, call: FrameType | None) -> tuple[Any, Any]:
        """Have the weights there; what the module is to get."""
        unit, context = self._hooks.unit, self._hooks.context
        inputs, self._inputs = self._inputs, None  # they may be gone before the call ends
        assert inputs is not None
        context.enter_forward(unit)
        listen(self, functools.partial(context.exchange_arrived, unit))
        if unit.policy.param_dtype is not None and unit.policy.cast_forward_inputs:
            inputs = _cast(inputs, unit.policy.param_dtype)
        found = differentiable(inputs) if unit.frozen else []
        if found:
            self._reads_frozen = True
            torch.autograd.graph.register_multi_grad_hook(found, self._ends_backward)
        return inputs

    def leave(self, output: Any) -> Any:
        """The unit is not used any more, until its backward; what the caller is to get."""
        listen_no_more(self)
        unit = self._hooks.unit
        if unit.policy.output_dtype is not None:
            output = _cast(output, unit.policy.output_dtype)
        outputs = differentiable(output)
        begins_backward = functools.partial(self._begins_backward, unit.versions)
        for tensor in outputs:
            tensor.register_hook(begins_backward)
        self._hooks.context.leave_forward(unit, self._module, bool(outputs))
        return output

    def abandon(self) -> None:
        """It was interrupted, so no hook has told its end."""
        listen_no_more(self)
        self._hooks.context.abandon_forward(self._hooks.unit)

    def _begins_backward(self, versions: tuple[int, ...], gradient: torch.Tensor) -> None:
        """An output has its gradient; ``versions`` are of the shards that forward gathered."""
        self._hooks.context.enter_unit_backward(self._hooks.unit, versions)
        if self._reads_frozen and not self._open:
            self._open = True
            self._hooks.unit.progress.open_calls += 1

    def _ends_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The inputs have their gradients."""
        if self._open:
            self._open = False
            self._hooks.unit.progress.open_calls -= 1
            self._hooks.context.gradient_arrived(self._hooks.unit)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast_one(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return pytree.tree_map_only(torch.Tensor, cast_one, values)


@functools.cache
def _sharded_class(cls: Any) -> Any:
    return type(f"Sharded{cls.__name__}", (ShardedModule, cls), {"__doc__": cls.__doc__})


def _check_options(**options: tuple[object, bool, str]) -> None:
    """Raise TypeError for an option that is not what it has to be.

    Args:
        options: by name what was found, whether it will do, and what was expected.
    """
    for name, (found, right, expected) in options.items():
        if not right:
            raise TypeError(
                f"shard({name}={found!r}): found {type(found).__name__}, expected {expected}"
            )


def _checked_modules(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    several = not isinstance(module, nn.Module) and isinstance(module, Iterable)
    modules: list[Any] = list(module) if several else [module]
    for one in modules:
        if not isinstance(one, nn.Module):
            raise TypeError(f"shard(): found {type(one).__name__}, expected an nn.Module")
        if isinstance(one, ShardedModule):
            raise ValueError(f"shard(): this {type(one).__name__} is sharded already")
        if isinstance(one, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"shard(): found a {type(one).__name__}, which has no forward: its hooks would "
                "never run. Shard its elements, or pass list(modules) to make them one unit"
            )
        for part in one.modules():
            if isinstance(part, FSDPModule):
                raise ValueError(
                    f"shard(): found {type(part).__name__}, which fully_shard has sharded; use one "
                    "of the two"
                )
    if not modules:
        raise ValueError("shard(): found an empty list, expected modules")
    return modules


def _units_inside(module: nn.Module) -> Iterator[UnitHooks]:
    for part in module.modules():
        if isinstance(part, ShardedModule):
            yield part._memswap_hooks


def _own_parameters(
    modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The parameters that no unit inside has, with every place where they are registered."""
    skip = {id(parameter) for parameter in ignored}
    seen: set[int] = set()
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}

    def walk(module: nn.Module) -> None:
        if id(module) in seen or isinstance(module, ShardedModule):
            return
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in skip:
                _check_parameter(name, parameter)
                found.setdefault(parameter, []).append((module, name))
        for child in module.children():
            walk(child)

    for module in modules:
        walk(module)
    return found


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    taken = getattr(parameter, _TAKEN, None)
    if taken is not None and not isinstance(parameter, DTensor):
        raise ValueError(
            f"shard(): parameter {name!r} is tied to one that unit {taken!r} has sharded; apart, "
            "they would be trained as two. Pass the modules that share it as one list: "
            "shard([embedding, head], ...)"
        )
    if hasattr(parameter, ROWS):
        raise ValueError(
            f"shard(): parameter {name!r} has this rank's rows of a weight that "
            f"{getattr(parameter, ROWS)} gathers, expected a whole weight; pass such parameters in "
            "ignored_params"
        )
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"shard(): parameter {name!r} is a DTensor already ({parameter.placements}); sharding "
            "on top of tensor parallelism is not implemented"
        )
    if parameter.ndim == 0:
        raise ValueError(
            f"shard(): parameter {name!r} is a scalar; make it 1-D with one element, or pass it in "
            "ignored_params"
        )
    if not parameter.is_contiguous():
        raise ValueError(
            f"shard(): parameter {name!r} is not contiguous (stride {parameter.stride()}); make it "
            "so before sharding"
        )
    if parameter.grad_dtype is not parameter.dtype:
        raise NotImplementedError(
            f"shard(): parameter {name!r} wants gradients in {parameter.grad_dtype} (grad_dtype), "
            f"expected its own dtype, {parameter.dtype}: gradients are reduced in mp_policy's "
            "reduce_dtype and given in the shard's. Keep such weights in the dtype of their "
            "gradients, with MixedPrecisionPolicy(param_dtype=...) for compute"
        )


def _dimension(
    parameter: nn.Parameter, placement_fn: Callable[[nn.Parameter], Shard | None] | None
) -> int:
    placement = None if placement_fn is None else placement_fn(parameter)
    if placement is None:
        return 0
    if not isinstance(placement, Shard) or not -parameter.ndim <= placement.dim < parameter.ndim:
        raise ValueError(
            f"shard(): shard_placement_fn returned {placement!r} for a parameter of shape "
            f"{tuple(parameter.shape)}; expected Shard(dim) with one of its dimensions, or None"
        )
    dim: int = placement.dim % parameter.ndim
    return dim


def _anchors(modules: Sequence[nn.Module], anchor: str | None) -> list[nn.Module]:
    if anchor is None:
        return []
    found = [dict(module.named_modules()).get(anchor) for module in modules]
    anchors = [module for module in found if module is not None]
    if not anchors or not anchor:
        names = [name for name, _ in modules[0].named_modules() if name]
        raise ValueError(
            f"shard(): anchor {anchor!r} is no submodule; there are {', '.join(names)}"
        )
    return anchors


def _context_for(inner: Sequence[UnitHooks], given: ShardContext | None) -> ShardContext:
    """The context for a unit around those inside: theirs, joined if each had one of its own."""
    contexts = list(dict.fromkeys(hooks.context for hooks in inner))
    if given is not None:
        return given
    if len(contexts) == 1:
        return contexts[0]
    if any(context.explicit for context in contexts):
        raise ValueError(
            f"shard(): the sharded modules inside have {len(contexts)} contexts; pass context= to "
            "say which one is meant"
        )
    joined = ShardContext()
    joined.explicit = False
    for hooks in dict.fromkeys(inner):
        joined.add(hooks.unit)
        hooks.context = joined
    return joined


def _name_units(module: nn.Module) -> None:
    """Names as seen from the outermost sharded module: they are what logs and errors show."""
    for path, part in module.named_modules():
        if isinstance(part, ShardedModule) and part is part._memswap_hooks.unit.modules[0]:
            part._memswap_hooks.unit.name = path
