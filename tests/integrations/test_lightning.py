"""Lightning: the callback, and the variable that adds it, with the bits of without it."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")
tiny = pytest.importorskip("tiny")

from tiny import Trained, assert_no_hooks, assert_same_bits, llama, moved  # noqa: E402

from memswap.integrations.lightning import MemswapCallback  # noqa: E402
from memswap.integrations.lightning_switch import callbacks_factory  # noqa: E402

pytestmark = pytest.mark.cpu_only


class Module(lightning.LightningModule):
    """A Llama inside a module that is never called itself."""

    def __init__(
        self,
        fails_at: int = -1,
        error: type[BaseException] = ArithmeticError,
        checkpointing: bool = False,
        generates: bool = False,
    ) -> None:
        super().__init__()
        self.network = llama()
        if checkpointing:
            self.network.gradient_checkpointing_enable()
        self.generates = generates
        self.fails_at = fails_at
        self.error = error
        self.gradients: list[torch.Tensor] = []
        self.losses: list[float] = []

    def training_step(self, batch, index):
        if index == self.fails_at:
            raise self.error
        loss = self.network(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("validated", self.network(input_ids=batch, labels=batch).loss)

    def on_before_optimizer_step(self, optimizer):
        self.gradients += [one.grad.clone() for one in self.parameters()]

    def on_train_batch_end(self, outputs, batch, index):
        if self.generates:
            self.network.eval()
            self.network.generate(batch[:1, :6], max_new_tokens=4, do_sample=False)
            self.network.train()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def new_trainer(folder, callbacks=(), **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 1),
        default_root_dir=folder,
        logger=options.pop("logger", False),
        enable_checkpointing=options.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def loader(count=8):
    return torch.utils.data.DataLoader(tiny.windows(count), batch_size=2)


def train(folder, callbacks=(), validate=False, module=None, **options: Any) -> Trained:
    module = Module(**(module or {}))
    trainer = new_trainer(folder, callbacks, **options)
    trainer.fit(module, loader(), loader(4) if validate else None)
    assert_no_hooks(module)
    return Trained.of(module, module.gradients, module.losses)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"precision": "bf16-mixed"}, id="bf16"),
        pytest.param({"accumulate_grad_batches": 2}, id="accumulation"),
        pytest.param({"validate": True, "val_check_interval": 2}, id="validation"),
        pytest.param({"max_epochs": 2, "gradient_clip_val": 0.1}, id="epochs, clipping"),
        pytest.param({"max_steps": 3}, id="early stop"),
        pytest.param({"module": {"checkpointing": True}}, id="checkpointing"),
        pytest.param({"module": {"generates": True}}, id="generation"),
    ],
)
def test_fitting_gives_the_same_bits(tmp_path, options):
    expected = train(tmp_path, **options)
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    assert_same_bits(train(tmp_path, [callback], **options), expected)
    assert moved(callback.report()) and "4 LlamaDecoderLayer" in callback.report()


class Keeps(lightning.Callback):
    """Writes what a rank's training left behind to a file."""

    def __init__(self, file, callback=None):
        self.file = file
        self.callback = callback

    def on_train_end(self, trainer, pl_module):
        report = "" if self.callback is None else str(self.callback.report())
        kept = Trained.of(pl_module, pl_module.gradients, pl_module.losses)
        torch.save((vars(kept), report), f"{self.file}-{trainer.global_rank}")


def test_two_processes_under_ddp_give_the_same_bits(tmp_path):
    def fit(name, callback=None):
        file = str(tmp_path / name)
        callbacks = [Keeps(file, callback), *([callback] if callback else [])]
        options = {"devices": 2, "strategy": "ddp_spawn", "max_steps": 3}
        new_trainer(tmp_path, callbacks, **options).fit(Module(), loader(12))
        return [torch.load(f"{file}-{rank}") for rank in range(2)]

    plain = fit("plain")
    callback = MemswapCallback.from_config({"action": "encode_swap", "min_bytes": "1KiB"})
    for (found, report), (expected, _) in zip(fit("memswap", callback), plain, strict=True):
        assert_same_bits(Trained(**found), Trained(**expected))
        assert moved(report) and "4 LlamaDecoderLayer" in report


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_exception_takes_the_hooks_off(tmp_path, error):
    module = Module(fails_at=2, error=error)
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    with pytest.raises((error, SystemExit)):
        new_trainer(tmp_path, [callback]).fit(module, loader())
    assert_no_hooks(module)
    assert callback.manager is None and moved(callback.report())


def test_a_cell_that_is_run_again_manages_the_same_module_again(tmp_path):
    """Its fit raised, and its Trainer and its callback are others the second time."""
    expected = train(tmp_path)
    module = Module(fails_at=2)
    with pytest.raises(ArithmeticError):
        new_trainer(tmp_path, [MemswapCallback(**tiny.swapping(tmp_path))]).fit(module, loader())
    module.network.load_state_dict(llama().state_dict())
    module.zero_grad()
    module.fails_at, module.gradients, module.losses = -1, [], []
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    new_trainer(tmp_path, [callback]).fit(module, loader())
    assert_same_bits(Trained.of(module, module.gradients, module.losses), expected)
    assert moved(callback.report())


def test_fitting_again_with_the_same_callback(tmp_path):
    callback = MemswapCallback(**tiny.swapping(tmp_path))
    first = train(tmp_path, [callback])
    assert_same_bits(train(tmp_path, [callback]), first)


@pytest.mark.parametrize("states", [{}, {"optimizer": "encode"}])
def test_resuming_from_a_checkpoint(tmp_path, states):
    def whole(callbacks):
        module, trainer = Module(), new_trainer(tmp_path, callbacks, enable_checkpointing=True)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        module = Module()
        resumed = new_trainer(tmp_path, callbacks, max_epochs=2, enable_checkpointing=True)
        resumed.fit(module, loader(), ckpt_path=tmp_path / "one.ckpt")
        return Trained.of(module, module.gradients, module.losses)

    expected = whole([])
    callback = MemswapCallback(**tiny.swapping(tmp_path), **states)
    assert_same_bits(whole([callback]), expected)
    assert moved(callback.report())
    assert ("as frames" in callback.report()) == bool(states)


def test_what_was_moved_is_logged(tmp_path):
    logger = lightning.loggers.CSVLogger(tmp_path, name="log")
    train(
        tmp_path,
        [MemswapCallback(**tiny.swapping(tmp_path))],
        logger=logger,
        log_every_n_steps=1,
    )
    assert "memswap_moved_mib" in (tmp_path / "log/version_0/metrics.csv").read_text()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", None),
        ("0", None),
        ("1", {}),
        ("budget=70%, action=swap, group=world", {"budget": "70%", "group": "world"}),
    ],
)
def test_one_variable_of_the_environment_adds_the_callback(monkeypatch, said, expected):
    monkeypatch.setenv("MEMSWAP_LIGHTNING", said)
    made = callbacks_factory()
    assert len(made) == (expected is not None)
    for callback in made:
        assert isinstance(callback, MemswapCallback)
        found = {name: callback._options[name] for name in ("budget", "group")}
        assert found == {"budget": None, "group": None} | expected


def test_a_variable_that_says_something_else_is_an_error(monkeypatch):
    monkeypatch.setenv("MEMSWAP_LIGHTNING", "70%")
    with pytest.raises(ValueError, match="MEMSWAP_LIGHTNING: found '70%', expected 1, 0, or"):
        callbacks_factory()


def test_lightning_finds_the_factory_where_memswap_is_installed(tmp_path, monkeypatch):
    """With the entry points of pyproject.toml, as an installed package has them."""
    group = "lightning.pytorch.callbacks_factory"
    if not any("memswap" in one.value for one in entry_points(group=group)):
        installed = tmp_path / "memswap_here-1.dist-info"
        installed.mkdir()
        named = "Metadata-Version: 2.1\nName: memswap-here\nVersion: 1\n"
        (installed / "METADATA").write_text(named)
        (installed / "entry_points.txt").write_text(
            f"[{group}]\nmemswap = {callbacks_factory.__module__}:{callbacks_factory.__name__}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MEMSWAP_LIGHTNING", "action=encode, min_bytes=1KiB")
    trainer = new_trainer(tmp_path, precision="bf16-mixed")
    (callback,) = [one for one in trainer.callbacks if isinstance(one, MemswapCallback)]
    module = Module()
    trainer.fit(module, loader())
    assert moved(callback.report())
    assert_no_hooks(module)


def test_the_entry_point_of_the_package_is_that_factory():
    """Lightning loads it whenever a Trainer is made."""
    import ast
    from importlib import import_module
    from pathlib import Path

    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8")
    _, _, group = project.partition('[project.entry-points."lightning.pytorch.callbacks_factory"]')
    module, _, name = ast.literal_eval(group.splitlines()[1].partition("= ")[2]).partition(":")
    assert getattr(import_module(module), name) is callbacks_factory
