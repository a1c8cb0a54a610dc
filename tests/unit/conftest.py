"""Fixtures of the unit tests."""

from __future__ import annotations

from emulators import emulator_runs

__all__ = ["emulator_runs"]
