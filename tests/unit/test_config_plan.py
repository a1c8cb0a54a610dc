"""python -m memswap plan --config: what a training takes of a device that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memswap.__main__ import main
from memswap.cli import config_plan
from memswap.cli.config_plan import Sizes, card, choices_of, measure

pytestmark = pytest.mark.cpu_only

GIB = 2**30

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
    },
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 32,
        "patch_size": 8,
    },
}


@pytest.fixture
def write(tmp_path):
    def made(content: dict[str, Any]) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return made


def sizes(**changed: int) -> Sizes:
    given = {
        "weights": 10 * GIB,
        "gradients": 10 * GIB,
        "state": 20 * GIB,
        "activations": 20 * GIB,
        "workspace": 1 * GIB,
        **changed,
    }
    return Sizes(model="Model", parameters=5 * 10**9, layers=32, forward_flop=1e15, **given)


def test_a_device_with_room_needs_nothing_away():
    plain, state_away = choices_of(sizes(), card("h200"), 120 * GIB)
    assert plain.peak_bytes == 51 * GIB and not plain.extra_s
    assert plain.moment == "where backward begins"
    assert state_away.peak_bytes == 31 * GIB
    assert state_away.extra_s == 20 * GIB / card("h200").duplex_bytes_per_s


def test_as_many_activations_are_away_as_the_device_lacks():
    choices = choices_of(sizes(), card("H100"), 45 * GIB)
    (some,) = [one for one in choices if one.activations_away and not one.state_away]
    assert some.activations_away == 6 * GIB and some.peak_bytes == 45 * GIB
    assert not [one for one in choices if one.activations_away and one.state_away]


def test_two_layers_always_stay():
    choices = choices_of(sizes(), card("RTX4090"), 5 * GIB)
    most = max(one.activations_away for one in choices)
    assert most == int(20 * GIB * 30 / 32)


def test_gradients_count_where_backward_ends():
    plain = choices_of(sizes(activations=GIB), card("H100"), 80 * GIB)[0]
    assert plain.moment == "where backward ends" and plain.peak_bytes == 40 * GIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device cpu", "with --config, name one of"),
        ("--device H100 --device-memory lots", "--device-memory"),
    ],
)
def test_what_cannot_be_is_said(write, arguments, message, capsys):
    with pytest.raises(SystemExit, match=message):
        main(["plan", "--config", str(write(LLAMA)), *arguments.split()])


@pytest.mark.parametrize("name", MODELS)
def test_models_are_measured_without_weights(write, name):
    pytest.importorskip("transformers")
    found = measure(write(MODELS[name]), 2, 128, "adamw", torch.bfloat16)
    assert found.weights == 2 * found.parameters == found.gradients
    assert 2 * found.weights <= found.state <= 2 * found.weights + 4 * 100
    assert found.activations > found.workspace > 0
    assert found.layers == 3 and found.forward_flop > 0


def test_prediction_of_a_llama_is_what_its_step_has(write):
    transformers = pytest.importorskip("transformers")
    found = measure(write(LLAMA), 2, 128, "adamw", torch.bfloat16)
    config = transformers.AutoConfig.for_model(**LLAMA)
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.train()
    owned = {one.untyped_storage()._cdata for one in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in owned:
            saved.setdefault(key, tensor)
        return tensor

    ids = torch.randint(0, 256, (2, 128))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = model(input_ids=ids, labels=ids).loss
    real = sum(one.untyped_storage().nbytes() for one in saved.values())
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = sum(
        one.numel() * one.element_size()
        for value in optimizer.state.values()
        for one in value.values()
    )
    assert found.state == state
    assert found.weights == sum(one.numel() * one.element_size() for one in model.parameters())
    assert abs(found.activations - real) < 0.1 * real, f"{found.activations} for {real}"


def test_the_page_says_that_it_is_a_prediction(write, capsys):
    pytest.importorskip("transformers")
    path = str(write(LLAMA))
    command = ["plan", "--config", path, "--device", "RTX4090", "--batch", "2", "--seq", "128"]
    assert main(command) == 0
    page = capsys.readouterr().out
    assert page.startswith("A PREDICTION")
    assert "It fits without memswap." in page
    assert main([*command, "--device-memory", "1MiB"]) == 1
    assert "It does not fit" in capsys.readouterr().out


def test_memory_is_known_of_every_device_that_help_names():
    for name in config_plan.MEMORY:
        assert card(name).name == name
