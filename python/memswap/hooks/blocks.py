"""Blocks: the repeated blocks of a model, which `manage(model)` manages one by one.

They are looked for in three ways, of which the one counts that finds more parameters:

- the elements of a ModuleList, ModuleDict or Sequential two or more of which are of one class (of
  lists inside each other the outer one). Beside the largest list others count that have at least a
  tenth of its parameters: an encoder beside a decoder, but not a list of small heads.
- the modules that a transformers or diffusers model names in `_no_split_modules` or
  `_repeated_blocks`, also where they have as many: layers of different classes may have lists
  (experts) that are not what is repeated.
- transformers' GradientCheckpointingLayers, also where they have a little less: embeddings that a
  model names, or what stands between layers, are not what is repeated.

A model without any is one unit. Where a model calls its blocks inside checkpoint regions, which
save nothing but the blocks' inputs, what calls them is the unit instead (`_outside_regions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

#: Where torch's own wrappers hold the module that they wrap.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

#: A list counts beside the largest one if it has at least this share of its parameters.
LEAST_SHARE = 1 / 10

#: GradientCheckpointingLayers count if they have at least this share of what else was found.
CHECKPOINTED_SHARE = 9 / 10

#: Where transformers and diffusers name the classes of a model's blocks.
_NAMED = ("_no_split_modules", "_repeated_blocks")

#: Modules that hold others, in order.
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Blocks:
    """What was found in a model."""

    units: dict[str, nn.Module]
    """By their names in the model inside all wrappers."""
    models: tuple[nn.Module, ...]
    """The model as it was given, and as it is inside its wrappers: a forward of either begins an
    iteration. None where the model itself is the unit."""
    description: str
    """For people."""

    @classmethod
    def given(cls, units: dict[str, nn.Module]) -> Blocks:
        """Units that somebody has chosen."""
        return cls(units, (), f"units: {_described(units)}")


def named_units(
    modules: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    caller: str = "manage()",
) -> dict[str, nn.Module]:
    """The modules that somebody gives, by name.

    Args:
        modules: one, or several in a list or a mapping.
        caller: for messages.

    Raises:
        TypeError: an element is no module, or none that hooks can be put on and that is called.
        ValueError: there is none, or one of them twice.
    """
    if isinstance(modules, LISTS):
        units: dict[str, Any] = dict(modules.named_children())
    elif isinstance(modules, nn.Module):
        units = {"0": modules}
    elif isinstance(modules, Mapping):
        units = dict(modules)
    elif isinstance(modules, Iterable):
        units = {str(i): module for i, module in enumerate(modules)}
    else:
        _refuse(modules, caller)
    if not units:
        raise ValueError(f"{caller}: found no modules; pass the model's layers")
    for module in units.values():
        if not isinstance(module, nn.Module):
            _refuse(module, caller)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{caller}: found {type(module).__name__}, which torch.jit has compiled and which "
                "takes no hooks; memswap.saved_tensors() around its call saves what it saves"
            )
        if getattr(module.forward, "__func__", None) is nn.Module.forward:
            raise TypeError(
                f"{caller}: found {type(module).__name__}, which has no forward and is never "
                "called; expected the layers that it holds"
            )
    if len({id(module) for module in units.values()}) != len(units):
        raise ValueError(f"{caller}: a module was given twice; pass each layer once")
    return units


def _refuse(found: object, caller: str) -> NoReturn:
    raise TypeError(
        f"{caller}: found {type(found).__name__}, expected an nn.Module or several (for example "
        "model.layers)"
    )


def find_blocks(model: nn.Module) -> Blocks:
    """The repeated blocks of a model; the model itself where there are none."""
    inner = unwrapped(model)
    lists = [blocks for blocks in _repeated(inner, "") if blocks]
    largest = max(map(_elements, lists), default=0)
    listed: dict[str, nn.Module] = {}
    for blocks in lists:
        if _elements(blocks) >= largest * LEAST_SHARE:
            listed.update(blocks)
    named = dict(_outermost(inner, _is_named(inner)))
    units = named if _elements(named) >= _elements(listed) else listed
    checkpointed = dict(_outermost(inner, _is_checkpointed))
    if checkpointed and _elements(checkpointed) >= _elements(units) * CHECKPOINTED_SHARE:
        units = checkpointed
    units = _outside_regions(inner, _once(units))
    what = type(inner).__name__
    if "" in units:
        return Blocks({"0": model}, (), f"units: {what} as a whole; it recomputes its blocks")
    if not units:
        return Blocks({"0": model}, (), f"units: {what} as a whole; no repeated blocks were found")
    models = (model,) if model is inner else (model, inner)
    return Blocks(units, models, f"units: {_described(units)}, found in {what}")


def compiles_what_it_wraps(module: nn.Module) -> bool:
    """Whether a module is what torch.compile has made of another one."""
    return "_orig_mod" in module._modules


def unwrapped(module: nn.Module) -> nn.Module:
    """What DDP, FSDP, torch.compile, a checkpoint wrapper or PEFT wraps; or the module itself."""
    while not isinstance(module, torch.jit.ScriptModule):  # whose children are no dict, nor wrapped
        children = module._modules
        wrapped = next((children[name] for name in _WRAPPED if children.get(name)), None)
        base = getattr(module, "get_base_model", None)  # PEFT
        if wrapped is None and base is not None and callable(base):
            wrapped = base()
        if wrapped is None and list(children) == ["module"] and not module._parameters:
            wrapped = children["module"]  # DDP, DataParallel, and engines like them
        if not isinstance(wrapped, nn.Module) or wrapped is module:
            return module
        module = wrapped
    return module


def _repeated(module: nn.Module, name: str) -> Iterator[dict[str, nn.Module]]:
    """The blocks of each list inside a module, of the outer ones of lists inside each other."""
    blocks: dict[str, nn.Module] = {}
    if isinstance(module, LISTS):
        several = {key: one for key, one in module.named_children() if _is_block(one)}
        if any(count > 1 for count in Counter(map(_kind, several.values())).values()):
            blocks = {_joined(name, key): one for key, one in several.items()}
    yield blocks
    for key, child in module.named_children():
        if _joined(name, key) not in blocks:
            yield from _repeated(child, _joined(name, key))


def _outermost(
    module: nn.Module, chosen: Callable[[nn.Module], bool], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks inside a module that are chosen, by name."""
    for key, child in module.named_children():
        if chosen(child) and _is_block(child):
            yield _joined(name, key), child
        else:
            yield from _outermost(child, chosen, _joined(name, key))


def _is_named(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a module is of a class that a model, or a model in it, names as its blocks."""
    names: set[str] = set()
    for module in model.modules():
        for attribute in _NAMED:
            classes: Any = getattr(module, attribute, None)
            if isinstance(classes, Iterable):
                names.update(one for one in classes if isinstance(one, str))
    return lambda module: _kind(module).__name__ in names


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether a module is one of those that transformers would recompute by themselves."""
    bases = [base for base in _kind(module).__mro__ if base.__module__.startswith("transformers.")]
    return any(base.__name__ == "GradientCheckpointingLayer" for base in bases)


def _outside_regions(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The units, or in the place of some the module that recomputes them.

    Models of diffusers have `gradient_checkpointing` on the module whose forward calls its blocks
    in checkpoint regions, where their hooks save nothing. What saves the regions' inputs is that
    module's forward. (The layers of transformers have regions inside their own forward, although
    the model around them has the same attribute.)
    """
    recomputing = {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
        and any(True for _ in module.children())
    }
    found: dict[str, nn.Module] = {}
    for name, unit in units.items():
        parts = name.split(".")
        around = [".".join(parts[:length]) for length in range(len(parts))]
        holder = next((outer for outer in reversed(around) if outer in recomputing), None)
        holder = None if _is_checkpointed(unit) else holder
        found.update({name: unit} if holder is None else {holder: recomputing[holder]})
    return found


def _is_block(module: nn.Module) -> bool:
    """Whether a module is more than one of torch's own operators, and is called."""
    inner = unwrapped(module)
    own = not type(inner).__module__.startswith("torch.nn.")
    return (
        (own or any(True for _ in inner.children()))
        and getattr(inner.forward, "__func__", None) is not nn.Module.forward
        and not isinstance(inner, torch.jit.ScriptModule)
        and any(True for _ in inner.parameters())
    )


def _kind(module: nn.Module) -> type[nn.Module]:
    return type(unwrapped(module))


def _once(units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """A module that stands in several lists is one unit, by its first name."""
    first: dict[nn.Module, str] = {}
    for name, unit in units.items():
        first.setdefault(unit, name)
    return {name: unit for unit, name in first.items()}


def _elements(units: dict[str, nn.Module]) -> int:
    parameters = {id(one): one for unit in units.values() for one in unit.parameters()}
    return sum(one.numel() for one in parameters.values() if not is_lazy(one))


def _joined(name: str, key: str) -> str:
    return name if key in _WRAPPED else f"{name}.{key}" if name else key


def _described(units: dict[str, nn.Module]) -> str:
    by_kind: dict[str, list[str]] = {}
    for name, unit in units.items():
        by_kind.setdefault(_kind(unit).__name__, []).append(name)
    return ", ".join(
        f"{len(names)} {kind} ({names[0]}{f' to {names[-1]}' if len(names) > 1 else ''})"
        for kind, names in by_kind.items()
    )
