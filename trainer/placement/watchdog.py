"""Watches the processes of a run from a background thread, and has hung processes killed and
replaced.

If the cluster was started here, the thread itself polls the processes. In a cluster that was
joined, an actor on each node polls them.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

from keel.model import ray_timeouts
from keel.trainer.placement.hang_detector import POLL_S, RAY_PROCESSES, HangDetector, NodeHealth
from keel.trainer.placement.hardware import RANK
from keel.trainer.placement.node_monitor import ANSWER_S, ClusterMonitor
from keel.trainer.placement.ray_internals import own_processes
from keel.trainer.run.restarts import WorkerLost


class Watchdog:
    """Checks every second that the processes of a run are healthy."""

    def __init__(
        self, poll: Callable[[], NodeHealth], say: Callable[[str], Any], *processes: int
    ) -> None:
        """Start the thread.

        `processes` contains the ids of local processes. If one of them exits, the watchdog polls at
        once.
        """
        self.say = say
        """Called from the watchdog's thread with each warning."""
        self.nodes: Set[str] = frozenset()
        """Ids of the nodes on which the run has reserved GPUs. The run cannot continue without
        them."""
        self._poll, self._failure, self._failed = poll, "", False
        self._ranks: set[str] = set()
        self._stopping = os.eventfd(0)
        self._files = [self._stopping, *map(os.pidfd_open, processes)]
        self._thread = threading.Thread(target=self._run, name="keel-watchdog", daemon=True)
        self._thread.start()

    def should_stop_waiting(self) -> bool:
        """Return False if the run is healthy. Raises the same errors as `check` otherwise."""
        self.check()
        return False

    def check(self) -> None:
        """Check that the run is healthy.

        Raises `RayLost` if Ray is unusable, and `WorkerLost` if a trainer rank or a needed node is
        lost.
        """
        if reason := ray_timeouts.lost_reason():
            raise ray_timeouts.RayLost(reason)
        if self._failure:
            raise WorkerLost(self._failure)

    def stop(self) -> None:
        os.eventfd_write(self._stopping, 1)
        self._thread.join(2 * ANSWER_S)
        while not self._thread.is_alive() and self._files:
            os.close(self._files.pop())

    def _run(self) -> None:
        files = list(self._files)
        while self._stopping not in (ready := select.select(files, [], [], POLL_S)[0]):
            files = [process for process in files if process not in ready]  # they have exited
            try:
                health = self._poll()
                self._record(health)
                if health.ray_failure:
                    return
            except ray_timeouts.RayLost:  # found and reported by another thread
                return
            except Exception as error:  # the next poll may succeed
                if not self._failed:
                    self._failed = True
                    with suppress(Exception):  # `say` may be what failed
                        self.say(
                            f"looking for hung processes failed ({type(error).__name__}: {error}). "
                            "It will be retried; further failures are not reported"
                        )

    def _record(self, health: NodeHealth) -> None:
        if health.ray_failure:
            ray_timeouts.mark_lost(f"{health.ray_failure}. The run cannot continue without it")
        ranks = {name for name in health.actors if name.startswith(RANK)}
        failures = [f"{rank} is gone" for rank in sorted(self._ranks - ranks)]
        failures += [
            f"node {health.dead_nodes[node]} is gone, and the run's GPUs on it"
            for node in health.dead_nodes.keys() & self.nodes
        ]
        self._failure = self._failure or next(iter(failures), "")
        self._ranks |= ranks
        for message in health.messages:
            self.say(message)


@contextmanager
def start_watchdog(
    say: Callable[[str], Any], hang_timeout_s: float, nodes: Set[str] = frozenset()
) -> Iterator[Watchdog]:
    """Watch the run's processes during a `with` block. `nodes` is described at `Watchdog.nodes`."""
    local = own_processes()
    if local:
        (raylet,) = local["raylet"]
        processes = {name: local[kind][0] for kind, name in RAY_PROCESSES.items() if kind in local}
        detector = HangDetector(
            raylet, processes, start=ray_timeouts.start(), hang_timeout_s=hang_timeout_s
        )
        watchdog = Watchdog(detector.poll, say, *processes.values())
    else:
        watchdog = Watchdog(ClusterMonitor(hang_timeout_s).poll, say)
    watchdog.nodes = nodes
    try:
        yield watchdog
    finally:
        watchdog.stop()
