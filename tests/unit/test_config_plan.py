"""python -m memswap plan --config: what a training takes of a device that is not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memswap.__main__ import main
from memswap.cli import config_plan
from memswap.cli.config_plan import (
    advice,
    card,
    chosen,
    describe,
    least,
    with_memswap,
    without_memswap,
)
from memswap.cli.meta_step import Sizes, measure
from memswap.optimizers.managed import MOST_ROOM

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
        "vocab_size": 256,
        "attention_probs_dropout_prob": 0.0,  # a processor's attention has no dropout of its own
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "image_size": 128,
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


def sizes(**changed: Any) -> Sizes:
    """A step whose peak is where backward begins, with everything else as large as this says."""
    given: dict[str, Any] = {"activations": 20 * GIB, "gradients": 10 * GIB, **changed}
    activations, gradients = given.pop("activations"), given.pop("gradients")
    marks = ((0, activations, 0), (0, activations, GIB), (gradients, 0, 0))
    return Sizes(
        **{
            "model": "Model",
            "parameters": 5 * 10**9,
            "weights": 10 * GIB,
            "state": (20 * GIB // 64,) * 64,
            "step_bytes": 10 * GIB,
            "activations": activations,
            "marks": marks,
            "forward_marks": 1,
            "layers": 32,
            "forward_flop": 1e15,
            **given,
        }
    )


def test_a_device_with_room_needs_nothing_away():
    found = chosen(sizes(), card("h200"), 120 * GIB)
    assert found is not None
    assert found.peak_bytes == 51 * GIB and found.moment == "in backward"
    assert not (found.state_away or found.activations_away or found.extra_s)


def test_as_many_activations_are_away_as_the_device_lacks():
    """Where computing is long enough to hide their way, none of the state has to leave."""
    found = chosen(sizes(state=(GIB,), step_bytes=0), card("H100"), 26 * GIB)
    assert found is not None and not found.state_away
    assert found.activations_away == pytest.approx(6 * GIB, abs=2)
    assert found.peak_bytes <= 26 * GIB


def test_two_layers_always_stay():
    assert least(sizes(), card("RTX4090"), GIB).activations_away == int(20 * GIB * 30 / 32)
    assert chosen(sizes(), card("RTX4090"), 12 * GIB) is None


def test_what_the_step_allocates_counts_and_less_of_it_where_it_goes_in_chunks():
    """torch's default step on an accelerator works on all parameters at once."""
    plain = without_memswap(sizes(activations=0), card("H100"))
    assert plain.moment == "in step()" and plain.peak_bytes == (10 + 10 + 20 + 10) * GIB
    away = with_memswap(sizes(activations=0), card("H100"), 60 * GIB, 20 * GIB, 0)
    assert away.peak["optimizer state"] == MOST_ROOM + 20 * GIB // 64
    assert away.peak["workspace"] == 10 * GIB // 64
    assert away.extra_s == 20 * GIB / card("H100").duplex_bytes_per_s


def test_two_long_parameters_are_there_together():
    state = (GIB, 6 * GIB, 7 * GIB, 6 * GIB)
    away = with_memswap(sizes(activations=0, state=state), card("H100"), 60 * GIB, 20 * GIB, 0)
    assert away.peak["optimizer state"] == 20 * GIB, "two, and the longest once more: all of it"
    state = (20 * GIB // 10,) * 10
    away = with_memswap(sizes(activations=0, state=state), card("H100"), 60 * GIB, 20 * GIB, 0)
    assert away.peak["optimizer state"] == 3 * state[0]


def test_the_cheapest_of_state_and_activations_is_chosen():
    """Computing hides the activations' way here, and nothing hides the state's."""
    slow = sizes(step_bytes=0, forward_flop=1e15)
    quick = replace(slow, forward_flop=1.0)
    hidden = chosen(slow, card("H100"), 45 * GIB)
    assert hidden is not None and hidden.activations_away and not hidden.state_away
    assert hidden.extra_s == 0
    bare = chosen(quick, card("H100"), 45 * GIB)
    assert bare is not None and bare.state_away and not bare.activations_away


# ---------------------------------------------------------------- what is said
def page_of(found: Sizes, limit: int) -> str:
    return "\n".join(advice(found, card("H100"), limit, chosen(found, card("H100"), limit)))


def test_what_to_write_and_what_it_costs_is_said():
    page = page_of(sizes(), 40 * GIB)
    assert 'memswap.manage(model, optimizer=optimizer, budget="device:40.0GiB")' in page
    assert "It fits with memswap" in page and "s beside" in page and "optimizer state" in page
    assert "That takes up to" in page and "half of what the machine has left" in page
    assert "optimizer=" not in page_of(sizes(state=(), step_bytes=0), 25 * GIB)


def test_a_step_in_chunks_may_be_enough():
    """Nothing is away, and what the step allocated is not there any more."""
    found = sizes(activations=0)
    page = page_of(found, 45 * GIB)
    assert "Nothing has to be away" in page and "foreach=False" in page
    assert "Cost: 0.00 s" in page
    assert "foreach=False" not in page_of(sizes(), 40 * GIB)


def test_without_memswap_nothing_is_to_be_written():
    assert page_of(sizes(), 70 * GIB) == "It fits without memswap."


def test_what_would_fit_is_said_where_nothing_does():
    page = page_of(sizes(batch=8, gradients=GIB, step_bytes=0), int(12.1 * GIB))
    assert "It does not fit" in page and "more than there are" in page
    assert "--batch 7" in page, "8 samples take 12.25 GiB"
    page = page_of(sizes(), 15 * GIB)
    assert "Weights and gradients alone take 20.00 GiB" in page
    assert "no gradients are kept" in page and "--batch" not in page
    page = page_of(sizes(), 9 * GIB)
    assert "no gradients are kept" not in page and "memswap.parallel.shard" in page


def test_a_picture_is_as_long_as_its_bytes():
    choices = [without_memswap(sizes(), card("H100")), least(sizes(), card("H100"), GIB)]
    page = describe("a model", "a card", 40 * GIB, choices)
    ends = [line.split()[-1] for line in page.splitlines() if line.strip()]
    bars = [len(end) for end in ends if set(end) <= set("WGSAw")]
    share = choices[1].peak_bytes / choices[0].peak_bytes
    assert bars == [config_plan.BAR, round(share * config_plan.BAR)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device cpu", "with --config, name one of"),
        ("--device H100 --device-memory lots", "--device-memory"),
        ("--device H100 --seq 100000", "positions for 512; give --seq 512 or less"),
        ("--device H100 --optimizer adamww --seq 64", "expected one of adadelta, adafactor"),
    ],
)
def test_what_cannot_be_is_said(write, arguments, message):
    if "--seq" in arguments:
        pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match=message):
        main(["plan", "--config", str(write(LLAMA)), *arguments.split()])


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    pytest.importorskip("transformers")
    for text in ("{}", "no json"):
        path = tmp_path / "config.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit, match=r"expected the config\.json of a transformers"):
            main(["plan", "--config", str(path), "--device", "H100"])


# ---------------------------------------------------------------- against steps that have memory
class Measured:
    """A step of the same model with memory, on the CPU: what its allocator was asked for."""

    def __init__(self, config: dict[str, Any], weights: torch.dtype) -> None:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        kind = getattr(transformers, config["architectures"][0])
        model = kind._from_config(transformers.AutoConfig.for_model(**config), dtype=weights)
        model.config.use_cache = False
        model.train()
        inputs = inputs_of(model, weights)
        saved: dict[int, torch.Tensor] = {}
        owned = {one.untyped_storage()._cdata for one in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = tensor.untyped_storage()._cdata
            if key not in owned:
                saved.setdefault(key, tensor)
            return tensor

        def train() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=weights is torch.float32):
                loss = model(**inputs).loss
            loss.backward()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            train()
        self.activations = nbytes_of(list(saved.values()))
        saved.clear()
        model.zero_grad(set_to_none=True)
        self.pass_bytes = allocated_at_most(train)
        trained = [one for one in model.parameters() if one.grad is not None]
        optimizer = torch.optim.AdamW(trained, foreach=True)
        optimizer.step()
        self.step_bytes = allocated_at_most(optimizer.step)
        self.weights = nbytes_of([*model.parameters(), *model.buffers()])
        self.gradients = nbytes_of([one.grad for one in trained])
        self.state = nbytes_of([one for row in optimizer.state.values() for one in row.values()])


def inputs_of(model: Any, weights: torch.dtype) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {
            "pixel_values": torch.randn(2, 3, 128, 128).to(weights),
            "labels": torch.zeros(2, dtype=torch.long),
        }
    ids = torch.randint(0, 256, (2, 128))
    return {"input_ids": ids, "labels": ids}


def nbytes_of(tensors: list[torch.Tensor]) -> int:
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def allocated_at_most(work: Callable[[], object]) -> int:
    """Bytes that the CPU's allocator had handed out at most beyond those of before."""
    kind = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile(activities=[kind], profile_memory=True)
    # oneDNN turns weights of a convolution round in memory of its own.
    with torch.backends.mkldnn.flags(enabled=False), profile as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    asked = [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]
    total = most = 0
    for _, nbytes in sorted(asked, key=lambda one: one[0]):
        total += nbytes
        most = max(most, total)
    return most


def assert_near(found: int, real: int, what: str) -> None:
    scratch = 1 << 20  # the processor's attention has so much of its own, however short the rows
    assert abs(found - real) <= 0.1 * real + scratch, f"{what}: predicted {found}, measured {real}"


@pytest.mark.parametrize(
    ("name", "weights"),
    [*((name, torch.bfloat16) for name in MODELS), ("llama", torch.float32)],
    ids=lambda one: str(one).removeprefix("torch."),
)
def test_a_prediction_is_what_a_step_of_the_model_has(write, name, weights):
    real = Measured(MODELS[name], weights)
    found = measure(write(MODELS[name]), 2, 128, "adamw", weights)
    assert found.weights == real.weights
    assert found.gradients == real.gradients
    assert found.state_bytes == real.state
    assert found.layers == 3 and found.forward_flop > 0
    assert_near(found.activations, real.activations, "activations")
    assert_near(max(map(sum, found.marks)), real.pass_bytes, "forward and backward")
    assert_near(found.step_bytes, real.step_bytes, "step()")


def test_other_heads_and_parts_are_predicted(write):
    """A label for each sequence; no loss at all; a configuration of text and images."""
    pytest.importorskip("transformers")
    parts = {key: LLAMA[key] for key in LLAMA if key not in ("model_type", "architectures")}
    gemma = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**parts, "model_type": "gemma3_text", "head_dim": 16},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    }
    heads = ("BertForSequenceClassification", "BertModel")
    for config in ({**MODELS["bert"], "architectures": [head]} for head in heads):
        found = measure(write(config), 2, 64, "sgd", torch.bfloat16)
        assert found.activations > 0 and found.gradients == sum(found.state)
    assert measure(write(gemma), 2, 64, "adamw", torch.bfloat16).layers == 3


def test_products_of_experts_are_counted(write):
    """Two of four for each token: three products of a token with 64 times 160 weights each."""
    pytest.importorskip("transformers")
    found = measure(write(MODELS["mixtral"]), 1, 64, "none", torch.bfloat16)
    experts = 3 * 64 * 2 * 3 * 2 * 64 * 160
    assert experts < found.forward_flop < 2 * experts
    assert found.state == () and found.step_bytes == 0


def test_the_page_says_that_it_is_a_prediction(write, capsys):
    pytest.importorskip("transformers")
    path = str(write(LLAMA))
    command = ["plan", "--config", path, "--device", "RTX4090", "--batch", "2", "--seq", "128"]
    assert main(command) == 0
    page = capsys.readouterr().out
    assert page.startswith("A PREDICTION")
    assert "LlamaForCausalLM" in page and "2 x 128 tokens" in page and "24.00 GiB" in page
    assert "It fits without memswap." in page
    assert main([*command, "--device-memory", "1MiB"]) == 1
    assert "It does not fit" in capsys.readouterr().out


def test_memory_is_known_of_every_device_that_help_names():
    for name in config_plan.MEMORY:
        assert card(name).name == name
