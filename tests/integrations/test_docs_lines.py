"""The lines of docs/integrations.md, as they stand there: they train, and say what they did."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

tiny = pytest.importorskip("tiny")

from tiny import Trained, assert_same_bits, llama, moved  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
BATCH = 16  # rows of 64 tokens of 64 numbers: beyond the 64 KiB from which on tensors move

pytestmark = pytest.mark.cpu_only


def lines(title: str, number: int = 0) -> list[str]:
    """An example below a title of the page, in two parts where the reader's own loop is."""
    section = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    found = [text for text in section if text.startswith(title)]
    assert found, f"{PAGE.name} has no section {title!r}"
    blocks = re.findall(r"^```python\n(.*?)^```$", found[0], flags=re.MULTILINE | re.DOTALL)
    return re.split(r"^\.\.\..*$", blocks[number], flags=re.MULTILINE)


def run(title: str, names: dict[str, Any], loop: Callable[[], None] | None = None) -> None:
    """The example, with what a reader has by then, and the loop."""
    first, *rest = lines(title)
    exec(first, names)
    if rest:
        assert loop is not None
        loop()
        exec(rest[0], names)


def train(names: dict[str, Any]) -> None:
    """A loop of one's own, over the names of a script."""
    optimizer = names["optimizer"]
    for batch in names["loader"]:
        names["model"](input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loader() -> Any:
    return torch.utils.data.DataLoader(tiny.windows(2 * BATCH), batch_size=BATCH)


def same_weights(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    every = [list(one.parameters()) for one in (found, expected)]
    assert_same_bits(*(Trained({}, tensors, []) for tensors in every))


class Told(logging.Handler):
    """Keeps what a log says."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append(record.getMessage())


@pytest.fixture
def arguments(tmp_path):
    transformers = pytest.importorskip("transformers")
    return transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=BATCH,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )


def test_trainer(arguments, capsys):
    from transformers import Trainer

    plain, model, dataset = llama(), llama(), tiny.examples(2 * BATCH)
    Trainer(model=plain, args=arguments, train_dataset=dataset).train()
    names = {"Trainer": Trainer, "model": model, "args": arguments, "dataset": dataset}
    run("Trainer, and TRL's trainers", names)
    same_weights(model, plain)
    assert moved(capsys.readouterr().out)


def test_trainer_in_a_with_block(arguments):
    from transformers import Trainer

    from memswap.integrations.transformers import MemswapCallback

    names: dict[str, Any] = {"Trainer": Trainer, "MemswapCallback": MemswapCallback}
    names |= {"model": llama(), "args": arguments, "dataset": tiny.examples(2 * BATCH)}
    exec(lines("Trainer, and TRL's trainers", 1)[0], names)
    tiny.assert_no_hooks(names["model"])
    assert moved(names["callback"].report())


def test_accelerate(capsys):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    def script() -> dict[str, Any]:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return {"model": model, "optimizer": optimizer, "loader": loader()}

    plain = script()
    train(plain)
    names = {**script(), "accelerator": accelerate.Accelerator(cpu=True)}
    run("accelerate", names, lambda: train(names))
    same_weights(names["model"], plain["model"])
    assert moved(capsys.readouterr().out)


def test_lightning(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning.pytorch")
    from test_lightning import Module

    monkeypatch.chdir(tmp_path)
    plain, module = Module(), Module()
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False}
    new = SimpleNamespace(Trainer=lambda **more: lightning.Trainer(**options, **more))
    new.Trainer().fit(plain, loader())
    told: list[str] = []
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(log, "handlers", [Told(told)])
    run("Lightning", {"lightning": new, "module": module, "loader": loader()})
    same_weights(module, plain)
    assert sum(map(moved, told)) == 1, "Lightning's own log is to have the report once"


def test_torchtitan(capsys):
    pytest.importorskip("torchtitan")
    pytest.importorskip("triton", reason="torchtitan imports it")
    import test_torchtitan

    expected = test_torchtitan.train(test_torchtitan.new_spec(), rows=BATCH)
    config, found = SimpleNamespace(model_spec=test_torchtitan.new_spec()), []
    run(
        "torchtitan",
        {"config": config},
        lambda: found.append(test_torchtitan.train(config.model_spec, rows=BATCH)),
    )
    assert_same_bits(found[0], expected)
    assert moved(capsys.readouterr().out)


def test_peft(capsys):
    peft = pytest.importorskip("peft")
    import memswap

    names: dict[str, Any] = {"memswap": memswap, "model": llama(), "loader": loader()}
    names |= {"get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig}

    def loop() -> None:
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
        train(names)

    torch.manual_seed(0)
    run("PEFT", names, loop)
    assert moved(capsys.readouterr().out)
    managed, plain = names["model"], llama()
    torch.manual_seed(0)
    names["model"] = peft.get_peft_model(
        plain, peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    loop()
    same_weights(managed, names["model"])
