"""What a block of a pool promises of its bytes, whatever the pool is."""

from __future__ import annotations

import torch

from memswap import DiskPool, HostPool


def assert_bytes_come_back(
    pool: HostPool | DiskPool, data: torch.Tensor, fence_nbytes: int
) -> None:
    """Bytes written to a block are read back, and the blocks before and behind it keep theirs.

    Args:
        pool: empty, with room for three blocks.
        data: uint8 ``[bytes]``.
        fence_nbytes: of each of the other two blocks.
    """
    sizes = (fence_nbytes, data.nbytes, fence_nbytes)
    before, block, after = (pool.native.allocate(nbytes) for nbytes in sizes)
    fence = torch.full((fence_nbytes,), 7, dtype=torch.uint8)
    before.write(fence)
    after.write(fence)
    block.write(data)
    back = torch.empty_like(data)
    block.read(back)
    assert torch.equal(back, data)
    for neighbour in (before, after):
        seen = torch.empty_like(fence)
        neighbour.read(seen)
        assert torch.equal(seen, fence), "a neighbour was overwritten"
