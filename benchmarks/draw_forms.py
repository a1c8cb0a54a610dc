"""Draws docs/forms.svg: what a GiB of room costs in each form, by arithmetic.

The rates are those of memswap.planning.cost_model (data sheets, nothing measured), the shapes those
of a block of Llama 3 8B in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from memswap.planning.cost_model import CPU, GIB, H200, Hardware

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "forms.svg"

#: Elements that one token of one block saves: two inputs of norms and their outputs, q, k, v,
#: attention, gate, up, silu of gate and the product of both.
SAVED = 4 * 4096 + 4096 + 2 * 1024 + 4096 + 4 * 14336
#: Elements of the block's weights; a token takes two operations of each.
WEIGHTS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
#: A frame of bfloat16 activations takes 1 / 1.48 of their bytes (docs/benchmarks.md).
FRAME = 1 / 1.48
#: A pointwise operator of two inputs reads two bytes and writes one for each byte that it frees.
MOVED = 3


def seconds_per_gib(machine: Hardware, dtype: torch.dtype) -> Mapping[str, float]:
    """Seconds of compute, memory or link that a GiB of room on the device takes, by form."""
    link_s = GIB / machine.d2h_bytes_per_s + GIB / machine.h2d_bytes_per_s
    codec_s = machine.encode_s(GIB) + machine.decode_s(GIB)
    token_nbytes = 2 * (SAVED - 4096)  # but for the block's input, which stays
    token_s = 2 * WEIGHTS / machine.matmul_flops[dtype]
    return {
        "RECOMPUTE": MOVED * GIB / machine.memory_bytes_per_s,
        "ENCODE": codec_s / (1 - FRAME),
        "checkpoint region": token_s * GIB / token_nbytes,
        "ENCODE_SWAP": FRAME * link_s + codec_s,
        "SWAP": link_s,
    }


def told(seconds: float) -> str:
    """A duration with two digits."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2g} ms" if milliseconds < 100 else f"{seconds:.2g} s"


def panel(machine: Hardware, dtype: torch.dtype, title: str, left: int) -> list[str]:
    """One machine's bars; each tenfold cost is `decade` wide."""
    decade, height, bar = 100, 34, 150
    shortest = 1e-4  # seconds: where bars begin
    lines = [
        f'<text x="{left}" y="30" font-weight="bold">{title}</text>',
    ]
    for row, (form, seconds) in enumerate(seconds_per_gib(machine, dtype).items()):
        y = 48 + row * height
        orders = float(torch.tensor(seconds / shortest, dtype=torch.float64).log10())
        width = round(decade * orders)
        on_link = "SWAP" in form
        fill = "#f9cb9c" if on_link else "#9fc5e8"
        lines += [
            f'<text x="{left + bar - 8}" y="{y + 17}" text-anchor="end">{form}</text>',
            f'<rect x="{left + bar}" y="{y}" width="{width}" height="24" fill="{fill}"/>',
            f'<text x="{left + bar + width + 6}" y="{y + 17}" fill="#333">{told(seconds)}</text>',
        ]
    return lines


def draw() -> str:
    """The picture, as SVG."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1260 270" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="1260" height="270" fill="#ffffff"/>',
        *panel(H200, torch.bfloat16, "H200, PCIe 5.0: time per GiB of room (log scale)", 20),
        *panel(CPU, torch.float32, "CPU, 16 cores, an NVMe disk", 620),
        '<rect x="20" y="236" width="14" height="14" fill="#9fc5e8"/>',
        '<text x="40" y="248">adds to the step</text>',
        '<rect x="170" y="236" width="14" height="14" fill="#f9cb9c"/>',
        '<text x="190" y="248">of the link: adds nothing where compute takes longer than the '
        "copies</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
