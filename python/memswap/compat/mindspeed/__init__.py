"""MindSpeed's names: activation compression, and swap of layers and tensors."""

from typing import NoReturn

from memswap.compat.mindspeed.async_functions import ASYNC_FUNCS
from memswap.compat.mindspeed.compression import (
    CompressHook,
    ContextState,
    GlobalContext,
    GlobalContextConfig,
    layer_numbers,
)
from memswap.compat.mindspeed.layers import LayerActivationManager, LayerKey, TensorState
from memswap.compat.mindspeed.simulation import (
    SimulationA2,
    SimulationA3,
    SimulationBase,
    SimulationHyperParams,
    infer_matmul_shape,
)
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
    "SimulationA2",
    "SimulationA3",
    "SimulationBase",
    "SimulationHyperParams",
    "SwapTensor",
    "TensorKeyManager",
    "TensorLocation",
    "TensorState",
    "TensorSwapContext",
    "infer_matmul_shape",
    "is_valid_for_swap",
    "layer_numbers",
    "swap_activation_modules",
]

#: Names of MindSpeed's that cannot mean here what they mean there, and what takes their place.
_ABSENT = {
    "ListNode": "the order of layers is learnt from autograd; nobody links them",
    "ShareMemory": "frames own their memory, and encodes share no buffers",
    "TensorManager": "it empties a tensor's storage under everybody who sees it; give the tensor "
    "to GlobalContext.push(key, tensor), or use memswap.encode(tensor) and memswap.decode(frame)",
    "ActivationCompress": "of compress-dense: write memswap.manage(layers, memswap.Policy(action="
    "memswap.Action.ENCODE, include=...), windows=memswap.Windows()), or Action.ENCODE_SWAP for "
    "its level1",
    "CompressTensor": "of compress-optimizer: optimizer state is not encoded; "
    "memswap.swap_out(tensor) and memswap.swap_in(tensor) move it to the host",
}


def __getattr__(name: str) -> NoReturn:
    if name in _ABSENT:
        raise NotImplementedError(f"memswap.compat.mindspeed has no {name}: {_ABSENT[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
