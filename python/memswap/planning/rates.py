"""Rates: how fast a machine copies, encodes and decodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of raw, uncompressed bytes; 0 where a device cannot do it.

    On a CPU "d2h" and "h2d" are writing to and reading from a :class:`memswap.DiskPool`.
    """

    device: str
    """What was measured, or is described: a product's name."""
    d2h_bytes_per_s: float
    """Copies from the device to pinned host memory, nothing else under way."""
    h2d_bytes_per_s: float
    duplex_d2h_bytes_per_s: float
    """The same while copies run in the other direction too."""
    duplex_h2d_bytes_per_s: float
    encode_bytes_per_s: float = 0.0
    decode_bytes_per_s: float = 0.0
    copy_latency_s: float = 10e-6
    """What each copy costs beside its bytes (reference: 10 us class on PCIe)."""
    codec_latency_s: float = 10e-6
    copy_share: float = 0.0
    """Seconds of compute that each second of copying takes. 0 where copies have engines of their
    own; on a CPU, what threads that copy take from those that compute."""
    inline_codec: bool = False
    """Whether the calling thread encodes and decodes (CPU), so that a raw storage is gone at once.
    Elsewhere the codec runs beside compute and takes its processors."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not 0 <= value < float("inf"):
                raise ValueError(
                    f"Rates({field.name}={value!r}): expected 0 or more, and finite. 0 says that "
                    "the device cannot do it"
                )

    @property
    def copies(self) -> bool:
        """Whether bytes can leave the device and come back."""
        return self.d2h_bytes_per_s > 0 and self.h2d_bytes_per_s > 0

    @property
    def encodes(self) -> bool:
        """Whether the device can encode and decode."""
        return self.encode_bytes_per_s > 0 and self.decode_bytes_per_s > 0

    def send_s(self, nbytes: float) -> float:
        """Seconds of a copy away, alone on the link."""
        return self.copy_latency_s + nbytes / self.d2h_bytes_per_s

    def fetch_s(self, nbytes: float) -> float:
        """Seconds of a copy back, alone on the link."""
        return self.copy_latency_s + nbytes / self.h2d_bytes_per_s

    def send_takes_s(self, nbytes: float) -> float:
        """Seconds of compute that a copy away takes while it runs beside."""
        return self.copy_share * self.send_s(nbytes) if self.copy_share else 0.0

    def fetch_takes_s(self, nbytes: float) -> float:
        """Seconds of compute that a copy back takes while it runs beside."""
        return self.copy_share * self.fetch_s(nbytes) if self.copy_share else 0.0

    def encode_s(self, nbytes: float) -> float:
        """Seconds to encode raw bytes."""
        return self.codec_latency_s + nbytes / self.encode_bytes_per_s

    def decode_s(self, nbytes: float) -> float:
        """Seconds to decode a frame of raw bytes."""
        return self.codec_latency_s + nbytes / self.decode_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: object) -> Rates:
        """The inverse.

        Raises:
            ValueError: it is not what `as_dict` returns.
        """
        names = {field.name: field.type for field in fields(Rates)}
        if not isinstance(values, dict) or set(values) != set(names):
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"rates need exactly {sorted(names)}, found {found}")
        kinds: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "float": (float, int)}
        for name, kind in names.items():
            value = values[name]
            if not isinstance(value, kinds[str(kind)]) or (kind == "float" and value is True):
                raise ValueError(f"rates: {name} is {value!r}, expected a {kind}")
        return Rates(**values)
