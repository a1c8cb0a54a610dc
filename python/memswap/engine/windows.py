"""WindowStats: what became of the work that waited for windows (csrc/engine/window_queue.h)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowStats:
    """What became of the work that waited for windows. Bytes are bytes of storages."""

    windows: int = 0
    """Windows that were opened."""
    window_s: float = 0.0
    """Seconds that they promised."""
    encoded_in_windows: int = 0
    encoded_bytes: int = 0
    started_at_bound: int = 0
    """Encodes started outside windows because too many bytes waited."""
    started_at_end: int = 0
    """Encodes started at the end of a forward."""
    kept_storages: int = 0
    """Storages whose encode had not been started when backward began, or that found no room."""
    kept_bytes: int = 0
    decoded_in_windows: int = 0
    decoded_ahead: int = 0
    """Decodes started outside windows because backward was close."""
    pending_bytes: int = 0
    """Bytes that wait now."""
