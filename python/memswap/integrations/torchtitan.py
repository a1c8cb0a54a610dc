"""torchtitan: a model's specification whose models are managed once their optimizers are built.

    config.model_spec = managed(config.model_spec, budget="24GiB")

in the function that makes a training's configuration. torchtitan calls a specification's
`post_optimizer_build_fn` when the model has its weights, on its device, sharded and compiled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memswap.integrations.training import ManagedTraining

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torchtitan.protocols.model_spec import ModelSpec


def managed(spec: ModelSpec, **options: Any) -> ModelSpec:
    """A specification that manages the models that are built from it.

    Pipeline stages of one rank are under one manager, and one budget.

    Args:
        spec: what torchtitan's `model_registry` functions return; it stays as it is.
        options: those of :class:`ManagedTraining`: ``policy``, ``budget``, ``pool``,
            ``prefetch_bytes``, ``windows``, ``group``, ``optimizer``, ``optimizer_pool``.

    Returns:
        The same specification, whose `post_optimizer_build_fn` is a :class:`Managed`.

    Raises:
        TypeError: no specification, or an option that does not exist.
    """
    if not hasattr(spec, "post_optimizer_build_fn"):
        raise TypeError(
            f"memswap.integrations.torchtitan.managed: found {type(spec).__name__}, expected a "
            "ModelSpec: config.model_spec, or what a model's model_registry returns"
        )
    return replace(spec, post_optimizer_build_fn=Managed(spec.post_optimizer_build_fn, **options))


class Managed(ManagedTraining):
    """Called by torchtitan when a training's optimizers are built; ``report()`` says what it did.

    Args:
        before: what the specification has called there so far.
        options: those of :class:`ManagedTraining`.
    """

    def __init__(self, before: Callable[..., None] | None, **options: Any) -> None:
        super().__init__(**options)
        self._before = before

    def __call__(self, optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        """Manage a rank's parts of the model."""
        if self._before is not None:
            self._before(optimizers, model_parts, parallel_dims)
        self.begin(model_parts, optimizers=optimizers)
