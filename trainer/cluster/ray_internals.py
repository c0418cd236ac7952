"""All that Keel's driver uses of Ray without a public name. No other file of trainer/ or model/
names a private module or attribute of it."""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import ray

CONSTANTS = "ray._private.ray_constants"
STATE = "ray._private.state"
WORKER = "ray._private.worker"
_LOG = logging.getLogger(__name__)


def quieten_token_question() -> None:
    """At every start Ray says whether the cluster asks for a token."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Node id → what nobody has taken of its resources.

    Ray's public functions say it of the whole cluster (`ray.available_resources`), or of each node
    what there is in all (`ray.nodes`, which is taken, with one line, where a release has moved the
    other: GPUs that others use are then waited for, and not planned around).
    """
    try:
        return importlib.import_module(STATE).available_resources_per_node()
    except (ImportError, AttributeError) as error:
        _warn(
            f"Ray {ray.__version__} is not as 2.60 was ({error}). GPUs that others use count as "
            "free here, and the run waits for them"
        )
        return {node["NodeID"]: node["Resources"] for node in ray.nodes()}


@contextmanager
def ended_by_force() -> Iterator[None]:
    """For `ray.shutdown` of a cluster that this process has started: its processes, which heed no
    SIGTERM (`keel.trainer.run.interrupt.shielded`), are not asked to end, a second each, and what
    they have started ends with them.
    """
    node: Any = getattr(importlib.import_module(WORKER), "_global_node", None)
    processes: Mapping[str, Any] = getattr(node, "all_processes", {})
    left: list[int] = []
    for pid in below([info.process.pid for infos in processes.values() for info in infos]):
        with suppress(ProcessLookupError):
            left.append(os.pidfd_open(pid))
    if processes:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **how: kill(**{**how, "allow_graceful": False})
    try:
        yield
    finally:
        for process in left:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


def below(pids: list[int]) -> list[int]:
    """All that these processes have started, and those, as far as they are there still."""
    found: list[int] = []
    waiting = list(pids)
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(pid) for pid in task.read_text().split()]
                found += children
                waiting += children
    return found


@cache  # or once for every look at the cluster
def _warn(line: str) -> None:
    _LOG.warning(line)


def listen_here_alone() -> None:
    """A cluster that is started here from now on is on the loopback interface, as Ray itself has it
    on macOS and Windows: whoever reaches this machine reaches no port of it."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # of Ray's own processes
    constants = importlib.import_module(CONSTANTS)
    if hasattr(constants, "ENABLE_RAY_CLUSTER"):
        setattr(constants, "ENABLE_RAY_CLUSTER", False)  # noqa: B010  (pyright knows no such name)
    else:
        _warn(
            f"Ray {ray.__version__} is not as 2.60 was. Its ports can be reached from other "
            "machines, and ask for the token of this run"
        )
