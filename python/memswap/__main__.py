"""``python -m memswap``: the demo, benchmarks, and facts about this machine."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any, NamedTuple

import memswap
from memswap.cli.arguments import Help


class Command(NamedTuple):
    """A command: its module, which is imported when the command is given, and its one line."""

    module: str
    says: str


COMMANDS = {
    "demo": Command("demo", "train a small GPT twice, plain and with memswap, and compare"),
    "bench": Command("bench.codec", "benchmarks on this machine"),
    "selftest": Command(
        "selftest", "does memswap work on this device? every check by raw bits, and a report file"
    ),
    "plan": Command("plan", "what a memory budget does to each layer of a model, and its cost"),
    "report": Command("report", "a picture and a trace of one step, plain and under a budget"),
    "info": Command("info", "versions, accelerator, memory and rates of this machine"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Help about all commands imports none of them, nor torch.
    """
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="memswap", description="Swaps autograd's saved activations away and back, bit-exactly."
    )
    parser.add_argument("--version", action="version", version=f"memswap {memswap.__version__}")
    commands = parser.add_subparsers(dest="command")
    chosen = next((one for one in given if not one.startswith("-")), None)
    module: Any = None
    for name, command in COMMANDS.items():
        options = commands.add_parser(name, help=command.says, formatter_class=Help)
        if name == "bench":
            options = options.add_subparsers(dest="benchmark", required=True).add_parser(
                "codec",
                help="the codec on real activations: ratio and rate against copies and others",
                formatter_class=Help,
            )
        if name == chosen:
            module = import_module(f"memswap.cli.{command.module}")
            module.add_arguments(options)
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_help()
        return 0
    status: int = module.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
