"""The machines of a run: the cluster that RAY_ADDRESS names, or this one."""

from __future__ import annotations

import logging
import os
import socket

import ray
import torch
from ray._private.state import available_resources_per_node  # nothing public says it by node

from configs.schema import Config, ConfigError
from trainer.estimate import Machine
from trainer.memory import GIB
from trainer.placement import Node, assumed_nodes, place

CONNECT_S = 10.0


def start_ray() -> None:
    """Join the cluster that RAY_ADDRESS names (as in `ray job submit`), or start one here."""
    # It says at every start whether the cluster asks for a token.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if address := os.environ.get("RAY_ADDRESS"):
        try:
            _knock(address)
            ray.init(logging_level=logging.WARNING, log_to_driver=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"RAY_ADDRESS = {address}: no Ray cluster answers there ({error}). Correct it, or "
                "unset it to start Ray on this machine"
            ) from error
        return
    # Memory is ours to plan; Ray's own monitor would kill a worker on a busy shared machine.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except Exception as error:  # Ray raises no more than that when its processes do not come up
        raise RuntimeError(
            f"Ray did not start on this machine: {error}. Its logs: session_latest/logs below "
            "RAY_TMPDIR (default: /tmp/ray); call the command again, or free memory and cores first"
        ) from error


def _knock(address: str) -> None:
    """Raises OSError unless somebody listens at `host:port`: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def cluster_nodes() -> list[Node]:
    """Nodes of the cluster with GPUs, most GPUs first, and what is free on them."""
    free = available_resources_per_node()
    nodes: list[Node] = []
    for node in ray.nodes():
        total, left = node["Resources"], free.get(node["NodeID"], {})
        if node["Alive"] and total.get("GPU", 0) >= 1:
            nodes.append(
                Node(
                    name=node["NodeManagerHostname"],
                    id=node["NodeID"],
                    gpus=int(total["GPU"]),
                    cpus=int(total.get("CPU", 0)),
                    free_gpus=int(left.get("GPU", 0)),
                    free_cpus=int(left.get("CPU", 0)),
                )
            )
    return sorted(nodes, key=lambda node: (-node.gpus, node.name, node.id))


def this_machine() -> list[Node]:
    """The node that Ray would start here; none without GPUs."""
    gpus, cores = visible_gpus(), os.cpu_count() or 1
    name = socket.gethostname()
    return [Node(name=name, gpus=gpus, cpus=cores, free_gpus=gpus, free_cpus=cores)] if gpus else []


def gpu_gib() -> float:
    """Memory of a GPU here, in GiB; 0 without any."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if visible_gpus() else 0.0


def visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def seating(config: Config) -> list[str]:
    """Who would sit where: in the cluster that RAY_ADDRESS names, else on this machine, else by
    rule. Raises ConfigError if they do not fit."""
    if address := os.environ.get("RAY_ADDRESS"):
        start_ray()
        try:
            nodes = cluster_nodes()
        finally:
            ray.shutdown()
        idle = place(config, [node.empty() for node in nodes])
        try:
            return [f"in the cluster at {address}, as it is now", *place(config, nodes).lines()]
        except ConfigError as error:
            note = f"in the cluster at {address} once it is idle; now {error}"
            return [note, *idle.lines()]
    if nodes := this_machine():
        return list(place(config, nodes).lines())
    size = Machine().node_gpus
    note = f"no GPU here and no RAY_ADDRESS: by rule, on nodes of {size} GPUs"
    return [note, *place(config, assumed_nodes(config, node_gpus=size)).lines()]
