"""Shared setup of all tests: a Ray token, test order and log records."""

import functools
import gc
import importlib
import logging
import os
import re
import secrets
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import HealthCheck, settings

from tests.forked import forking_ray_workers, start_worker_server
from tests.ray_workers import SERVER

# As in the Makefile; must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run; others with `--hypothesis-profile=explore`.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("explore", **SLOW)
settings.register_profile("suite", derandomize=True, database=None, max_examples=20, **SLOW)
settings.register_profile("unit", settings.get_profile("suite"), max_examples=10)
settings.load_profile("suite")

# Without a token, the first test that starts Ray writes one to the home folder
# (trainer/placement/nodes.py). Ray's library reads the mode once per process.
for name, value in {
    "AUTH_TOKEN": secrets.token_hex(32),
    "AUTH_MODE": "token",
    "ENABLE_AUTO_CONNECT": "0",  # a call left behind on a thread must not start a cluster
    "prestart_worker_first_driver": "0",  # also set in nodes.py, to save time
    "worker_niceness": "0",  # actors as fast as other tests and pyright
    "memory_monitor_refresh_ms": "0",  # it would kill actors because of other tests
    "health_check_period_ms": "500",  # a lost node is noticed after 3 s, not 15
}.items():
    os.environ.setdefault(f"RAY_{name}", value)
# `nohup` ignores SIGHUP, and child processes would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# reasoning_gym's library of cellular automata loads matplotlib, half a second, for its plots.
with pytest.MonkeyPatch.context() as patch:
    for name in (
        "matplotlib",
        "matplotlib.pyplot",
        "matplotlib.animation",
        "matplotlib.collections",
        "mpl_toolkits.mplot3d",
    ):
        patch.setitem(sys.modules, name, MagicMock())
    importlib.import_module("cellpylib")

# Clients of HTTP servers read the certificates when they are created, which takes 20 ms.
ssl.create_default_context = functools.cache(ssl.create_default_context)

HANDLED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def pytest_configure() -> None:
    """Scanning half a million library objects takes a fifth of the collection's time."""
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that `-m "not e2e and not gpu"` deselects entirely: their imports take seconds."""
    terms = str(config.getoption("-m")).split(" and ")
    if collection_path == Path(__file__).parent / "gpu":
        return "not gpu" in terms or None
    if collection_path.suffix != ".py" or not all(re.fullmatch(r"not \w+", term) for term in terms):
        return None
    marks = "|".join(term.removeprefix("not ") for term in terms)
    whole = rf"^pytestmark = \[?pytest\.mark\.({marks})\b"
    return bool(re.search(whole, collection_path.read_text(encoding="utf-8"), re.MULTILINE)) or None


TOGETHER = (
    re.compile(
        r"tests/(trainer/engine/test_(engine|windows|expert_parallel|hpz|one_rank)"
        r"|benchmarks/test_training)"
    ),
    re.compile(
        r"tests/(rollout/(engine/test_(head_dtype|engine_args|vllm_engine)"
        r"|recording/test_(v1|hybrid)|vllm_fast)|weights/test_updates)"
    ),
    re.compile(r"tests/(model/test_fp8|rollout/engine/test_jobs|weights/test_(load_tracer|pack))"),
    re.compile(r"tests/rewards/test_(environments|language)"),
)
"""Groups of files for one process each: two fork from a preloaded server (tests/forked.py), one
loads vLLM and one the language model, so that other processes do not."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  (pytest works without it)

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            first = next((each.pattern for each in TOGETHER if each.match(nodeid)), None)
            return first or super()._split_scope(nodeid)

    return Files(config, log)


SLOWEST = (
    "tests/e2e/test_in_process",
    "tests/e2e/test_command",
    "tests/trainer/engine",
    "tests/e2e",
)
"""The slowest files, ordered so that files that wait run alongside files that compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no process ends with one of them."""

    def order(item: pytest.Item) -> tuple[bool, int]:
        starts = map(item.nodeid.startswith, SLOWEST)
        slow = item.get_closest_marker("e2e") is not None
        return not slow, next((n for n, match in enumerate(starts) if match), len(SLOWEST))

    items.sort(key=order)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # with 700, collections take a twentieth of the time
    gc.enable()


STARTED: list[str] = []
"""Processes started by the current test."""
_popen = subprocess.Popen.__init__


def _noted(self: Any, args: Any, *rest: Any, **named: Any) -> None:
    if args[0] not in ("uname", "file"):  # started by Python's platform module
        STARTED.append(str(args))
    _popen(self, args, *rest, **named)


subprocess.Popen.__init__ = _noted


def _forks() -> None:
    if not sys._getframe(1).f_code.co_filename.endswith("model/load.py"):  # milliseconds
        STARTED.append("a fork")


os.register_at_fork(before=_forks)


@pytest.fixture(autouse=True)
def processes_are_for_marked_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail unmarked tests that start a process, so that `make unit` stays fast."""
    STARTED.clear()
    marked = any(request.node.get_closest_marker(name) for name in ("e2e", "gpu"))
    runtimes = sys.modules.get("keel.rewards.sandbox.environments")
    if runtimes is not None and not marked:  # else only the first test would start the probe
        runtimes.find_runtime.cache_clear()
    yield
    if STARTED and not marked:
        pytest.fail(f"mark it e2e: it starts {', '.join(STARTED)[:200]}", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def process_as_it_was() -> Iterator[None]:
    """Restore what Ray, trainers and environments leave behind after each file."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    environ, folder, path = dict(os.environ), Path.cwd(), [*sys.path]
    yield
    sys.path[:] = path
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if (ray_timeouts := sys.modules.get("keel.model.ray_timeouts")) is not None:
        ray_timeouts.new_session()
    distributed = sys.modules.get("torch.distributed")  # initialized by a trainer in this process
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        # DeepSpeed caches the group.
        if (groups := sys.modules.get("deepspeed.utils.groups")) is not None:
            vars(groups)["_WORLD_GROUP"] = None
        if (comm := sys.modules.get("deepspeed.comm.comm")) is not None:
            vars(comm)["cdb"] = None
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    os.chdir(folder)


@pytest.fixture(scope="session")
def ray_worker_server(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A server of Ray workers for all processes of this run of pytest."""
    folder, session = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder, session = folder.parent, os.getppid()
    start_worker_server(folder / "ray", session)
    return str(folder / "ray")


@pytest.fixture(scope="module")
def forked_ray_workers(ray_worker_server: str) -> Iterator[None]:
    """Fork the workers of Ray clusters that this process starts, which saves seconds for each."""
    with pytest.MonkeyPatch.context() as patch, forking_ray_workers():
        patch.setenv(SERVER, ray_worker_server)
        yield


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """Warnings and errors logged so far in the test."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line that counts the skipped tests by reason, such as a missing package."""
    reports = [r.longrepr for r in terminalreporter.getreports("skipped")]
    reasons = Counter(str(r[2]).removeprefix("Skipped: ") for r in reports if isinstance(r, tuple))
    if reasons:
        parts = (f"{count} × {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {'; '.join(parts)}")
