"""The commit at which something was measured. Needs neither torch nor memswap."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the commit of this working tree, marked where files differ from it.

    Results do not count: one benchmark writes them while the next has not begun.
    """

    if shutil.which("git") is None:
        return "git was not found"

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    if not head:
        return "not a git working tree"
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return head + (" with changes" if changed else "")
