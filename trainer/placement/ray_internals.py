"""Everything in Ray that Keel's driver uses although it is not public.

No other file in trainer/ or model/ names a private module or attribute of Ray.
"""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import ray

from keel.trainer.placement.processes import descendants

_CONSTANTS = "ray._private.ray_constants"
_NETWORK, _NETWORK_VARIABLE = "ENABLE_RAY_CLUSTER", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Constant that says whether Ray binds to all network interfaces, and the environment variable from
which Ray reads it."""
_NODE, _SERVICES = "ray._private.node", "ray._private.services"
_STATE, _WORKER = "ray._private.state", "ray._private.worker"
_DEATHS = ("Raylet is terminated", "A worker died or was killed", "The node with node id")
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's `Node` class that start the autoscaler, the log monitor and the dashboard."""
_START_PROCESS = "start_ray_process"
_PROGRAMS = Path(__file__).parent / "programs"
_AGENT, _SETUP_WORKER, _TIED = (
    _PROGRAMS / name for name in ("no_agent.py", "setup_worker.py", "bound.py")
)
_LOG = logging.getLogger(__name__)


def silence_ray() -> None:
    """Hide Ray's messages about tokens, dead processes and signal handlers, because Keel prints its
    own."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    logging.getLogger(_WORKER).addFilter(_not_about_sigterm)
    worker = importlib.import_module(_WORKER)
    printed = getattr(worker, "print_to_stdstream", None)
    if printed is None or getattr(printed, "of_keel", False):
        return

    def brief(data: Mapping[str, Any], *rest: Any, **named: Any) -> None:
        if not "".join(map(str, data.get("lines", ()))).startswith(_DEATHS):
            printed(data, *rest, **named)

    brief.of_keel = True  # pyright: ignore[reportFunctionMemberAccess]
    vars(worker)["print_to_stdstream"] = brief


def _not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Return the free resources of each node by its id. Ray's public functions report them only for
    the whole cluster.

    If a Ray release does not have the function, the total resources of each node are returned.
    """
    try:
        return importlib.import_module(_STATE).available_resources_per_node()
    except (ImportError, AttributeError) as error:
        _warn(
            f"Ray {ray.__version__} differs from 2.60 ({error}). GPUs that others use count as "
            "free, so the run waits for them"
        )
        return {node["NodeID"]: node["Resources"] for node in ray.nodes()}


def exit_now(status: int) -> NoReturn:
    """Exit without waiting for threads. Ray's threads crash without their cluster, and a tracker's
    may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def own_processes() -> dict[str, list[int]]:
    """Return the process ids of the cluster that this process has started, by kind (`raylet`,
    `gcs_server`). Empty if it has joined a cluster."""
    processes: Mapping[str, Any] = getattr(_node(), "all_processes", {})
    return {kind: [info.process.pid for info in infos] for kind, infos in processes.items()}


def _node() -> Any:
    return getattr(importlib.import_module(_WORKER), "_global_node", None)


@contextmanager
def killing_own_processes() -> Iterator[None]:
    """Make `ray.shutdown` kill the processes of a cluster that was started here, with their
    descendants.

    They ignore SIGTERM, so asking each of them to exit would take a second. They are killed at exit
    even if `ray.shutdown` was never called.
    """
    node, handles = _node(), list[int]()
    local = [pid for pids in own_processes().values() for pid in pids]
    for pid in [*local, *(child for root in local for child in descendants(root))]:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    if local:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})
    try:
        yield
    finally:
        for process in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


@cache
def _warn(line: str) -> None:
    _LOG.warning(line)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Start clusters only on the loopback interface, so that no port can be reached from
    outside."""
    constants = vars(importlib.import_module(_CONSTANTS))
    if _NETWORK not in constants:
        _warn(
            f"Ray {ray.__version__} differs from 2.60. Its ports can be reached from other "
            "machines, and ask for this run's token"
        )
        yield
        return
    constant, variable = constants[_NETWORK], os.environ.get(_NETWORK_VARIABLE)
    constants[_NETWORK], os.environ[_NETWORK_VARIABLE] = False, "0"  # the latter for subprocesses
    try:
        yield
    finally:
        constants[_NETWORK] = constant
        del os.environ[_NETWORK_VARIABLE]
        if variable is not None:
            os.environ[_NETWORK_VARIABLE] = variable


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """Start clusters without the four Python processes that a run does not need.

    They use a tenth of a small run's CPU time. Ray releases that have renamed their methods still
    start them.
    """
    services = importlib.import_module(_SERVICES)
    node = getattr(importlib.import_module(_NODE), "Node", None)
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (node, name, lambda *_, **__: None) for name in _UNUSED if name in vars(node or object)
    ]
    if start := getattr(services, _START_PROCESS, None):

        def start_light(command: Sequence[str], *rest: Any, **named: Any) -> Any:
            return start(lighter(command), *rest, **named)

        patches.append((services, _START_PROCESS, start_light))
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
    for owner, name, patch in patches:
        setattr(owner, name, patch)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def lighter(command: Sequence[str]) -> list[str]:
    """Replace the agent and the worker setup in the raylet's command line with the faster programs
    in `programs`."""
    options = {name: value for name, _, value in (word.partition("=") for word in command)}
    agent, session, node = "--dashboard_agent_command", "--session_dir", "--node_id"
    runtime_agent, workers = "--runtime_env_agent_command", "--python_worker_command"
    if not options.keys() >= {agent, session, node}:
        return list(command)
    python = [sys.executable, "-I", "-S"]  # starts at once: only the standard library
    words = [*python, str(_AGENT), options[session], options[node]]
    changed = {agent: subprocess.list2cmdline(words)}
    if theirs := options.get(runtime_agent):  # would outlive its raylet by a minute
        changed[runtime_agent] = f"{subprocess.list2cmdline([*python, str(_TIED)])} {theirs}"
    match shlex.split(options.get(workers, "")):
        case [interpreter, setup, *rest] if Path(setup).name == _SETUP_WORKER.name:
            changed[workers] = subprocess.list2cmdline([interpreter, str(_SETUP_WORKER), *rest])
        case _:
            pass
    names = [word.partition("=")[0] for word in command]
    return [
        f"{name}={changed[name]}" if name in changed else word
        for name, word in zip(names, command, strict=True)
    ]
