"""What a model consists of for ISP: chunks, blocks, output projections, modules with parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import DTensor

#: Submodules of a block before whose forward the next block is gathered, by the end of their name.
OUTPUT_PROJECTIONS = ("out_proj", "wo")


@dataclass
class ISPOverlapState:
    """What a chunk of the model consists of. Nothing is decided by it."""

    num_blocks: int = 0
    ckpt_block_num: int = 0
    isp_outs: list[nn.Module] = field(default_factory=list)
    """Modules at which the next block is gathered."""
    isp_modules: list[nn.Module] = field(default_factory=list)
    """Modules that have parameters of their own."""
    index_to_isp_modules: dict[int, list[nn.Module]] = field(default_factory=dict)
    index_to_block: dict[int, nn.Module] = field(default_factory=dict)
    module_to_index: dict[nn.Module, int] = field(default_factory=dict)


def chunks_of(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """A model, the chunks of a virtual pipeline, or nothing."""
    if model is None:
        return []
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return [model]
    return list(model)


def blocks_of(chunk: nn.Module) -> list[nn.Module]:
    """The elements of a chunk's outermost lists. ValueError: it has no list."""
    blocks = list(_blocks(chunk))
    if not blocks:
        found = [type(child).__name__ for child in chunk.children()]
        raise ValueError(
            f"ISPCommunicator: found no nn.ModuleList of blocks in {type(chunk).__name__} "
            f"(it has {', '.join(found) or 'no children'}); put the blocks into one, or call "
            "memswap.parallel.shard on them"
        )
    return blocks


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def outputs_of(block: nn.Module) -> dict[str, nn.Module]:
    """A block's output projections, by name."""
    named = block.named_modules()
    return {name: one for name, one in named if name.split(".")[-1] in OUTPUT_PROJECTIONS}


def holders_of(block: nn.Module, every: bool = False) -> dict[str, nn.Module]:
    """The modules of a block that hold parts of weights, by name; ``every``: all with a matrix.

    torch's own modules use their weight as it is, so they hold whole ones, unless there are fewer
    rows than the module says.
    """
    found = {}
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim < 2 or isinstance(weight, DTensor):
            continue
        own = not type(module).forward.__module__.startswith("torch.")
        if own or every or weight.shape[0] < getattr(module, "out_features", 0):
            found[name] = module
    return found


def hold_parts(blocks: Sequence[nn.Module], ranks: int) -> bool:
    """Whether most of the elements of the blocks' weights, as wholes, are of parts.

    Most, and not any: a router with a class of its own stands beside whole weights as well.
    """
    every = sum(_elements(holders_of(block, every=True)) for block in blocks)
    parts = sum(_elements(holders_of(block)) for block in blocks)
    return ranks * parts > every - parts


def _elements(holders: dict[str, nn.Module]) -> int:
    return sum(module.weight.numel() for module in holders.values())
