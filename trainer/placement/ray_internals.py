"""All code in Keel's driver that uses private parts of Ray 2.60. No other file in trainer/ or
model/ uses a private module or attribute of Ray."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import psutil
import ray

from keel.configs.schema import ConfigError

VERSION = "2.60.0"
_WORKER = "ray._private.worker"
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's `Node` class that start the autoscaler, the log monitor and the dashboard."""
_STUB = [sys.executable, "-I", "-S", str(Path(__file__).with_name("ray_stub.py"))]


def check_version() -> None:
    """Raise ConfigError unless Ray is the version that Keel needs."""
    if ray.__version__ != VERSION:
        raise ConfigError(
            f"Ray {ray.__version__} is installed, but Keel needs {VERSION}. Run "
            f"pip install 'ray[default]=={VERSION}'"
        )


def silence_ray() -> None:
    """Suppress Ray's messages about tokens and signal handlers."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    logging.getLogger(_WORKER).addFilter(
        lambda record: "SIGTERM handler is not set" not in record.getMessage()
    )


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Return each node's free resources, keyed by node id. Ray's public functions report only the
    total."""
    return import_module("ray._private.state").available_resources_per_node()


def exit_now(status: int) -> NoReturn:
    """Exit without waiting for threads. Ray's threads crash once their cluster is gone, and a
    tracker's thread may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def own_processes() -> dict[str, list[int]]:
    """Return the ids of the Ray processes that this process started, keyed by kind, such as
    `raylet`."""
    processes = getattr(import_module(_WORKER)._global_node, "all_processes", {})
    return {kind: [info.process.pid for info in infos] for kind, infos in processes.items()}


@contextmanager
def kill_own_processes_on_shutdown() -> Iterator[None]:
    """Make `ray.shutdown` kill the processes of a cluster started here, along with their
    descendants. Ray would first ask each process to exit, which takes a second because they ignore
    SIGTERM. If `ray.shutdown` is never called, the processes are killed at exit."""
    processes = list[psutil.Process]()
    local = [pid for pids in own_processes().values() for pid in pids]
    for pid in local:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            processes += [process, *process.children(recursive=True)]
    if local:
        node: Any = import_module(_WORKER)._global_node
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**{**options, "allow_graceful": False})
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def listen_on_loopback() -> Iterator[None]:
    """Make new clusters listen only on the loopback interface."""
    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = os.environ.get(variable)
    os.environ[variable] = "0"  # for subprocesses
    constants = import_module("ray._private.ray_constants")
    try:
        with patch.object(constants, "ENABLE_RAY_CLUSTER", False):
            yield
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


@contextmanager
def skip_unused_processes() -> Iterator[None]:
    """Start clusters without four Python processes that a run doesn't need. In a small run, they
    would take up a tenth of the CPU time."""
    services: Any = import_module("ray._private.services")
    node: Any = import_module("ray._private.node").Node
    start: Callable[..., Any] = services.start_ray_process

    def start_light(command: Sequence[str], *rest: Any, **named: Any) -> Any:
        return start(_replace_agent(command), *rest, **named)

    nothing = dict.fromkeys(_UNUSED, lambda *_, **__: None)
    with (
        patch.multiple(node, **nothing),
        patch.object(services, "start_ray_process", start_light),
    ):
        yield


def _replace_agent(command: Sequence[str]) -> list[str]:
    """Rewrite the raylet's command line so that it starts a stub instead of the dashboard agent."""
    options = {name: value for name, _, value in (word.partition("=") for word in command)}
    agent = "--dashboard_agent_command"
    if agent not in options:
        return list(command)
    stub = [*_STUB, options["--session_dir"], options["--node_id"]]
    changed = f"{agent}={subprocess.list2cmdline(stub)}"
    return [changed if word.startswith(f"{agent}=") else word for word in command]
