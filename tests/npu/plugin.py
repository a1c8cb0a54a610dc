"""Puts the real torch_npu under tests that were written for the simulated accelerator.

Loaded with ``-p npu.plugin`` (tests/ on the path), before torch and before any conftest: with
``--device npu``, tests/conftest.py then finds a `simdev` that is torch_npu on the fake ACL runtime.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS / "fake_acl"))

import fake_acl  # noqa: E402

fake_acl.install_as_simdev()
