"""Options and fixtures of the whole suite.

One process has one device: `--device cpu` (default), `cuda`, or `sim` / `npu`, the simulated
accelerator under either name. On a simulated device every test of tests/engine and
tests/race runs once per schedule, in a laboratory that fails it for any race report or leak; those
of tests/compat_scripts under two schedules, and under all with --slow, but for those that run in
several processes.

Tests marked `every_action` run once for each away form, or for those that the mark names: what a
policy without an action does is then that form, every tensor is encoded, however little it
shrinks, and recipes are used at once, before they are proven.

With `--recompute` that form is a recipe in every test, under every schedule, but for tests that
name other forms and those marked `own_form`, which says why.
"""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SIMULATED = ("sim", "npu")
TESTS = Path(__file__).resolve().parent
ACTIONS = ("swap", "encode", "encode_swap", "recompute")
SCRIPTS = TESTS / "compat_scripts"
IN_LABORATORY = (TESTS / "engine", TESTS / "race", SCRIPTS)

#: The schedules that differ most, where not all of them run.
FEW = ("lazy", "random0")

sys.path.insert(0, str(TESTS / "engine"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda", *SIMULATED])
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--random-schedules", type=int, default=3, help="seeds of the random schedule")
    parser.addoption(
        "--schedule", action="append", help="only this schedule; more than once: these"
    )
    parser.addoption(
        "--without-schedule", action="append", default=[], help="any schedule but this"
    )
    parser.addoption(
        "--random-in-turn",
        action="store_true",
        help="each test under one random schedule, whose seed its name chooses",
    )
    parser.addoption(
        "--recompute", action="store_true", help="a policy without an action recomputes, everywhere"
    )


def seed_no_absent_devices() -> None:
    """`torch.manual_seed` writes down the stack for each device that torch could have, as it may be
    seeded later: CUDA, XPU, MTIA. Without them that is for nothing, and takes 0.3 ms each time.
    """
    for module in (torch.cuda, torch.xpu, torch.mtia):
        if not module.is_available():
            module.manual_seed_all = lambda seed: None


def settle_examples(again: bool) -> None:
    """Hypothesis draws the same examples in every run, or other ones each time, and however long a
    busy machine takes for them is no failure."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # `make gpu` needs torch and pytest alone
        return
    settings.register_profile(
        "memswap", deadline=None, derandomize=again, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("memswap")


def pytest_configure(config: pytest.Config) -> None:
    seed_no_absent_devices()
    settle_examples(again=not config.getoption("--slow"))
    if config.getoption("--device") in SIMULATED:
        import simulator

        simulator.start(config.getoption("--device"))
    elif config.getoption("--device") == "cuda":
        # The same bits from the same program, or comparing gradients would say nothing. Attention
        # only warns, which is enough where all keys are in one tile; of cuDNN's nobody says it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.utils.deterministic.fill_uninitialized_memory = False
    from memswap.cli.measure import settle_math_library

    settle_math_library()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    for item in items:
        marked = item.get_closest_marker  # keywords have the names of folders as well
        if marked("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow (make test-all)"))
        if marked("slow_on_cpus") and device == "cpu" and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow here: runs with --slow (make test-all)"))
        if marked("slow_on_accelerators") and device != "cpu" and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow here: runs with --slow (make test-all)"))
        if marked("cpu_only") and device != "cpu":
            item.add_marker(pytest.mark.skip(reason="says nothing new on an accelerator"))
        if marked("accelerator") and device == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs an accelerator: --device sim or cuda"))
        if config.getoption("--recompute") and (reason := form_of_its_own(item)):
            item.add_marker(pytest.mark.skip(reason=reason))
        if marked("gpu") and device != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs --device cuda"))


def form_of_its_own(item: pytest.Item) -> str:
    """Why a test does not run with --recompute, if it does not."""
    if own_form := item.get_closest_marker("own_form"):
        return f"with --recompute: {own_form.args[0]}"
    every_action = item.get_closest_marker("every_action")
    if every_action is None or "recompute" in (every_action.args or ACTIONS):
        return ""
    return f"with --recompute: it is about {', '.join(every_action.args)}"


#: So many modules more are torch.compile's, or another library's.
MANY_MODULES = 100


@pytest.fixture(scope="session")
def _modules_when_frozen() -> list[int]:
    """How many modules there were when the collector was last told to look no further back."""
    return [0]


@pytest.fixture(scope="module", autouse=True)
def _each_file_begins_frozen(_modules_when_frozen: list[int]) -> None:
    _modules_when_frozen[0] = 0


@pytest.fixture(autouse=True)
def _what_is_there_is_not_looked_through(
    _each_file_begins_frozen: None, _modules_when_frozen: list[int]
) -> None:
    """Many tests collect cycles; what pytest, torch and the files before hold need not be looked
    through each time, nor what a test of the same file imported: torch.compile, which the step of
    an optimizer imports, has a million objects."""
    if len(sys.modules) > _modules_when_frozen[0] + MANY_MODULES:
        gc.collect()
        gc.freeze()
        _modules_when_frozen[0] = len(sys.modules)


def in_laboratory(metafunc: pytest.Metafunc) -> bool:
    """Whether a test runs under schedules: not those whose ranks are processes, on CPUs."""
    simulated = metafunc.config.getoption("--device") in SIMULATED
    folders = Path(metafunc.definition.path).parents
    own_processes = "rank_pool" in metafunc.fixturenames
    return simulated and not own_processes and any(one in folders for one in IN_LABORATORY)


def schedules_of(metafunc: pytest.Metafunc) -> tuple[list[Any], list[Any]]:
    """The schedules that a test runs under, and the few of them where these are enough."""
    from simdev import SCHEDULES, schedules

    option = metafunc.config.getoption
    marked = metafunc.definition.get_closest_marker
    if marked("one_schedule") is not None:
        return SCHEDULES[:1], SCHEDULES[:1]
    every = schedules(option("--random-schedules"))
    known = {str(one) for one in every}
    wanted, unwanted = set(option("--schedule") or known), set(option("--without-schedule"))
    if unknown := (wanted | unwanted) - known:
        raise pytest.UsageError(f"no schedule is called {unknown}; there are {sorted(known)}")
    chosen = [one for one in every if str(one) in wanted - unwanted]
    few = [one for one in chosen if str(one) in FEW] or chosen
    # What the others run on is proven under all schedules, in other tests of tests/engine.
    scripts = SCRIPTS in Path(metafunc.definition.path).parents
    enough = (scripts or marked("few_schedules") is not None) and not option("--slow")
    if option("--random-in-turn"):
        chosen = one_random_of(chosen, metafunc.definition.nodeid)
    return few if enough else chosen, few


def one_random_of(chosen: list[Any], test: str) -> list[Any]:
    """Of the random schedules, whose policy is the same, the one whose turn it is at this test."""
    random = [one for one in chosen if one.policy == "random"]
    turn = zlib.crc32(test.encode())  # the same in every process
    return [one for one in chosen if one not in random or one is random[turn % len(random)]]


def actions_of(metafunc: pytest.Metafunc) -> tuple[str, ...]:
    """The away forms that a test runs with, one by one; none: what no action means for a device."""
    if metafunc.config.getoption("--recompute"):
        return ("recompute",)
    marked = metafunc.definition.get_closest_marker("every_action")
    return () if marked is None else marked.args or ACTIONS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Once per schedule and away form."""
    actions = actions_of(metafunc)
    if not in_laboratory(metafunc):
        if actions:
            metafunc.parametrize("_action", actions, indirect=True)
        return
    chosen, few = schedules_of(metafunc)
    if not actions:
        metafunc.parametrize("_laboratory", chosen, ids=str, indirect=True)
        return
    # Swapping runs under all schedules; the other ways share its engine, and tests/race breaks
    # their own edges one by one, under all schedules. Recipes, which have no lane of their own,
    # run under all of them with --slow.
    option = metafunc.config.getoption
    under_all = ("swap", "recompute") if option("--slow") or option("--recompute") else ("swap",)
    pairs = [(one, way) for way in actions for one in (chosen if way in under_all else few)]
    metafunc.parametrize(("_laboratory", "_action"), pairs, ids=str, indirect=True)


@pytest.fixture(autouse=True)
def _action(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a policy without an action does: as always, or as a mark or `--recompute` has it."""
    name: str = getattr(request, "param", "")
    if name:
        from memswap import Action
        from memswap.engine import transfers

        monkeypatch.setattr(transfers, "default_action", lambda device, pool: Action(name))
        if request.node.get_closest_marker("every_action"):
            request.getfixturevalue("every_tensor_is_encoded")
    if name == "recompute":
        from memswap.engine import recipes

        wants = recipes.wants_recipes
        monkeypatch.setattr(
            recipes,
            "wants_recipes",
            lambda policy, directed: (
                (policy.action is None and policy.recipes) or wants(policy, directed)
            ),
        )
        monkeypatch.setattr(recipes, "PROOFS", 0)
    return name


@pytest.fixture(autouse=True)
def _planning_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made where they are asked for, so that a test knows which step has one.

    In training a thread makes them meanwhile, whenever it gets to it: that is tested by those
    marked `planning_thread`, and by the ranks of tests/parallel.
    """
    threads = request.node.get_closest_marker("planning_thread") is not None
    if not threads and TESTS / "parallel" not in request.path.parents:
        from memswap.planning.background import Job

        monkeypatch.setattr(Job, "start", lambda job: None if job.done else job.run())


@pytest.fixture
def every_tensor_is_encoded() -> Iterator[None]:
    """However little it shrinks: the tensors of small models are shorter than their frames."""
    from helpers import frames_expected

    with frames_expected(worth=float("inf")):
        yield


@pytest.fixture(autouse=True)
def _laboratory(request: pytest.FixtureRequest) -> Iterator[object]:
    """On a simulated device: one schedule, the race detector, and the search for leaks."""
    schedule = getattr(request, "param", None)
    if schedule is None or request.node.get_closest_marker("own_laboratory") is not None:
        yield schedule
        return
    from simdev import laboratory

    with laboratory(schedule) as lab:
        yield lab


@pytest.fixture
def schedule(_laboratory: object) -> object:
    """The schedule in force, or to be; None: the device is not simulated."""
    return getattr(_laboratory, "schedule", _laboratory)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    kind = request.config.getoption("--device")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device cuda: torch sees no CUDA device", returncode=2)
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


@pytest.fixture
def new_pool(device: torch.device, tmp_path: Path) -> Callable[..., object]:
    """Makes a small pool for the device under test: a file for a CPU, else pinned memory."""
    import memswap

    def make(budget: int | str = "256MiB") -> object:
        if device.type == "cpu":
            return memswap.DiskPool(tmp_path, budget=budget)
        return memswap.HostPool(budget=budget, slab="1MiB", device=device)

    return make
