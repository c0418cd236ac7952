"""The machines of a run: the cluster that RAY_ADDRESS names, or this one."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import ray
import torch
from ray.exceptions import RayError

from keel.configs.schema import Config, ConfigError
from keel.model.ray_timeouts import (
    CALL_S,
    Unanswered,
    bounded,
    joined,
    lost_reason,
    mark_lost,
    shut_down,
)
from keel.trainer.placement.gpus import Machine
from keel.trainer.placement.hang_detector import RAYS
from keel.trainer.placement.hardware import (
    Hardware,
    Node,
    allowed,
    assumed_nodes,
    idle_nodes,
    place,
)
from keel.trainer.placement.memory import GIB, gib
from keel.trainer.placement.processes import available_cores, end, gone_by
from keel.trainer.placement.ray_internals import (
    ended_by_force,
    free_by_node,
    on_loopback,
    own_processes,
    quieten_deaths,
    quieten_other_thread,
    quieten_token_question,
    without_unused_processes,
)
from keel.trainer.run.signals import signals_blocked, signals_deferred

CONNECT_S = 10.0
JOIN_S = 180.0
"""Longest wait to be let into a cluster, which takes a second. Ray itself waits for ever for a GCS
that stands still."""
LATE = "timed out during startup"
"""Ray gives its own processes 30 s, whatever else their machine has to do; then a second time."""
END_S = 20.0
"""Longest wait for Ray to end, which takes a second."""


MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container's control group, of version 2 or 1, says what memory it may have."""
SMI_S = 10.0
"""Longest wait for the driver's own program."""
NOTICED_GIB = 1.0
"""What an idle GPU may show of its driver's."""

QUOTED_PYTHON = {"py_executable": shlex.quote(sys.executable)}
"""The runtime environment of all actors: Ray passes the path of Python to a shell unquoted."""


def start_ray() -> None:
    """Join the cluster that RAY_ADDRESS names (as in `ray job submit`), or start one here. Raises
    ConfigError where that cannot be."""
    if ray.is_initialized():
        raise ConfigError(
            "Ray is in use in this process already, and Keel starts it itself, or joins the "
            "cluster of RAY_ADDRESS. Call ray.shutdown() first, or run Keel in a process of its own"
        )
    joined()
    quieten_token_question()
    quieten_deaths()
    quieten_other_thread()
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            _knock(address)
        except OSError as error:
            raise ConfigError(
                f"RAY_ADDRESS = {address}: no Ray cluster answers there ({error}). Correct it, or "
                "unset it to start Ray on this machine"
            ) from error
        try:
            with signals_blocked():
                bounded(
                    lambda: ray.init(
                        runtime_env=QUOTED_PYTHON if " " in sys.executable else None,
                        logging_level=logging.WARNING,
                        log_to_driver=False,
                    ),
                    JOIN_S,
                    "take this process into the cluster",
                )
        except Unanswered as error:
            mark_lost(str(error))
            raise ConfigError(f"RAY_ADDRESS = {address}: {error}") from error
        except (OSError, ValueError, RayError) as error:
            raise ConfigError(
                f"RAY_ADDRESS = {address}: Ray cannot join a cluster there ({error}). If it asks "
                "for a token, set RAY_AUTH_MODE=token here too, and bring its token: in "
                "RAY_AUTH_TOKEN, or in ~/.ray/auth_token. Else correct the address, or unset it to "
                "start Ray on this machine"
            ) from error
        return
    # Memory is ours to plan; Ray's own monitor would kill a worker on a busy shared machine.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray's own is 15: engines and ranks would come after all else, the run's reward programs too (a
    # step of the quickstart took ten times as long beside two busy processes on two cores).
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Of every call of an actor Ray's GCS keeps some 5 KB, up to 100,000 of them, for its dashboard.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Processes made ready for tasks: all of ours are actors with an environment of their own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    _bring_a_token()
    before = psutil.Process().children(recursive=True)
    try:
        try:
            _begin_ray()
        except Exception as error:  # as below
            if LATE not in str(error):
                raise
            end(
                [
                    process
                    for process in psutil.Process().children(recursive=True)
                    if process not in before
                ]
            )
            _begin_ray()
    except Exception as error:  # Ray raises no more than that when its processes do not come up
        raise RuntimeError(
            f"Ray did not start on this machine: {error}. Its logs: session_latest/logs below "
            "RAY_TMPDIR (default: /tmp/ray); start it again, or free memory and cores first"
        ) from error


def _begin_ray() -> None:
    # Ray's processes, and the actors in them, outlive a signal to all of the job. They end with the
    # thread that has started them, so it is not one that waits for no longer than a deadline.
    with signals_blocked(), on_loopback(), without_unused_processes():
        ray.init(
            address="local",
            include_dashboard=False,
            runtime_env=QUOTED_PYTHON,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )


def stop_ray() -> None:
    """Leave the cluster; one that was started here is ended with everything in it.

    A cluster that does not answer, or has lost a process, is not asked: Ray would wait for it for
    ever, or end this process without a word. So it would if a signal ended the cluster before it
    was left."""
    with signals_deferred():
        check_own()
        with ended_by_force():
            shut_down(ray.shutdown, END_S, "end")
        if lost_reason():
            atexit.unregister(ray.shutdown)


def check_own() -> None:
    """Mark Ray as lost if a process of the local cluster has ended: Ray itself would
    end this one."""
    for kind, pids in own_processes().items():
        if kind in RAYS and any(gone_by(pid) for pid in pids):
            mark_lost(f"{RAYS[kind]} (process {pids[0]}) is gone")


def _bring_a_token() -> None:
    """The token that a cluster of our own asks for, in the environment, where only this user and
    the cluster's processes see it.

    Without one Ray writes a token into the home folder, and every cluster that `ray start` begins
    there later asks for it, while `ray job submit` sends none unless RAY_AUTH_MODE is `token`.
    """
    if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _knock(address: str) -> None:
    """Raises OSError unless somebody listens at `host:port`: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def cluster_nodes(*, gpus: bool = True) -> list[Node]:
    """Nodes of the cluster with GPUs (false: all), most GPUs first, and what is free on them."""
    free = bounded(free_by_node, CALL_S, "say what is free on its nodes")
    nodes: list[Node] = []
    for node in bounded(ray.nodes, CALL_S, "list its nodes"):
        total, left = node["Resources"], free.get(node["NodeID"], {})
        if node["Alive"] and (not gpus or total.get("GPU", 0) >= 1):
            nodes.append(
                Node(
                    name=node["NodeManagerHostname"],
                    id=node["NodeID"],
                    gpus=int(total.get("GPU", 0)),
                    cpus=int(total.get("CPU", 0)),
                    free_gpus=int(left.get("GPU", 0)),
                    free_cpus=left.get("CPU", 0),
                )
            )
    return sorted(nodes, key=lambda node: (-node.gpus, node.name, node.id))


def this_machine() -> list[Node]:
    """The node that Ray would start here; none without GPUs."""
    gpus, cores = visible_gpus(), available_cores()
    name = socket.gethostname()
    node = Node(
        name=name,
        gpus=gpus,
        cpus=cores,
        free_gpus=gpus,
        free_cpus=cores,
        memory_gib=memory_gib(),
    )
    return [node] if gpus else []


def memory_gib(limits: Iterable[Path] = MEMORY_LIMITS) -> float:
    """Of this machine, or as much of it as its control group may have, in GiB."""
    sizes = [psutil.virtual_memory().total]
    for path in limits:
        with suppress(OSError, ValueError):  # there is none, or it says "max"
            sizes.append(int(path.read_text()))
    return min(sizes) / GIB


def gpu_gib() -> float:
    """Memory of a GPU here, in GiB, of the smallest; 0 without any."""
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(visible_gpus())]
    return min(sizes, default=0) / GIB


def gpu_name() -> str:
    """Of the first GPU here; empty without any."""
    return torch.cuda.get_device_properties(0).name if torch.cuda.is_available() else ""


def taken_gib(*, every: bool = False) -> float:
    """Memory that others already have of a GPU here, of the one where it is most, in GiB; 0 for
    less than `NOTICED_GIB`, and where nvidia-smi does not say. every: of the one where it is least:
    on a cluster Ray knows which are somebody's, and gives out the others."""
    program = shutil.which("nvidia-smi")
    if not program or not visible_gpus():
        return 0.0
    command = [program, "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0.0
    here = {str(torch.cuda.get_device_properties(i).uuid) for i in range(visible_gpus())}
    return most_taken(done.stdout, here, every=every)


def most_taken(listed: str, here: Set[str], *, every: bool = False) -> float:
    """Of lines `GPU-<uuid>, <MiB>`, those whose uuid is `here`. every: as `taken_gib`."""
    taken: list[float] = []
    for line in listed.splitlines():
        uuid, _, used = line.partition(",")
        if uuid.strip().removeprefix("GPU-") in here and used.strip().isdecimal():
            taken.append(int(used) / 1024)
    noticed = min(taken, default=0.0) if every else max(taken, default=0.0)
    return noticed if noticed >= NOTICED_GIB else 0.0


def visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def detect_hardware(config: Config) -> Hardware:
    """What a run that starts now has: in the cluster that RAY_ADDRESS names or on this machine, and
    no more of it than the recipe says."""
    if not uses_gpus(config):
        return Hardware(gpu=False)
    run, whole = config.run, gpu_gib()
    clustered = bool(os.environ.get("RAY_ADDRESS"))
    size = min(run.gpu_gib or whole, whole or run.gpu_gib)
    nodes = tuple(allowed(_nodes_found(), run))
    if clustered and len(nodes) > 1:  # whose GPUs need not be like those of this one
        size = run.gpu_gib or whole
    taken = taken_gib(every=clustered)
    return Hardware(
        gpu=True,
        nodes=nodes,
        gpu_gib=size,
        gpu_name=gpu_name(),
        # Of a GPU that the run takes a part of, others may have the rest.
        taken_gib=max(0.0, taken - max(0.0, whole - size)),
        note=_place_found(),
    )


def with_missing_nodes(found: Hardware, config: Config) -> Hardware:
    """And as many more nodes, like the largest, as a recipe needs that may start with fewer ranks
    (`trainer.min_ranks`): it is planned as a whole, and the start sees what there is."""
    trainer, run = config.trainer, config.run
    if not found.found or not found.nodes or not 0 < trainer.min_ranks < trainer.ranks:
        return found
    like, why = max(found.idle, key=lambda node: node.gpus), ""
    most = trainer.ranks + config.rollout.engines
    if run.gpus_per_node:
        most = run.nodes - len(found.nodes)
    for count in range(most + 1):
        more = [replace(like, name=f"missing node {i}", id="") for i in range(count)]
        try:
            place(config, [*found.idle, *more])
        except ConfigError as error:
            why = why or str(error)
            continue
        note = f"{found.note}; {count} of these nodes not there now" if count else found.note
        return replace(found, nodes=(*found.nodes, *more), note=note, missing=why)
    return found


def planned_hardware(config: Config) -> Hardware:
    """What `keel check` plans on: what the recipe says the run will have, what it leaves open as it
    is found, and where nothing is found nodes enough."""
    found, run = detect_hardware(config), config.run
    size, nodes = run.gpu_gib or found.gpu_gib, found.nodes
    as_said = not run.gpus_per_node or [n.gpus for n in nodes] == [run.gpus_per_node] * run.nodes
    if not found.gpu or (nodes and as_said and size == found.gpu_gib):
        return found
    notes = ["memory as run.gpu_gib says"] * (run.gpu_gib > 0)
    if run.gpu_gib > found.gpu_gib:
        here = gib(found.gpu_gib * GIB)
        notes[0] += f" (the GPUs here have {here}, and a run here goes by that)"
    if run.gpus_per_node:
        nodes = idle_nodes(run.nodes, run.gpus_per_node)
        notes.insert(0, "as run.gpus_per_node and run.nodes say")
    assumed = not nodes
    if assumed and not run.describes_gpus:
        raise ConfigError(
            "run.device = gpu: this machine has no GPU and RAY_ADDRESS is not set. To plan for "
            "another machine, set run.gpus_per_node and run.gpu_gib (GPUs and their memory); to "
            "run here, set run.device: cpu"
        )
    if assumed:
        nodes = assumed_nodes(config, node_gpus=Machine().node_gpus)
        notes.insert(0, "by rule, as no GPU is here and no RAY_ADDRESS (run.gpus_per_node)")
    return Hardware(
        gpu=True,
        nodes=tuple(nodes),
        gpu_gib=size,
        gpu_name=found.gpu_name,
        found=False,
        assumed=assumed,
        note="; ".join(notes),
    )


def uses_gpus(config: Config) -> bool:
    """Whether engines and trainer go on GPUs."""
    if config.run.device == "auto":
        return bool(visible_gpus()) or config.run.describes_gpus
    return config.run.device == "gpu"


def _nodes_found() -> list[Node]:
    """Of the cluster that RAY_ADDRESS names, else this machine."""
    if not os.environ.get("RAY_ADDRESS"):
        return this_machine()
    start_ray()
    try:
        return cluster_nodes()
    finally:
        stop_ray()


def _place_found() -> str:
    address = os.environ.get("RAY_ADDRESS")
    return f"the cluster at {address}" if address else "this machine"


def seat_lines(config: Config, hardware: Hardware) -> list[str]:
    """Who would sit where. Raises ConfigError if they do not fit."""
    idle = list(place(config, hardware.idle).lines())
    try:
        return list(place(config, hardware.nodes).lines())
    except ConfigError as error:
        return [f"once it is idle; now {error}", *idle]
