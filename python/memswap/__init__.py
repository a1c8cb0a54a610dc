"""memswap: saved activations swapped off the accelerator and back, without changing one bit.

    manage(layers, budget=...)      a model, layer by layer, in an order that is learnt
    manage_optimizer(optimizer)     an optimizer's state, away between its steps
    saved_tensors(policy)           everything that autograd saves in a `with` block
    checkpoint, checkpoint_module   recomputing, with tensors that move instead
    chain, swap_modules             fixed schedules
    Group, manage_pipeline          schedules of one's own, pipelines
    Policy, Action                  which tensors move, and how
    HostPool, DiskPool              where they go
    encode, decode, Frame           one tensor, losslessly
    swap_out, swap_in               one tensor that keeps its identity
    memswap.types                   what these return, for annotations
    memswap.parallel                sharded weights, context parallelism
    memswap.integrations            transformers, TRL, accelerate, Lightning, torchtitan
    memswap.compat                  other systems' names

Sizes are in bytes, or such as ``"24GiB"``; times are in seconds. Errors derive from
:class:`MemswapError`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memswap import integrations as integrations
    from memswap import parallel as parallel
    from memswap import types as types
    from memswap.activations import manage, saved_tensors
    from memswap.checkpointing import (
        Checkpointing,
        CheckpointPolicy,
        checkpoint,
        checkpoint_module,
        keep_collectives,
    )
    from memswap.codec import Frame, decode, encode
    from memswap.engine.action import Action, TensorInfo
    from memswap.engine.pools import DiskPool, HostPool
    from memswap.errors import (
        BudgetError,
        FrameError,
        GroupError,
        InplaceEditError,
        MemswapError,
        NotSwappedError,
        RankMismatchError,
        RecomputeError,
        SharedStorageError,
        TransferError,
    )
    from memswap.groups import Group, Groups
    from memswap.inplace import swap_in, swap_out
    from memswap.optimizers import manage_optimizer
    from memswap.planning.policy import Policy
    from memswap.planning.profile import profile
    from memswap.planning.rates import Rates
    from memswap.schedules.chain import chain
    from memswap.schedules.pipeline import manage_pipeline
    from memswap.schedules.towers import swap_modules
    from memswap.windows import Windows, select_layers, window

__version__ = "0.1.0"

__all__ = [
    "Action",
    "BudgetError",
    "CheckpointPolicy",
    "Checkpointing",
    "DiskPool",
    "Frame",
    "FrameError",
    "Group",
    "GroupError",
    "Groups",
    "HostPool",
    "InplaceEditError",
    "MemswapError",
    "NotSwappedError",
    "Policy",
    "RankMismatchError",
    "Rates",
    "RecomputeError",
    "SharedStorageError",
    "TensorInfo",
    "TransferError",
    "Windows",
    "chain",
    "checkpoint",
    "checkpoint_module",
    "decode",
    "encode",
    "keep_collectives",
    "manage",
    "manage_optimizer",
    "manage_pipeline",
    "profile",
    "saved_tensors",
    "select_layers",
    "swap_in",
    "swap_modules",
    "swap_out",
    "window",
]


#: Where each public name is. [Note: Names are looked up when they are asked for] A module is
#: imported when the first of its names is used, and torch with it: `python -m memswap --help` and
#: a switch of the integrations that is off need none of it. The imports above say the same to
#: type checkers, and a test compares the two.
_PLACES = {
    "activations": ("manage", "saved_tensors"),
    "checkpointing": (
        "CheckpointPolicy",
        "Checkpointing",
        "checkpoint",
        "checkpoint_module",
        "keep_collectives",
    ),
    "codec": ("Frame", "decode", "encode"),
    "engine.action": ("Action", "TensorInfo"),
    "engine.pools": ("DiskPool", "HostPool"),
    "errors": (
        "BudgetError",
        "FrameError",
        "GroupError",
        "InplaceEditError",
        "MemswapError",
        "NotSwappedError",
        "RankMismatchError",
        "RecomputeError",
        "SharedStorageError",
        "TransferError",
    ),
    "groups": ("Group", "Groups"),
    "inplace": ("swap_in", "swap_out"),
    "optimizers": ("manage_optimizer",),
    "planning.policy": ("Policy",),
    "planning.profile": ("profile",),
    "planning.rates": ("Rates",),
    "schedules.chain": ("chain",),
    "schedules.pipeline": ("manage_pipeline",),
    "schedules.towers": ("swap_modules",),
    "windows": ("Windows", "select_layers", "window"),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a module of this package; see the note."""
    if name in _PLACE_OF:
        found = getattr(import_module(f"memswap.{_PLACE_OF[name]}"), name)
        globals()[name] = found
        return found
    if not name.startswith("__") and find_spec(f"memswap.{name}") is not None:
        return import_module(f"memswap.{name}")
    is_type = name[0].isupper() and name in import_module("memswap.types").__all__
    hint = f": it is memswap.types.{name}" if is_type else ""
    raise AttributeError(f"module 'memswap' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACE_OF, "integrations", "parallel", "types"})
