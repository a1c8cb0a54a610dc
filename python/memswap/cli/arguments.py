"""Types of command-line arguments: what cannot work is refused before anything has run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that tells the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def whole(least: int) -> Callable[[str], int]:
    """A type of argparse's: whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, found {text!r}"
            )
        return number

    return parse


def sizes(text: str) -> list[int]:
    """A type of argparse's: whole numbers from 1 on, with commas between them."""
    return [whole(1)(part) for part in text.split(",")]


def file(text: str) -> Path:
    """A type of argparse's: a file that can be written; its folders may be missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, found the folder {text}")
    return _within_reach(path, path if path.exists() else path.absolute().parent)


def folder(text: str) -> Path:
    """A type of argparse's: a folder that can be written to, or made."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, found the file {text}")
    return _within_reach(path, path.absolute())


def _within_reach(path: Path, place: Path) -> Path:
    while not place.exists():
        place = place.parent
    needed = os.W_OK | (os.X_OK if place.is_dir() else 0)
    if not os.access(place, needed) or not (place == path or place.is_dir()):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: no access to {place}")
    return path


def write(path: Path, content: str) -> None:
    """Write a text file, and make the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n", encoding="utf-8")
