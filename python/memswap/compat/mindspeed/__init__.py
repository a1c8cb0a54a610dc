"""MindSpeed's names: activation compression, and swap of layers and tensors."""

from memswap.compat.mindspeed.compression import (
    ASYNC_FUNCS,
    CompressHook,
    ContextState,
    GlobalContext,
    GlobalContextConfig,
    layer_numbers,
)
from memswap.compat.mindspeed.layers import LayerActivationManager, LayerKey, TensorState
from memswap.compat.mindspeed.swap_contexts import TensorSwapContext, swap_activation_modules
from memswap.compat.mindspeed.swap_handler import AsyncSwapHandler, SwapTensor
from memswap.compat.mindspeed.swap_keys import (
    TensorKeyManager,
    TensorLocation,
    is_valid_for_swap,
)

__all__ = [
    "ASYNC_FUNCS",
    "AsyncSwapHandler",
    "CompressHook",
    "ContextState",
    "GlobalContext",
    "GlobalContextConfig",
    "LayerActivationManager",
    "LayerKey",
    "SwapTensor",
    "TensorKeyManager",
    "TensorLocation",
    "TensorState",
    "TensorSwapContext",
    "is_valid_for_swap",
    "layer_numbers",
    "swap_activation_modules",
]
