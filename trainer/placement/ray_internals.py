"""All that Keel's driver uses of Ray without a public name. No other file of trainer/ or model/
names a private module or attribute of it."""

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

from keel.trainer.placement.processes import below

CONSTANTS = "ray._private.ray_constants"
NETWORK, NETWORK_VARIABLE = "ENABLE_RAY_CLUSTER", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Whether Ray's processes may talk to other machines: a constant, and what it is read from."""
NODE = "ray._private.node"
DEATHS = ("Raylet is terminated", "A worker died or was killed", "The node with node id")
"""How what Ray prints of a process or a node that has died begins."""
UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Of Ray's class of a node: what starts its autoscaler's process, which has nothing to scale; the
one that sends lines of logs to the driver, which asks for none (`log_to_driver`); and the head of
the dashboard, without its pages."""
SERVICES, STARTS = "ray._private.services", "start_ray_process"
"""What starts each of Ray's own processes, by its command line."""
PROGRAMS = Path(__file__).parent / "programs"
NO_AGENT, SETUP = PROGRAMS / "no_agent.py", PROGRAMS / "setup_worker.py"
WORKERS = "--python_worker_command"
BOUND, RUNTIME_AGENT = PROGRAMS / "bound.py", "--runtime_env_agent_command"
STATE = "ray._private.state"
WORKER = "ray._private.worker"
_LOG = logging.getLogger(__name__)


def quieten_token_question() -> None:
    """At every start Ray says whether the cluster asks for a token."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


def quieten_deaths() -> None:
    """Ray prints pages about a process that has died; Keel says it in a line."""
    worker = importlib.import_module(WORKER)
    printed = getattr(worker, "print_to_stdstream", None)
    if printed is None or getattr(printed, "of_keel", False):
        return

    def brief(data: Mapping[str, Any], *rest: Any, **named: Any) -> None:
        said = "".join(map(str, data.get("lines", ())))
        if not said.startswith(DEATHS):
            printed(data, *rest, **named)

    brief.of_keel = True  # pyright: ignore[reportFunctionMemberAccess]
    vars(worker)["print_to_stdstream"] = brief


def quieten_other_thread() -> None:
    """Where another thread than the main one joins a cluster (`keel.model.ray_timeouts.bounded`),
    Ray
    warns that it has put no handler of its own for SIGTERM. Keel has one."""
    logging.getLogger(WORKER).addFilter(_not_of_handlers)


def _not_of_handlers(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


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


def exit_now(status: int) -> NoReturn:
    """End this process without waiting for threads: Ray's own crash where their cluster is gone, a
    tracker's may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def own_processes() -> dict[str, list[int]]:
    """Processes of the cluster that this process has started, by kind (`raylet`, `gcs_server` …);
    none where it has joined one."""
    processes: Mapping[str, Any] = getattr(_node(), "all_processes", {})
    return {kind: [info.process.pid for info in infos] for kind, infos in processes.items()}


def _node() -> Any:
    return getattr(importlib.import_module(WORKER), "_global_node", None)


@contextmanager
def ended_by_force() -> Iterator[None]:
    """For `ray.shutdown` of a cluster that this process has started: its processes, which heed no
    SIGTERM (`keel.trainer.run.signals.shielded`), are not asked to end, a second each, and what
    they have started ends with them. They end at the latest when this does, whether it has been
    called or not.
    """
    node = _node()
    left: list[int] = []
    own = [pid for pids in own_processes().values() for pid in pids]
    for pid in [*own, *(part for root in own for part in below(root))]:
        with suppress(ProcessLookupError):
            left.append(os.pidfd_open(pid))
    if own:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **how: kill(**{**how, "allow_graceful": False})
    try:
        yield
    finally:
        for process in left:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


@cache  # or once for every look at the cluster
def _warn(line: str) -> None:
    _LOG.warning(line)


@contextmanager
def on_loopback() -> Iterator[None]:
    """A cluster that is started in here is on the loopback interface, as Ray itself has it on macOS
    and Windows: whoever reaches this machine reaches no port of it. One that is joined later, or
    that others start in this process, is not touched."""
    constants = vars(importlib.import_module(CONSTANTS))
    if NETWORK not in constants:
        _warn(
            f"Ray {ray.__version__} is not as 2.60 was. Its ports can be reached from other "
            "machines, and ask for the token of this run"
        )
        yield
        return
    constant, variable = constants[NETWORK], os.environ.get(NETWORK_VARIABLE)
    constants[NETWORK], os.environ[NETWORK_VARIABLE] = False, "0"  # Ray's processes read the latter
    try:
        yield
    finally:
        constants[NETWORK] = constant
        del os.environ[NETWORK_VARIABLE]
        if variable is not None:
            os.environ[NETWORK_VARIABLE] = variable


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """A cluster that is started in here has no process that a run does not use: four of Python,
    which are more than a tenth of what a small run computes, and for one of which the driver would
    wait. Where a release of Ray has moved what starts them, they are there."""
    services = importlib.import_module(SERVICES)
    node = getattr(importlib.import_module(NODE), "Node", None)
    put: list[tuple[Any, str, Callable[..., Any]]] = [
        (node, name, lambda *_, **__: None) for name in UNUSED if name in vars(node or object)
    ]
    if start := getattr(services, STARTS, None):

        def started(command: Sequence[str], *rest: Any, **named: Any) -> Any:
            return start(lighter(command), *rest, **named)

        put.append((services, STARTS, started))
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in put]
    for owner, name, other in put:
        setattr(owner, name, other)
    try:
        yield
    finally:
        for owner, name, own in before:
            setattr(owner, name, own)


def lighter(command: Sequence[str]) -> list[str]:
    """The command of a raylet whose dashboard's agent is `NO_AGENT`, and whose workers are set up
    by `SETUP`; of another process, or of a raylet that is not told of its agent so, as it is."""
    told = {name: value for name, _, value in (w.partition("=") for w in command)}
    agent, session, node = "--dashboard_agent_command", "--session_dir", "--node_id"
    if not told.keys() >= {agent, session, node}:
        return list(command)
    # Without `site`: they need nothing but Python's own modules, and are there at once.
    bare = [sys.executable, "-I", "-S"]
    changed = {agent: subprocess.list2cmdline([*bare, str(NO_AGENT), told[session], told[node]])}
    if other := told.get(RUNTIME_AGENT):  # which by itself lives on for a minute without its raylet
        changed[RUNTIME_AGENT] = f"{subprocess.list2cmdline([*bare, str(BOUND)])} {other}"
    match shlex.split(told.get(WORKERS, "")):
        case [python, theirs, *rest] if Path(theirs).name == SETUP.name:
            changed[WORKERS] = subprocess.list2cmdline([python, str(SETUP), *rest])
        case _:
            pass
    names = [word.partition("=")[0] for word in command]
    return [
        f"{name}={changed[name]}" if name in changed else word
        for name, word in zip(names, command, strict=True)
    ]
