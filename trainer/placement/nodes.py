"""Connect to the Ray cluster of a run, detect its hardware, and reserve GPUs on it.

This is the cluster at RAY_ADDRESS, or one that Keel starts on this machine.
"""

import atexit
import logging
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from keel.configs.schema import Config, ConfigError
from keel.model import ray_timeouts
from keel.model.hub import download, is_hub_name
from keel.model.ray_timeouts import CALL_S, bounded
from keel.trainer.placement import ray_internals
from keel.trainer.placement.hardware import (
    RANK,
    SHARED_GPU,
    GpuSpec,
    Hardware,
    Node,
    Placement,
    Seat,
    idle_nodes,
    limit_nodes,
    place,
)
from keel.trainer.placement.memory import GIB
from keel.trainer.placement.watchdog import RAY_PROCESSES, available_cores, has_exited, kill
from keel.trainer.run.progress import waiting
from keel.trainer.run.signals import signals_blocked, signals_deferred

_CONNECT_S, _ENTER_S, _LEAVE_S = 10.0, 180.0, 20.0
"""Timeouts for connecting to a cluster's address, joining the cluster and leaving it. Ray itself
would wait forever."""
_START_TIMEOUT = "timed out during startup"  # of Ray's processes, after 30 s; worth a second try
_MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit, for cgroup versions 2 and 1."""
QUOTED_PYTHON = {"py_executable": shlex.quote(sys.executable)}
"""Runtime environment for all actors. It quotes the path to Python, which Ray otherwise passes to a
shell unquoted."""
_RAY_SETTINGS = {
    "RAY_memory_monitor_refresh_ms": "0",  # the plan bounds memory; Ray would kill workers
    "RAY_worker_niceness": "0",  # Ray's default of 15 starves engines and ranks on a busy machine
    "RAY_task_events_report_interval_ms": "0",  # 5 KB in the GCS for each call of an actor
    "RAY_prestart_worker_first_driver": "0",  # only tasks would use such processes
}
_FP8_GPUS = (8, 9)  # least compute capability of GPUs with FP8 units
_GRANT_S = 5.0  # plan again if Ray has not granted a group by then: the GPUs may be taken
_POLL_S = 0.5
_DOWNLOAD_S = 24 * 3600.0


def start_ray() -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine if that isn't set. Raises
    ConfigError if this fails."""
    if ray.is_initialized():
        raise ConfigError(
            "this process already uses Ray, which Keel starts or joins itself (RAY_ADDRESS). Call "
            "ray.shutdown() first, or run Keel in a separate process"
        )
    ray_internals.check_version()
    ray_timeouts.new_session()
    ray_internals.silence_ray()
    if address := os.environ.get("RAY_ADDRESS"):
        _join(address)
        return
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Without a token Ray writes one into the home folder, which every later `ray start` asks for.
    if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    before = psutil.Process().children(recursive=True)
    for retry in (True, False):
        try:
            # Ray's processes survive a signal to the whole job, and exit with the thread that
            # started them.
            with (
                signals_blocked(),
                ray_internals.listen_on_loopback(),
                ray_internals.skip_unused_processes(),
            ):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    runtime_env=QUOTED_PYTHON,
                    logging_level=logging.WARNING,
                    log_to_driver=False,
                )
            return
        except Exception as error:  # Ray raises plain exceptions here
            if not retry or _START_TIMEOUT not in str(error):
                raise RuntimeError(
                    f"Ray did not start on this machine: {error}. See session_latest/logs under "
                    "RAY_TMPDIR (default: /tmp/ray); free memory and cores, then start again"
                ) from error
            kill([p for p in psutil.Process().children(recursive=True) if p not in before])


def _join(address: str) -> None:
    host, _, port = address.rpartition(":")

    def join() -> None:
        ray.init(
            runtime_env=QUOTED_PYTHON if " " in sys.executable else None,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )

    try:
        if port.isdecimal() and "/" not in host:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        with signals_blocked():
            bounded(join, _ENTER_S, "take this process into the cluster")
    except (OSError, ValueError, RayError) as error:
        if isinstance(error, ray_timeouts.Unanswered):
            ray_timeouts.mark_lost(str(error))
        raise ConfigError(
            f"RAY_ADDRESS = {address}: Ray cannot join a cluster there ({error}). If it asks for a "
            "token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or ~/.ray/auth_token); else "
            "correct the address, or unset it to start Ray on this machine"
        ) from error


def stop_ray() -> None:
    """Leave the cluster, and stop it if Keel started it. A lost cluster isn't contacted, because
    Ray would wait forever or exit this process."""
    with signals_deferred():
        for kind, pids in ray_internals.own_processes().items():
            if kind in RAY_PROCESSES and any(has_exited(pid) for pid in pids):
                ray_timeouts.mark_lost(f"{RAY_PROCESSES[kind]} (process {pids[0]}) is gone")
        with ray_internals.kill_own_processes_on_shutdown():
            ray_timeouts.shut_down(ray.shutdown, _LEAVE_S, "end")
        if ray_timeouts.lost_reason():
            atexit.unregister(ray.shutdown)


def cluster_nodes(*, gpus: bool = True) -> list[Node]:
    """Return the live nodes with their free resources, sorted from most to fewest GPUs."""
    free_resources = bounded(ray_internals.free_by_node, CALL_S, "report free resources")
    nodes: list[Node] = []
    for node in ray_timeouts.alive_nodes():
        total, free = node["Resources"], free_resources.get(node["NodeID"], {})
        if not gpus or total.get("GPU", 0) >= 1:
            nodes.append(
                Node(
                    name=node["NodeManagerHostname"],
                    id=node["NodeID"],
                    gpus=int(total.get("GPU", 0)),
                    cpus=int(total.get("CPU", 0)),
                    free_gpus=int(free.get("GPU", 0)),
                    free_cpus=free.get("CPU", 0),
                )
            )
    return sorted(nodes, key=lambda node: (-node.gpus, node.name, node.id))


def _memory_gib() -> float:
    sizes = [psutil.virtual_memory().total]
    for path in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no file, or "max"
            sizes.append(int(path.read_text()))
    return min(sizes) / GIB


def gpu_gib() -> float:
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(_visible_gpus())]
    return min(sizes, default=0) / GIB


def _visible_gpus() -> int:
    return torch.cuda.device_count()


def detect_hardware(config: Config) -> Hardware:
    """Detect the hardware that the run would get if it started right now, within the recipe's
    limits."""
    run = config.run
    detected = run.device == "auto" and (bool(_visible_gpus()) or run.describes_gpus)
    if not (detected or run.device == "gpu"):
        return Hardware(gpu=False)
    whole, address = gpu_gib(), os.environ.get("RAY_ADDRESS")
    nodes = limit_nodes(_detect_nodes(), run)
    size = min(run.gpu_gib or whole, whole or run.gpu_gib)
    if address and len(nodes) > 1:  # other nodes may have other GPUs
        size = run.gpu_gib or whole
    return Hardware(
        gpu=True,
        nodes=tuple(nodes),
        gpu_gib=size,
        gpu_name=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        fp8=not torch.cuda.is_available() or torch.cuda.get_device_capability(0) >= _FP8_GPUS,
        note=f"the cluster at {address}" if address else "this machine",
    )


def _detect_nodes() -> list[Node]:
    if os.environ.get("RAY_ADDRESS"):
        start_ray()
        try:
            return cluster_nodes()
        finally:
            stop_ray()
    gpus, cores, host = _visible_gpus(), available_cores(), socket.gethostname()
    node = Node(name=host, gpus=gpus, cpus=cores, free_gpus=gpus, free_cpus=cores)
    return [replace(node, memory_gib=_memory_gib())] if gpus else []


def with_missing_nodes(hardware: Hardware, config: Config) -> Hardware:
    """Add copies of the largest node until the whole elastic run (`trainer.min_ranks`) fits."""
    trainer, run = config.trainer, config.run
    elastic = 0 < trainer.min_ranks < trainer.ranks
    if not hardware.found or not hardware.nodes or not elastic:
        return hardware
    largest, reason = max(hardware.idle, key=lambda node: node.gpus), ""
    most = trainer.ranks + config.rollout.engines
    if run.gpus_per_node:
        most = run.nodes - len(hardware.nodes)
    for count in range(most + 1):
        more = [replace(largest, name=f"missing node {i}", id="") for i in range(count)]
        try:
            place(config, [*hardware.idle, *more])
        except ConfigError as error:
            reason = reason or str(error)
            continue
        note = hardware.note + f"; {count} of these nodes absent now" * bool(count)
        return replace(hardware, nodes=(*hardware.nodes, *more), note=note, missing=reason)
    return hardware


def planned_hardware(config: Config) -> Hardware:
    """Return the hardware that `keel check` plans for: the hardware described in the recipe (8 GPUs
    per node by default), or the detected hardware if the recipe describes none."""
    hardware, run = detect_hardware(config), config.run
    size, nodes = run.gpu_gib or hardware.gpu_gib, hardware.nodes
    layout = [run.gpus_per_node] * run.nodes
    as_described = not run.gpus_per_node or [node.gpus for node in nodes] == layout
    if not hardware.gpu or (nodes and as_described and size == hardware.gpu_gib):
        return hardware
    if not nodes and not run.describes_gpus:
        raise ConfigError(
            "run.device = gpu: this machine has no GPU and RAY_ADDRESS is not set. To plan for "
            "another machine, set run.gpus_per_node and run.gpu_gib (GPUs and their memory); to "
            "run here, set run.device: cpu"
        )
    if run.gpus_per_node or not nodes:
        nodes = tuple(idle_nodes(run.nodes, run.gpus_per_node or GpuSpec().node_gpus))
    return Hardware(
        gpu=True,
        nodes=nodes,
        gpu_gib=size,
        gpu_name=hardware.gpu_name,
        found=False,
        note="as described by run.gpus_per_node, run.nodes and run.gpu_gib",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A placement and the Ray placement groups that reserve its GPUs."""

    placement: Placement
    groups: Sequence[tuple[Sequence[Seat], PlacementGroup]]

    def options(self, kind: str, index: int) -> dict[str, Any]:
        """Return the Ray options of an actor. An engine on several nodes reserves no GPU, because
        its workers are separate actors (`EngineSpec.spread`)."""
        owner = self.placement.owner(kind, index)
        seats, group = next(each for each in self.groups if owner in each[0])
        gpus = 0 if owner.spread else SHARED_GPU if owner.shared else owner.gpus
        return {
            "num_cpus": 1,
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=seats.index(owner)
            ),
        }


@contextmanager
def reserve_gpus(config: Config, *, timeout_s: float, only: str = "") -> Iterator[Reservation]:
    """Reserve the GPUs for a run, or only those for actors of kind `only`, until this process
    exits. Raises ConfigError if the cluster is too small even when idle, and TimeoutError if other
    users don't free up enough GPUs in time."""
    place(config, [node.empty() for node in limit_nodes(cluster_nodes(), config.run)], only=only)
    end = time.monotonic() + timeout_s
    while True:
        reason = "Ray did not grant GPUs that looked free"
        try:
            placement = place(config, limit_nodes(cluster_nodes(), config.run), only=only)
        except ConfigError as error:
            reason = str(error)
        else:
            with ExitStack() as stack:
                groups: list[tuple[Sequence[Seat], PlacementGroup]] = []
                for seats in _seats_of_groups(placement):
                    group = bounded(partial(_create_group, seats), CALL_S, "take a reservation")
                    remove = partial(remove_placement_group, group)
                    stack.callback(ray_timeouts.clean_up, remove, CALL_S, "give up a reservation")
                    groups.append((seats, group))
                granted = min(time.monotonic() + _GRANT_S, end)
                waits = (partial(g.wait, max(0.0, granted - time.monotonic())) for _, g in groups)
                if all(bounded(wait, CALL_S, "report reservations") for wait in waits):
                    yield Reservation(placement=placement, groups=groups)
                    return
        if time.monotonic() + _POLL_S >= end:
            raise TimeoutError(
                f"no free GPUs after {timeout_s:g} s (run.startup_timeout_s): {reason}"
            )
        time.sleep(_POLL_S)


def _seats_of_groups(placement: Placement) -> list[list[Seat]]:
    """Return the seats that own GPUs, keyed by placement group. An engine on several nodes has its
    own group, because vLLM takes over the entire group."""
    groups: dict[int, list[Seat]] = {}
    for seat in placement.seats:
        if seat.kind == RANK or not seat.shared:
            groups.setdefault(seat.index if seat.spread else -1, []).append(seat)
    return list(groups.values())


def _create_group(seats: Sequence[Seat]) -> PlacementGroup:
    """Create a placement group with one bundle per seat (the place of an engine or rank), pinned to
    the seat's node. A multi-node engine gets one bundle per GPU instead, because each of its
    workers is an actor."""
    bundles: list[dict[str, float]] = []
    nodes: list[dict[str, str]] = []
    for seat in seats:
        bundles.append({"CPU": 2.0 if seat.shared else 1.0, "GPU": float(seat.gpus)})
        if seat.spread:
            bundles[-1:] = [{"CPU": 1.0, "GPU": 1.0}, *[{"GPU": 1.0}] * (seat.gpus - 1)]
        nodes += [{"ray.io/node-id": seat.node.id}] * (len(bundles) - len(nodes))
    return placement_group(bundles, strategy="PACK", bundle_label_selector=nodes)


class _Downloader:
    def fetch(self, path: str) -> None:
        disable_progress_bars()
        download(path)


def download_on_nodes(path: str, *, nodes: Collection[str] = ()) -> None:
    """Download the hub model `path` to all other nodes, or only to those with Ray ids in `nodes`.
    Raises ConfigError if a download fails, and RuntimeError if a node is lost."""
    if not is_hub_name(path) or Path(path).exists():
        return
    here = ray.get_runtime_context().get_node_id()
    hosts = {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in ray_timeouts.alive_nodes()
        if node["NodeID"] != here and (not nodes or node["NodeID"] in nodes)
    }
    actors = list[Any]()
    try:
        for node in hosts:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": strategy}
            actors.append(ray_timeouts.create(_Downloader, "download", options))
        requests = [ray_timeouts.call(actor.fetch, path) for actor in actors]
        pending = dict(zip(requests, hosts.values(), strict=True))
        deadline = ray_timeouts.Deadline(_DOWNLOAD_S)
        with waiting(f"downloading {path} on {len(hosts)} other node(s)"):
            while pending:
                done, late = ray_timeouts.wait([*pending], seconds=deadline)
                for request in done or late:
                    host = pending.pop(request)
                    try:
                        ray_timeouts.get(request, seconds=CALL_S)
                    except (RayError, TimeoutError) as error:
                        reason = ray_timeouts.cause(error)
                        kind = ConfigError if isinstance(reason, ConfigError) else RuntimeError
                        raise kind(
                            f"node {host} did not finish its download of {path} ({reason}). Check "
                            "the node, or put the model on shared storage (HF_HOME, or model.path: "
                            "a folder there)"
                        ) from error
    finally:
        for actor in actors:
            ray_timeouts.kill(actor)
