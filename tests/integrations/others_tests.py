"""Other projects' own tests, with memswap in the place of what they test.

    python tests/integrations/others_tests.py trl FOLDER

FOLDER is `tests` of a checkout of TRL, whose tests of activation offloading run on the simulated
accelerator then. Nothing of theirs is in this repository. Prints a table: what passes, and why the
rest does not. docs/alternatives.md has it.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "engine"), str(HERE)]


class Outcomes:
    """A plugin of pytest that keeps what became of each test, and the last line of why."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.split("::", 1)[1]
        why = ""
        if report.failed:
            why = (getattr(report.longrepr, "reprcrash", None) or report.longrepr).message
        elif report.skipped:
            why = report.longrepr[2]
        self.rows[name] = (report.outcome, last_line(why))

    def table(self) -> str:
        rows = [f"| `{name}` | {outcome} | {why} |" for name, (outcome, why) in self.rows.items()]
        return "\n".join(["| test | | why |", "|---|---|---|", *rows])


def last_line(text: str) -> str:
    """The line of an error's message that says most: the last one that is no location."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line] or lines
    return said[-1][:160].replace("|", "/") if said else ""


def use_in_trl() -> None:
    """`OffloadActivations` is `saved_tensors`; models are made from configurations."""
    import simulator

    simulator.start("sim")
    os.environ["TRANSFORMERS_TEST_DEVICE"] = "sim"
    import torch
    import transformers
    import trl.models.activation_offloading as theirs

    import memswap

    class InItsPlace(memswap.saved_tensors):
        def __init__(self, *unused: Any, min_offload_size: int = 1024, **options: Any) -> None:
            super().__init__(memswap.Policy(memswap.Action.SWAP, min_bytes=min_offload_size))

        def update_model_params(self, model: torch.nn.Module) -> None:
            """Parameters are known by themselves."""

    def from_pretrained(name: str) -> Any:
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=151, hidden_size=8, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        return transformers.Qwen2ForCausalLM(config)

    helpers = types.ModuleType("tests.testing_utils")  # theirs imports what no test here needs
    helpers.TrlTestCase = object  # type: ignore[attr-defined]
    helpers.require_peft = helpers.require_torch_accelerator = lambda test: test  # type: ignore[attr-defined]
    sys.modules[helpers.__name__] = helpers
    theirs.OffloadActivations = InItsPlace
    transformers.AutoModelForCausalLM.from_pretrained = from_pretrained


#: By project: what puts memswap there, and the file of its tests.
USES = {"trl": (use_in_trl, "test_activation_offloading.py")}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("project", choices=USES)
    parser.add_argument("folder", type=Path, help="where its tests are")
    arguments = parser.parse_args()
    use, file = USES[arguments.project]
    use()
    outcomes = Outcomes()
    options = ["-q", "--no-header", "-p", "no:cacheprovider"]
    options += ["--rootdir", str(arguments.folder.parent)]
    pytest.main([str(arguments.folder / file), *options], plugins=[outcomes])
    print(outcomes.table())
    return 0 if outcomes.rows else 1


if __name__ == "__main__":
    sys.exit(main())
