"""Cost model: how long work takes on hardware that is not here, from its data sheet.

What can be measured is measured (profile.py, csrc/engine/recorder.h); this is for planning for
another machine. Times are those of a kernel or a transfer that has the device to itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from memswap.planning.rates import Rates

GIB = 2**30
GB = 10**9
TERA = 10**12


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its links. Rates are per device and second."""

    name: str
    matmul_flops: Mapping[torch.dtype, float]
    """What matrix products reach, by dtype: a peak times `EFFICIENCY`, unless measured."""
    memory_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_bytes_per_s: float
    """Of each direction while both are busy."""
    encode_bytes_per_s: float
    """Of raw bytes, bfloat16."""
    decode_bytes_per_s: float
    all_gather_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    """Of the gathered result, by the size of the group. 0 or missing: not known."""
    all_to_all_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    """Of the input of a rank, by the size of the group."""
    copy_share: float = 0.0
    """Seconds of compute that each second of copying takes."""
    inline_codec: bool = False

    def matmul_s(
        self, left: Sequence[int], right: Sequence[int], dtype: torch.dtype = torch.bfloat16
    ) -> float:
        """Seconds of ``torch.matmul`` of two shapes: by arithmetic, or by memory if that is longer.

        Args:
            left: shape of the left tensor.
            right: shape of the right one.
            dtype: of both.

        Raises:
            ValueError: the shapes cannot be multiplied.
        """
        # A dtype without units of its own runs no faster than the slowest that has some.
        flops = self.matmul_flops.get(dtype) or min(self.matmul_flops.values())
        result = matmul_shape(left, right)
        elements = math.prod(left) + math.prod(right) + math.prod(result)
        nbytes: int = elements * dtype.itemsize
        return max(matmul_flop(left, right) / flops, nbytes / self.memory_bytes_per_s)

    def all_gather_s(self, nbytes: float, group_size: int) -> float:
        """Seconds of an all-gather after which each rank has `nbytes`."""
        return collective_s(self.all_gather_bytes_per_s, nbytes, group_size, "all-gather")

    def all_to_all_s(self, nbytes: float, group_size: int) -> float:
        """Seconds of an all-to-all to which each rank brings `nbytes`."""
        return collective_s(self.all_to_all_bytes_per_s, nbytes, group_size, "all-to-all")

    def encode_s(self, nbytes: float) -> float:
        """Seconds to encode raw bytes."""
        return nbytes / self.encode_bytes_per_s

    def decode_s(self, nbytes: float) -> float:
        """Seconds to decode a frame of raw bytes."""
        return nbytes / self.decode_bytes_per_s

    def rates(self) -> Rates:
        """What the planner needs."""
        return Rates(
            device=self.name,
            d2h_bytes_per_s=self.d2h_bytes_per_s,
            h2d_bytes_per_s=self.h2d_bytes_per_s,
            duplex_d2h_bytes_per_s=min(self.duplex_bytes_per_s, self.d2h_bytes_per_s),
            duplex_h2d_bytes_per_s=min(self.duplex_bytes_per_s, self.h2d_bytes_per_s),
            encode_bytes_per_s=self.encode_bytes_per_s,
            decode_bytes_per_s=self.decode_bytes_per_s,
            copy_share=self.copy_share,
            inline_codec=self.inline_codec,
        )


def matmul_shape(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    """Shape of ``torch.matmul`` of two shapes, batches broadcast.

    Raises:
        ValueError: the shapes cannot be multiplied.
    """
    if not left or not right:
        raise ValueError(f"matmul of {tuple(left)} and {tuple(right)}: a scalar has no rows")
    rows = tuple(left) if len(left) > 1 else (1, *left)
    columns = tuple(right) if len(right) > 1 else (*right, 1)
    if rows[-1] != columns[-2]:
        raise ValueError(
            f"matmul of {tuple(left)} and {tuple(right)}: {rows[-1]} columns meet {columns[-2]} "
            "rows"
        )
    try:
        batch = tuple(torch.broadcast_shapes(rows[:-2], columns[:-2]))
    except RuntimeError as error:
        raise ValueError(
            f"matmul of {tuple(left)} and {tuple(right)}: these batches do not broadcast"
        ) from error
    return (
        *batch,
        *((rows[-2],) if len(left) > 1 else ()),
        *((columns[-1],) if len(right) > 1 else ()),
    )


def matmul_flop(left: Sequence[int], right: Sequence[int]) -> int:
    """Multiplications and additions of ``torch.matmul``: 2 K times the elements of the result."""
    elements = math.prod(matmul_shape(left, right))
    return 2 * left[-1] * elements


def collective_s(
    bytes_per_s: Mapping[int, float], nbytes: float, group_size: int, what: str
) -> float:
    """Seconds of a collective.

    A group whose size is not in the table gets the lower rate of the two next to it, or that of the
    nearest. A rate of 0 in a table means that nobody measured it, not that it takes for ever.

    Args:
        bytes_per_s: a table of rates, by the size of a group.
        nbytes: as the rates count them: of an all-gather's result, of what a rank brings to an
            all-to-all.
        group_size: ranks.
        what: the collective, as messages name it.

    Raises:
        ValueError: the table is empty, or the group is.
    """
    if group_size < 1:
        raise ValueError(f"{what}: a group has 1 rank or more, found {group_size}")
    if group_size == 1:
        return 0.0
    known = {size: rate for size, rate in bytes_per_s.items() if rate > 0}
    if not known:
        raise ValueError(f"{what}: no rate is known for this hardware")
    rates = []
    smaller = [size for size in known if size <= group_size]
    larger = [size for size in known if size >= group_size]
    if smaller:
        rates.append(known[max(smaller)])
    if larger:
        rates.append(known[min(larger)])
    return nbytes / min(rates)


def gib_per_s(table: Mapping[int, float]) -> dict[int, float]:
    """A table in GiB/s as one in bytes per second."""
    return {size: rate * GIB for size, rate in table.items()}


#: Share of a peak that large matrix products reach; 0.5 to 0.7 is usual in training.
EFFICIENCY = 0.6

#: Ascend's figures: matrix products, collectives and codec are the constants with which MindSpeed's
#: compress_activation plans (SimulationHyperParams, SimulationA2, SimulationA3). Its all-to-all of
#: two ranks on A3 is 0 there: not measured. Host links: PCIe 4.0 x16 and 5.0 x16 by their
#: specifications at 0.87 of the raw rate (31.5 and 63 GB/s); memory: 1.6 TB/s (Atlas A2, per
#: device; A3 the same). None of these has been measured by memswap.
_CUBE = {torch.bfloat16: 280 * TERA, torch.float16: 280 * TERA, torch.float32: 70 * TERA}

A2 = Hardware(
    name="A2",
    matmul_flops=_CUBE,
    memory_bytes_per_s=1.6 * TERA,
    d2h_bytes_per_s=27 * GB,
    h2d_bytes_per_s=27 * GB,
    duplex_bytes_per_s=20 * GB,
    encode_bytes_per_s=100 * GIB,
    decode_bytes_per_s=111 * GIB,
    all_gather_bytes_per_s=gib_per_s({2: 36, 4: 73, 8: 147, 16: 138}),
    all_to_all_bytes_per_s=gib_per_s({2: 37, 4: 69, 8: 119, 16: 40.1, 32: 30.2, 64: 27.0}),
)

A3 = replace(
    A2,
    name="A3",
    d2h_bytes_per_s=55 * GB,
    h2d_bytes_per_s=55 * GB,
    duplex_bytes_per_s=45 * GB,
    all_gather_bytes_per_s=gib_per_s({2: 350, 4: 324.9, 8: 298.8, 16: 283.6}),
    all_to_all_bytes_per_s=gib_per_s({2: 0, 4: 229.4, 8: 173.9, 16: 154, 32: 143.9, 64: 137.3}),
)

#: NVIDIA's data sheets (dense; H100 and H200 SXM): 989 TFLOP/s in 16 bits, 1979 in 8, 495 in TF32.
#: Host link: PCIe 5.0 x16; one way 55.6 GB/s to the device (nvbandwidth's own example) and 52.8
#: back (8 x H100); both at once 45 each is a planning value that nobody published a measurement of.
#: NVLink 4: 450 GB/s one way at 0.8; beyond a node of 8: 400 Gbit/s per device at 0.9. The codec:
#: what its design aims at, 1.3 and 1.5 TB/s; python -m memswap bench codec measures it.
_HOPPER = {
    torch.float8_e4m3fn: 1979 * TERA * EFFICIENCY,
    torch.bfloat16: 989 * TERA * EFFICIENCY,
    torch.float16: 989 * TERA * EFFICIENCY,
    torch.float32: 495 * TERA * EFFICIENCY,
}
_NVLINK = {2: 360 * GB, 4: 360 * GB, 8: 360 * GB, 16: 45 * GB}

H100 = Hardware(
    name="H100",
    matmul_flops=_HOPPER,
    memory_bytes_per_s=3.35 * TERA,
    d2h_bytes_per_s=52.8 * GB,
    h2d_bytes_per_s=55.6 * GB,
    duplex_bytes_per_s=45 * GB,
    encode_bytes_per_s=0.9 * TERA,
    decode_bytes_per_s=1.05 * TERA,
    all_gather_bytes_per_s=_NVLINK,
    all_to_all_bytes_per_s=_NVLINK,
)

H200 = replace(
    H100,
    name="H200",
    memory_bytes_per_s=4.8 * TERA,
    encode_bytes_per_s=1.3 * TERA,
    decode_bytes_per_s=1.5 * TERA,
)

#: A server's processor: 16 cores with AVX-512 at 2.5 GHz (64 float32 operations per cycle and
#: core), 8 channels of DDR5-4800 at 0.7, one NVMe disk; the codec is bound by memory (one thread
#: encodes 6 and decodes 10 GB/s of bfloat16), and one core copies.
CPU = Hardware(
    name="CPU",
    matmul_flops={
        torch.float32: 16 * 64 * 2.5e9 * EFFICIENCY,
        torch.float64: 16 * 32 * 2.5e9 * EFFICIENCY,
    },
    memory_bytes_per_s=215 * GB,
    d2h_bytes_per_s=2 * GB,
    h2d_bytes_per_s=3 * GB,
    duplex_bytes_per_s=1 * GB,
    encode_bytes_per_s=40 * GB,
    decode_bytes_per_s=60 * GB,
    copy_share=1 / 16,
    inline_codec=True,
)

HARDWARE: Mapping[str, Hardware] = {one.name: one for one in (A2, A3, H100, H200, CPU)}


def hardware(name: str) -> Hardware:
    """A table by its name, in any case.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        return HARDWARE[name.upper()]
    except KeyError:
        raise ValueError(
            f"no hardware named {name!r} is known; there are {', '.join(HARDWARE)}"
        ) from None
