"""Options of these tests: they find `tiny`, the models and texts that they share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
