"""Downloads a hub model to the other nodes of a cluster before the engines and ranks start, so that
the download does not count towards the start timeout."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.configs.schema import ConfigError
from keel.model import ray_timeouts
from keel.model.hub import Download, is_hub_name
from keel.trainer.run.progress import waiting

_POLL_S = 1.0


class _Downloader:
    def fetch(self, path: str) -> None:
        if download := Download.of(path):
            download.fetch()


def download_on_nodes(path: str, *, nodes: Collection[str] = ()) -> None:
    """Download the hub model `path` on all nodes except this one. `nodes` lists the Ray ids of the
    nodes that need the model. If it is empty, all nodes do. Raises ConfigError if a download fails,
    and RuntimeError if a node is lost."""
    if not is_hub_name(path) or Path(path).exists():
        return
    here = ray.get_runtime_context().get_node_id()
    alive = ray_timeouts.bounded(ray.nodes, ray_timeouts.CALL_S, "list its nodes")
    hosts = {
        node["NodeID"]: node["NodeManagerHostname"]
        for node in alive
        if node["Alive"] and node["NodeID"] != here and (not nodes or node["NodeID"] in nodes)
    }
    actors, pending = list[Any](), dict[Any, str]()
    try:
        for node, host in hosts.items():
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": strategy}
            actors.append(ray_timeouts.create(_Downloader, "download", options))
            pending[ray_timeouts.call(actors[-1].fetch, path)] = host
        with waiting(f"downloading {path} on {len(hosts)} other node(s)") as wait:
            while pending:
                wait.note = ", ".join([*pending.values()][:3]) + " …" * (len(pending) > 3)
                done, _ = ray_timeouts.wait([*pending], seconds=_POLL_S)
                for request in done:
                    host = pending.pop(request)
                    try:
                        ray_timeouts.get(request, seconds=ray_timeouts.CALL_S)
                    except (RayError, TimeoutError) as error:
                        reason = ray_timeouts.cause(error)
                        kind = ConfigError if isinstance(reason, ConfigError) else RuntimeError
                        text = " ".join(str(reason).split())[:300]
                        raise kind(
                            f"node {host} did not finish its download of {path} ({text}). Check "
                            "the node, or put the model on shared storage (HF_HOME, or model.path: "
                            "a folder there)"
                        ) from error
    finally:
        for actor in actors:
            ray_timeouts.kill(actor)
