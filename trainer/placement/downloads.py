"""Downloads a hub model to the other nodes of a cluster, so that the download does not use up the
start timeout."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.configs.schema import ConfigError
from keel.model import ray_timeouts
from keel.model.download import download_of
from keel.model.hub import is_hub_name
from keel.trainer.run.progress import waiting

_POLL_S = 1.0
_STALL_TIMEOUT_S = 600.0
"""Give up if no node has received a byte for this long. The hub's client retries on its own."""


class Downloader:
    """Ray actor that downloads a model into the cache of its node."""

    def __init__(self, path: str) -> None:
        self._download = download_of(path)

    def size(self) -> int:
        """Return the total number of bytes, or 0 if there is nothing to download."""
        return self._download.total if self._download else 0

    def present(self) -> int:
        return self._download.present() if self._download else 0

    def fetch(self) -> None:
        if self._download:
            self._download.fetch()


def download_on_nodes(path: str, *, timeout_s: float, nodes: Collection[str] = ()) -> None:
    """Download the hub model `path` on every node except this one.

    `nodes` has the Ray ids of the nodes that need it; empty means all of them. `timeout_s` limits
    how long a node may take to report the size. Raises ConfigError if a download fails, and
    RuntimeError if a node does not answer or all downloads stall.
    """
    if not is_hub_name(path) or Path(path).exists():
        return
    here = ray.get_runtime_context().get_node_id()
    alive = ray_timeouts.bounded(ray.nodes, ray_timeouts.CALL_S, "list its nodes")
    hosts = {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in alive
        if node["Alive"] and node["NodeID"] != here and (not nodes or node["NodeID"] in nodes)
    }
    actors: dict[str, Any] = {}

    def answer(node: str, request: Any, seconds: float = ray_timeouts.CALL_S) -> Any:
        try:
            return ray_timeouts.get(request, seconds=seconds)
        except (RayError, TimeoutError) as error:
            reason = ray_timeouts.cause(error)
            if isinstance(reason, ConfigError):
                raise ConfigError(f"node {hosts[node]}: {reason}") from error
            raise RuntimeError(
                f"node {hosts[node]} does not report its download of {path} "
                f"({' '.join(str(reason).split())[:300]}). Check the node, or put the model on "
                "shared storage (HF_HOME, or model.path: a folder there)"
            ) from error

    try:
        for node in hosts:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            # One thread reports while another fetches.
            options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_concurrency": 2}
            actors[node] = ray_timeouts.create(Downloader, "download", options, path)
        requests = {node: ray_timeouts.call(actor.size) for node, actor in actors.items()}
        sizes = {node: answer(node, request, timeout_s) for node, request in requests.items()}
        pending = {ray_timeouts.call(actors[n].fetch): n for n, size in sizes.items() if size}
        if not pending:
            return
        changed_at = time.monotonic()
        title = f"downloading {path} on {len(pending)} other node(s)"
        with waiting(title, total=sum(sizes.values()), unit="bytes") as wait:
            while pending:
                done, _ = ray_timeouts.wait([*pending], seconds=_POLL_S)
                for request in done:
                    answer(pending.pop(request), request)
                calls = {node: ray_timeouts.call(actors[node].present) for node in sizes}
                present = sum(answer(node, call) for node, call in calls.items())
                if present > wait.done:
                    wait.done, changed_at = present, time.monotonic()
                if time.monotonic() - changed_at > _STALL_TIMEOUT_S:
                    names = ", ".join(hosts[node] for node in pending.values())
                    raise RuntimeError(
                        f"the download of {path} stalled for {_STALL_TIMEOUT_S:.0f} s on {names}. "
                        "Rerun the command to resume it"
                    )
    finally:
        for actor in actors.values():
            ray_timeouts.kill(actor)
