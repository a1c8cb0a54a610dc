"""One line in other stacks: :func:`memswap.manage` from a training's begin to its end.

    transformers.MemswapCallback    a callback of transformers' Trainer, and of TRL's trainers
    accelerate.prepare              `accelerator.prepare`, and a manager of the prepared model
    lightning.MemswapCallback       a callback of Lightning's Trainer; MEMSWAP_LIGHTNING=1 adds it
    torchtitan.managed              a model's specification whose models are managed

Layers are found without names, through DDP, FSDP2, torch.compile and PEFT. Each of these modules is
imported when it is asked for and needs its library then; memswap depends on none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memswap.integrations import accelerate as accelerate
    from memswap.integrations import lightning as lightning
    from memswap.integrations import torchtitan as torchtitan
    from memswap.integrations import transformers as transformers

__all__ = ["accelerate", "lightning", "torchtitan", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"memswap.integrations.{name}")
    raise AttributeError(f"module 'memswap.integrations' has no attribute {name!r}")
