"""The codec on real activations: ratio, rate, peers. The same as ``python -m memswap bench codec``,
with the result file that all benchmarks share.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict
from pathlib import Path

import torch
from common import make_parser, write_result

from memswap.cli.bench import codec


def main() -> None:
    parser = make_parser(__doc__.splitlines()[0])
    own = argparse.ArgumentParser(conflict_handler="resolve")
    codec.add_arguments(own)
    arguments, rest = parser.parse_known_args()
    options = own.parse_args([*rest, "--device", arguments.device])
    if arguments.json is not None and options.picture is None:
        if importlib.util.find_spec("matplotlib") is None:
            print("no picture will be drawn: matplotlib is not installed")
        else:
            options.picture = Path(arguments.json).with_suffix(".png")
    result = codec.measure(options)
    write_result(arguments.json, torch.device(arguments.device), asdict(result))


if __name__ == "__main__":
    main()
