"""Throughput against ratio, a point per codec and tensor, as a PNG."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Point(Protocol):
    """What is drawn of a measurement."""

    @property
    def codec(self) -> str: ...
    @property
    def tensor(self) -> str: ...
    @property
    def ratio(self) -> float: ...
    @property
    def encode_bytes_per_s(self) -> float: ...
    @property
    def decode_bytes_per_s(self) -> float: ...
    @property
    def copy_bytes_per_s(self) -> float: ...


def draw(points: Sequence[Point], file: Path) -> None:
    """Draw two panels, encode and decode; every codec has a colour, every tensor a marker.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install memswap[bench]``).
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the picture needs matplotlib: pip install matplotlib, or leave --picture away"
        ) from error
    matplotlib.use("Agg")
    plot: Any = importlib.import_module("matplotlib.pyplot")
    codecs = list(dict.fromkeys(point.codec for point in points))
    tensors = list(dict.fromkeys(point.tensor for point in points))
    colors = plot.get_cmap("tab10")
    figure, panels = plot.subplots(1, 2, figsize=(11, 4.5), sharex=True, sharey=True)
    copy = sorted(point.copy_bytes_per_s for point in points)[len(points) // 2] / 1e9
    for panel, direction in zip(panels, ("encode", "decode"), strict=True):
        for point in points:
            rate = getattr(point, f"{direction}_bytes_per_s") / 1e9
            panel.scatter(
                point.ratio,
                rate,
                color=colors(codecs.index(point.codec) % 10),
                marker="osD^v<>"[tensors.index(point.tensor) % 7],
                s=48,
            )
        panel.axhline(copy, color="0.5", linewidth=1, linestyle="--")
        panel.annotate("copy", (1.0, copy), color="0.4", va="bottom", fontsize=8)
        panel.set_yscale("log")
        panel.set_title(direction)
        panel.set_xlabel("ratio (raw / encoded)")
        panel.grid(True, which="both", color="0.9")
        panel.set_axisbelow(True)
    panels[0].set_ylabel("GB/s of uncompressed input")
    for index, codec in enumerate(codecs):
        panels[1].scatter([], [], color=colors(index % 10), marker="s", label=codec)
    for index, tensor in enumerate(tensors):
        panels[1].scatter([], [], color="0.4", marker="osD^v<>"[index % 7], label=tensor)
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plot.close(figure)
