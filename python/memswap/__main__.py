"""``python -m memswap``: the demo and facts about this machine."""

from __future__ import annotations

import argparse
import sys

from memswap.cli import demo, info


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="memswap", description="Swaps autograd's saved activations away and back, bit-exactly."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="train a small GPT twice, plain and with memswap, and compare every gradient",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
    )
    commands.add_parser("info", help="versions, accelerator, memory of this machine")
    arguments = parser.parse_args(argv)
    return demo.run(arguments) if arguments.command == "demo" else info.run()


if __name__ == "__main__":
    sys.exit(main())
