"""Downloads a hub model to the other nodes of a cluster, so that the download does not use up the
start timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.configs.schema import ConfigError
from keel.model import ray_timeouts
from keel.model.download import Download, download_of
from keel.model.hub import is_hub_name
from keel.trainer.run.progress import waiting

_POLL_S = 1.0
STALL_TIMEOUT_S = 600.0
"""Give up if no node has received a byte for this long. The hub's client retries on its own."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Progress of the download on one node."""

    present: int
    """Bytes that are in the node's cache."""
    done: bool
    error: str = ""


class Downloader:
    """Ray actor that downloads a model into the cache of its node."""

    def __init__(self) -> None:
        self._download: Download | None = None
        self._thread: threading.Thread | None = None
        self._error = ""

    def begin(self, path: str) -> tuple[int, int]:
        """Start the download. Returns the total number of bytes and how many are present, or zeros
        if there is nothing to do."""
        self._download = download_of(path)
        if self._download is None:
            return 0, 0
        present = self._download.present()
        self._thread = threading.Thread(target=self._fetch, args=(self._download,), daemon=True)
        self._thread.start()
        return self._download.total, present

    def progress(self) -> DownloadProgress:
        if self._download is None or self._thread is None:
            return DownloadProgress(0, done=True)
        done = not self._thread.is_alive()
        return DownloadProgress(self._download.present(), done=done, error=self._error)

    def _fetch(self, download: Download) -> None:
        try:
            download.fetch()
        except Exception as error:  # raised by the driver with the node's name
            self._error = str(error)


def download_on_nodes(path: str, *, timeout_s: float, nodes: Collection[str] = ()) -> None:
    """Download the hub model `path` on every node except this one.

    `nodes` has the Ray ids of the nodes that need it; empty means all of them. `timeout_s` limits
    how long a node may take to report the size. Raises ConfigError if a download fails, and
    RuntimeError if a node does not answer or all downloads stall.
    """
    if not is_hub_name(path) or Path(path).exists():
        return
    hosts = _other_nodes(nodes)
    downloaders = {node: _create_downloader(node) for node in hosts}

    def answers(requests: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for node, request in requests.items():
            try:
                results[node] = ray_timeouts.get(request, seconds=seconds)
            except (RayError, TimeoutError) as error:
                raise RuntimeError(
                    f"node {hosts[node]} does not report its download of {path} "
                    f"({' '.join(str(error).split())[:300]}). Check the node, or put the model on "
                    "shared storage (HF_HOME, or model.path: a folder there)"
                ) from error
        return results

    try:
        begun = {node: ray_timeouts.call(each.begin, path) for node, each in downloaders.items()}
        sizes = {node: size for node, size in answers(begun, timeout_s).items() if size[0]}

        def poll() -> dict[str, DownloadProgress]:
            requests = {node: ray_timeouts.call(downloaders[node].progress) for node in sizes}
            return answers(requests, ray_timeouts.CALL_S)

        if sizes:
            follow(path, hosts, sizes, poll)
    finally:
        for downloader in downloaders.values():
            ray_timeouts.kill(downloader)


def follow(
    path: str,
    hosts: Mapping[str, str],
    sizes: Mapping[str, tuple[int, int]],
    poll: Callable[[], Mapping[str, DownloadProgress]],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Show the progress of all downloads until they are done.

    `hosts` maps each node to its host, and `sizes` to its total bytes and those present at the
    start.
    """
    total, present = (sum(column) for column in zip(*sizes.values(), strict=True))
    nodes = f"{len(sizes)} other node{'s' * (len(sizes) != 1)}"
    with waiting(f"downloading {path} on {nodes}", total=total, unit="bytes") as wait:
        wait.before = wait.done = present
        changed_at = clock()
        while True:
            progress = poll()
            for node, each in progress.items():
                if each.error:
                    raise ConfigError(f"node {hosts[node]}: {each.error}")
            pending = [hosts[node] for node, each in progress.items() if not each.done]
            before, wait.done = wait.done, sum(each.present for each in progress.values())
            wait.note = ", ".join(pending[:3]) + " …" * (len(pending) > 3)
            changed_at = clock() if wait.done > before else changed_at
            if not pending:
                return
            if clock() - changed_at > STALL_TIMEOUT_S:
                raise RuntimeError(
                    f"the download of {path} stalled for {STALL_TIMEOUT_S:.0f} s on "
                    f"{', '.join(pending)}. Rerun the command to resume it"
                )
            pause(_POLL_S)


def _other_nodes(nodes: Collection[str]) -> dict[str, str]:
    """Map the Ray id of each living node, except this one, to its host."""
    here = ray.get_runtime_context().get_node_id()
    alive = ray_timeouts.bounded(ray.nodes, ray_timeouts.CALL_S, "list its nodes")
    return {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in alive
        if node["Alive"] and node["NodeID"] != here and (not nodes or node["NodeID"] in nodes)
    }


def _create_downloader(node: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy}
    return ray_timeouts.create(Downloader, "download", options)
