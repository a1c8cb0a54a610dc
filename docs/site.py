"""What `make site` generates beside the pages: the reference, and the changes.

    python docs/site.py             links of the built site that lead out of it, as a list
    python docs/site.py --external  asks each of them whether it is there; needs a network

mkdocs calls the functions below; a link or an anchor that leads nowhere fails its build.
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: The pages of the reference: a title, a sentence, and the names whose docstrings they show.
REFERENCE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "activations": (
        "Saved activations",
        "A model's layers, or everything that is saved in a block.",
        (
            "manage",
            "types.Manager",
            "saved_tensors",
            "types.Stats",
            "types.Count",
            "types.Plan",
            "types.PlannedUnit",
            "types.PlannedStorage",
            "profile",
            "Rates",
        ),
    ),
    "policies": (
        "What moves, and where to",
        "Which tensors move and how, and the memory that they go to.",
        ("Policy", "Action", "TensorInfo", "HostPool", "DiskPool"),
    ),
    "schedules": (
        "Recomputing, windows and schedules",
        "Checkpoint regions, work hidden under operators, and schedules of one's own.",
        (
            "checkpoint",
            "checkpoint_module",
            "Checkpointing",
            "CheckpointPolicy",
            "keep_collectives",
            "Windows",
            "window",
            "types.Window",
            "types.WindowStats",
            "select_layers",
            "chain",
            "swap_modules",
            "Group",
            "Groups",
            "manage_pipeline",
            "types.ScheduledModules",
        ),
    ),
    "optimizers": (
        "Optimizers",
        "State that is away between steps.",
        ("manage_optimizer", "optimizers.ManagedOptimizer", "optimizers.OptimizerStatistics"),
    ),
    "tensors": (
        "Single tensors",
        "Lossless frames, and tensors that leave by hand.",
        ("encode", "decode", "Frame", "swap_out", "swap_in"),
    ),
    "parallel": (
        "Sharded weights and sequences",
        "Weights that are gathered when they are needed, and attention over a cut sequence.",
        (
            "parallel.shard",
            "parallel.ShardedModule",
            "parallel.ShardContext",
            "parallel.UnshardHandle",
            "parallel.describe",
            "parallel.pool_all_gathers",
            "parallel.PooledAllGather",
            "parallel.ContextParallel",
            "parallel.AppliedContext",
            "parallel.ArrivingTensor",
            "parallel.causal_attention",
            "parallel.causal_mask",
            "parallel.HeadPlan",
            "parallel.exchange",
            "parallel.Pending",
            "parallel.SequenceShards",
            "parallel.SequenceToHeads",
            "parallel.HeadsToSequence",
            "parallel.GatherSequence",
            "parallel.ReduceScatterSequence",
            "parallel.MoveSequence",
        ),
    ),
    "integrations": (
        "Integrations",
        "One line in other stacks.",
        (
            "integrations.training.ManagedTraining",
            "integrations.transformers.MemswapCallback",
            "integrations.accelerate.prepare",
            "integrations.lightning.MemswapCallback",
            "integrations.torchtitan.managed",
        ),
    ),
    "errors": (
        "Errors",
        "All derive from MemswapError, and say what was found, what was expected and what to do.",
        (
            "MemswapError",
            "BudgetError",
            "FrameError",
            "GroupError",
            "InplaceEditError",
            "NotSwappedError",
            "RankMismatchError",
            "RecomputeError",
            "SharedStorageError",
            "TransferError",
        ),
    ),
}

_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")
_EXTERNAL = re.compile(r'href="(https?://[^"#]+)')


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that no file is for."""
    from mkdocs.structure.files import File  # the linters and the tests have no mkdocs

    pages = {f"reference/{name}.md": reference_page(name) for name in REFERENCE}
    pages["changes.md"] = (ROOT / "CHANGELOG.md").read_text("utf-8")
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What is no page of this site is named by its place in the repository."""
    return _LINK_OUT.sub(_named, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings have roles, which are not for readers."""
    return _ROLE.sub("", html)


def reference_page(name: str) -> str:
    """One page of the reference, as markdown."""
    title, sentence, names = REFERENCE[name]
    shown = "\n\n".join(f"::: memswap.{one}" for one in names)
    return f"# {title}\n\n{sentence}\n\n{shown}\n"


def _named(link: re.Match[str]) -> str:
    text, path = link.groups()
    if path == "README.md":
        return f"[{text}](index.md)"
    if path == "CHANGELOG.md":
        return f"[{text}](changes.md)"
    return f"{text} (`{path}`)" if path.strip("/") not in text else text


def external_links(site: Path) -> list[str]:
    """Links of built pages that lead out of the site."""
    pages = [page.read_text("utf-8") for page in site.rglob("*.html")]
    return sorted({link for page in pages for link in _EXTERNAL.findall(page)})


def missing(link: str) -> str | None:
    """Why a link leads nowhere, or None."""
    request = urllib.request.Request(link, headers={"User-Agent": "memswap-docs"})
    try:
        with urllib.request.urlopen(request, timeout=20):
            return None
    except OSError as error:
        return f"{link}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description="External links of the built site.")
    parser.add_argument("--external", action="store_true", help="ask each whether it is there")
    asked = parser.parse_args()
    links = external_links(ROOT / "build" / "site")
    if not asked.external:
        print("\n".join(links))
        return 0
    with ThreadPoolExecutor(8) as pool:
        broken = [why for why in pool.map(missing, links) if why is not None]
    print("\n".join([*broken, f"{len(links)} external links, {len(broken)} of them broken"]))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
