"""Trains a model of timm's, plain and managed, in a process of its own (test_models.py)."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

# torchvision describes operators of its C++ part when it is imported, and the part of a CUDA build
# does not load beside a torch without CUDA.
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

import test_models  # noqa: E402
import tiny  # noqa: E402

import memswap  # noqa: E402

make = functools.partial(test_models.timm_model, sys.argv[1])
expected = test_models.train(make)
options = tiny.swapping(Path(sys.argv[2]))
found = test_models.train(make, lambda model: memswap.manage(model, **options))
tiny.assert_same_bits(found, expected)
