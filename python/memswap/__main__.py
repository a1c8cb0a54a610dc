"""``python -m memswap``: the demo, benchmarks, and facts about this machine."""

from __future__ import annotations

import argparse
import sys

import memswap
from memswap.cli import config_plan, demo, info, plan, report, selftest
from memswap.cli.arguments import Help
from memswap.cli.bench import codec as bench_codec


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="memswap", description="Swaps autograd's saved activations away and back, bit-exactly."
    )
    parser.add_argument("--version", action="version", version=f"memswap {memswap.__version__}")
    commands = parser.add_subparsers(dest="command")
    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="train a small GPT twice, plain and with memswap, and compare every gradient",
            formatter_class=Help,
        )
    )
    benchmarks = commands.add_parser("bench", help="benchmarks on this machine").add_subparsers(
        dest="benchmark", required=True
    )
    bench_codec.add_arguments(
        benchmarks.add_parser(
            "codec",
            help="the codec on real activations: ratio and rate against copies and other codecs",
            formatter_class=Help,
        )
    )
    selftest.add_arguments(
        commands.add_parser(
            "selftest",
            help="does memswap work on this device? every check by raw bits, and a report file",
            formatter_class=Help,
        )
    )
    planned = commands.add_parser(
        "plan",
        help="what a memory budget does to each layer of a model, and what it costs",
        formatter_class=Help,
    )
    plan.add_arguments(planned)
    config_plan.add_arguments(planned)
    reported = commands.add_parser(
        "report",
        help="a picture and a trace of one step, plain and under a memory budget",
        formatter_class=Help,
    )
    report.add_arguments(reported)
    report.add_output_argument(reported)
    commands.add_parser("info", help="versions, accelerator, memory and rates of this machine")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command == "demo":
        return demo.run(arguments)
    if arguments.command == "bench":
        return bench_codec.run(arguments)
    if arguments.command == "selftest":
        return selftest.run(arguments)
    if arguments.command == "plan":
        return plan.run(arguments)
    if arguments.command == "report":
        return report.run(arguments)
    return info.run()


if __name__ == "__main__":
    sys.exit(main())
