"""Test timeouts, long enough that only a hang fails and never a busy machine."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

PATIENCE_S = 300.0
"""Any process may be suspended for half a minute, or run ten times slower."""
LIMITS_S = (0.3, 5.0, 60.0)

Found = TypeVar("Found")


def wait_for(
    ready: Callable[[], Found],
    what: str = "an event",
    *,
    within_s: float = PATIENCE_S,
    every_s: float = 0.02,
) -> Found:
    """Poll `ready`, ever more slowly, until it returns a true value, and return that."""
    until, pause_s = time.monotonic() + within_s, 0.001
    while not (value := ready()):
        if time.monotonic() >= until:
            raise TimeoutError(f"waited {within_s:g} s for {what}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, every_s)
    return value


def within_some(play: Callable[[float], Found], limits_s: tuple[float, ...] = LIMITS_S) -> Found:
    """Call `play` with a time limit that part of it is meant to exceed; on a busy machine other
    parts may as well, so failures are retried with longer limits."""
    for limit_s in limits_s[:-1]:
        try:
            return play(limit_s)
        except (Exception, pytest.fail.Exception):
            continue
    return play(limits_s[-1])


def patiently(start: Callable[[], Found], undo: Callable[[], object] = lambda: None) -> Found:
    """Retry a start of Ray that timed out, after `undo`: Ray allows a node 30 s."""
    for remaining in (3, 2, 1, 0):
        try:
            return start()
        except Exception as error:  # Ray raises a plain Exception
            if not remaining or "timed out during startup" not in str(error):
                raise
            undo()
    raise AssertionError


def start_local_ray(**options: Any) -> None:
    """Start a Ray cluster on this machine as runs do, with `options` of `ray.init`."""
    import ray  # noqa: PLC0415  (slow to load)

    from keel.trainer.placement.nodes import QUOTED_PYTHON  # noqa: PLC0415
    from keel.trainer.placement.ray_internals import skip_unused_processes  # noqa: PLC0415

    common = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    with skip_unused_processes():
        patiently(lambda: ray.init(runtime_env=QUOTED_PYTHON, **common, **options), ray.shutdown)


def start_cluster(*nodes: dict[str, Any]) -> Any:
    """Start a `ray.cluster_utils.Cluster` of nodes on this machine, the head first, with these
    options."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  (slow to load)

    from keel.trainer.placement.ray_internals import skip_unused_processes  # noqa: PLC0415

    head, *others = nodes
    head = {"include_dashboard": False, **head}
    with skip_unused_processes():
        cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    for node in others:
        add_node(cluster, **node)
    return cluster


def add_node(cluster: Any, **options: Any) -> Any:
    """Add a node to a cluster of `start_cluster`, wait for it, and return it."""
    from keel.trainer.placement.ray_internals import skip_unused_processes  # noqa: PLC0415

    with skip_unused_processes():
        node = patiently(lambda: cluster.add_node(**options))
    cluster.wait_for_nodes(PATIENCE_S)
    return node
