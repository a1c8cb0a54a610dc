"""Loops of one's own over models of diffusers and timm: layers found, the same bits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memswap

tiny = pytest.importorskip("tiny")

from tiny import Trained, assert_no_hooks, assert_same_bits  # noqa: E402

pytestmark = pytest.mark.cpu_only

#: Where run.py puts timm and the torchvision that it imports.
VISION = os.environ.get("MEMSWAP_TEST_VISION", "")


def unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    noise, words = torch.randn(2, 4, 16, 16), torch.randn(2, 5, 32)
    return model, lambda: model(noise, torch.tensor([3, 7]), words).sample.square().mean()


def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    return model, lambda: model(**inputs).sample.square().mean()


def checkpointed_flux():
    model, loss = flux()
    model.enable_gradient_checkpointing()
    return model, loss


def checkpointed_unet():
    model, loss = unet()
    model.enable_gradient_checkpointing()
    return model.train(), loss


def train(make, manage=None, dtype=None, accumulate=1) -> Trained:
    torch.manual_seed(0)
    model, loss = make()
    manager = None if manage is None else manage(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients, losses = [], []
    for _ in range(3):
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                value = loss()
            value.backward()
        gradients += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    if manager is not None:
        assert len(manager.units) > 2 or "it recomputes its blocks" in manager.report()
        assert manager.stats().moved_storages > 0, manager.report()
        manager.remove()
    assert_no_hooks(model)
    return Trained.of(model, gradients, losses)


@pytest.mark.parametrize("make", [unet, flux, checkpointed_flux, checkpointed_unet])
def test_models_of_diffusers(tmp_path, make):
    pytest.importorskip("diffusers")
    expected = train(make)
    options = tiny.swapping(tmp_path)
    assert_same_bits(train(make, lambda model: memswap.manage(model, **options)), expected)


@pytest.mark.parametrize("make", [unet, flux])
def test_mixed_precision_and_accumulation(tmp_path, make):
    pytest.importorskip("diffusers")
    both = {"dtype": torch.bfloat16, "accumulate": 2}
    expected = train(make, **both)
    options = tiny.swapping(tmp_path)
    assert_same_bits(train(make, lambda model: memswap.manage(model, **options), **both), expected)


def timm_model(name):
    import timm

    options = {"img_size": 32, "patch_size": 8} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=10, **options)
    images = torch.randn(2, 3, 32, 32)
    target = torch.tensor([1, 2])
    return model, lambda: torch.nn.functional.cross_entropy(model(images), target)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0"])
@pytest.mark.skipif(not VISION, reason="run.py says where timm is")
def test_models_of_timm(tmp_path, name):
    """In a process of its own: the torchvision that timm imports fits no torch without CUDA."""
    here = Path(__file__).resolve().parent
    found = subprocess.run(
        [sys.executable, str(here / "timm_training.py"), name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], VISION])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
