"""A hub's model on the further nodes of a cluster: each fetches it into its own cache, before
engines and ranks start there, whose deadline it would take."""

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

NAME = "download"
LOOK_S = 1.0
STALLED_S = 600.0
"""Given up once no byte came on any node for so long: the hub's client itself tries again."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one node."""

    present: int
    """Bytes that are there."""
    over: bool
    fault: str = ""


class Fetcher:
    """A node's own download: a Ray actor."""

    def __init__(self) -> None:
        self._download: Download | None = None
        self._fetching: threading.Thread | None = None
        self._fault = ""

    def begin(self, path: str) -> tuple[int, int]:
        """Bytes of all, and those that are there; 0 and 0 where there is nothing to fetch."""
        self._download = download_of(path)
        if self._download is None:
            return 0, 0
        present = self._download.present()
        self._fetching = threading.Thread(target=self._fetch, args=(self._download,), daemon=True)
        self._fetching.start()
        return self._download.total, present

    def progress(self) -> Progress:
        if self._download is None or self._fetching is None:
            return Progress(0, over=True)
        over = not self._fetching.is_alive()
        return Progress(self._download.present(), over=over, fault=self._fault)

    def _fetch(self, download: Download) -> None:
        try:
            download.fetch()
        except Exception as error:  # whatever it is, the driver says it, with the node
            self._fault = str(error)


def download_on_nodes(path: str, *, timeout_s: float, nodes: Collection[str] = ()) -> None:
    """The model `path` of the hub onto all nodes but this one. nodes: Ray's ids of those that want
    it; none: all. timeout_s: until each says how much there is to fetch.

    Raises ConfigError naming the node whose download broke off, and RuntimeError where one does not
    answer or nothing comes any more.
    """
    if not is_hub_name(path) or Path(path).exists():
        return
    hosts = others(nodes)
    if not hosts:
        return
    fetchers = {node: _fetcher(node) for node in hosts}

    def answer(node: str, asked: Any, seconds: float) -> Any:
        try:
            return ray_timeouts.get(asked, seconds=seconds)
        except (RayError, TimeoutError) as error:
            raise RuntimeError(
                f"node {hosts[node]} does not say how far its download of {path} is "
                f"({' '.join(str(error).split())[:300]}). Look at the node, or put the model on "
                "storage that all nodes share (HF_HOME, or model.path a folder there)"
            ) from error

    try:
        asked = {node: ray_timeouts.call(each.begin, path) for node, each in fetchers.items()}
        sizes = {node: answer(node, ref, timeout_s) for node, ref in asked.items()}
        wanted = {node: size for node, size in sizes.items() if size[0]}

        def look() -> dict[str, Progress]:
            asked = {node: ray_timeouts.call(fetchers[node].progress) for node in wanted}
            return {node: answer(node, ref, ray_timeouts.CALL_S) for node, ref in asked.items()}

        if wanted:
            follow(path, hosts, wanted, look)
    finally:
        for fetcher in fetchers.values():
            ray_timeouts.kill(fetcher)


def follow(
    path: str,
    hosts: Mapping[str, str],
    sizes: Mapping[str, tuple[int, int]],
    look: Callable[[], Mapping[str, Progress]],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Wait for all of them, and show how far they are. hosts: node → its host; sizes: node → bytes
    of all, and those that were there. Raises as `fetch_on_others`."""
    total, before = (sum(column) for column in zip(*sizes.values(), strict=True))
    where = f"{len(sizes)} further node{'s' * (len(sizes) != 1)}"
    with waiting(f"downloading {path} on {where}", total=total, unit="bytes") as wait:
        wait.before = wait.done = before
        moved = clock()
        while True:
            seen = look()
            for node, progress in seen.items():
                if progress.fault:
                    raise ConfigError(f"node {hosts[node]}: {progress.fault}")
            late = [hosts[node] for node, progress in seen.items() if not progress.over]
            before, wait.done = wait.done, sum(progress.present for progress in seen.values())
            wait.note = ", ".join(late[:3]) + " …" * (len(late) > 3)
            moved = clock() if wait.done > before else moved
            if not late:
                return
            if clock() - moved > STALLED_S:
                raise RuntimeError(
                    f"nothing came of {path} for {STALLED_S:.0f} s on {', '.join(late)}. "
                    "Start it again, and it goes on from there"
                )
            pause(LOOK_S)


def others(nodes: Collection[str]) -> dict[str, str]:
    """Nodes that are alive, by Ray's id, with their hosts, but for the one that this is."""
    own = ray.get_runtime_context().get_node_id()
    alive = ray_timeouts.bounded(ray.nodes, ray_timeouts.CALL_S, "list its nodes")
    return {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in alive
        if node["Alive"] and node["NodeID"] != own and (not nodes or node["NodeID"] in nodes)
    }


def _fetcher(node: str) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray_timeouts.create(Fetcher, NAME, {"num_cpus": 0, "scheduling_strategy": where})
