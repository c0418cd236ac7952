"""Watches over the processes of a run: one that stands still for too long is ended, so that whoever
needs it finds it dead, and goes on as for any that has died.

On a cluster that this process has started it looks for itself; on one that it has joined, each node
has an actor that does.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

from keel.model import ray_timeouts
from keel.trainer.placement.hang_detector import LOOK_S, RAYS, HangDetector, NodeHealth
from keel.trainer.placement.node_monitor import ANSWER_S, ClusterMonitor
from keel.trainer.placement.ray_internals import own_processes
from keel.trainer.run.restarts import WorkerLost

RANK = "trainer rank"
"""How the names of those begin without which a step cannot end."""
STOP_S = 2 * ANSWER_S


class Watchdog:
    """What the processes of a run are at, from a thread that looks every second."""

    def __init__(
        self, look: Callable[[], NodeHealth], say: Callable[[str], Any], *needed: int
    ) -> None:
        """look: at all nodes; needed: processes here at whose end it looks at once."""
        self.say = say
        """Told, on the thread, of what stands still, and of what was ended."""
        self.nodes: Set[str] = frozenset()
        """Ids of those without which it cannot go on as it is: what was reserved there can be had
        on no other."""
        self._look, self._failure, self._failed = look, "", False
        self._ranks: set[str] = set()
        """That have been seen."""
        self._stopping = os.eventfd(0)
        self._open = [self._stopping, *map(os.pidfd_open, needed)]
        self._thread = threading.Thread(target=self._run, name="keel-watch", daemon=True)
        self._thread.start()

    def well(self) -> bool:
        """`check`, for those who ask whether to stop waiting."""
        self.check()
        return False

    def check(self) -> None:
        """Raise `RayLost` if a Ray process died or hangs, `WorkerLost` if a rank or node did."""
        if ray_timeouts.lost_reason():
            raise ray_timeouts.RayLost(ray_timeouts.lost_reason())
        if self._failure:
            raise WorkerLost(self._failure)

    def stop(self) -> None:
        """What ends from now on is meant to."""
        os.eventfd_write(self._stopping, 1)
        self._thread.join(STOP_S)
        while not self._thread.is_alive() and self._open:
            os.close(self._open.pop())

    def _run(self) -> None:
        waking = list(self._open)
        while self._stopping not in (woken := select.select(waking, [], [], LOOK_S)[0]):
            waking = [process for process in waking if process not in woken]  # they have ended
            try:
                if not self._note(self._look()):
                    return
            except ray_timeouts.RayLost:  # which somebody else has found, and says
                return
            except Exception as error:  # whatever it is, the next look may be better
                self._fail(error)

    def _note(self, sight: NodeHealth) -> bool:
        """Whether to look again."""
        if sight.lost:
            ray_timeouts.mark_lost(f"{sight.lost}. Nothing on Ray goes on without it")
        ranks = {name for name in sight.here if name.startswith(RANK)}
        if gone := sorted(self._ranks - ranks):
            self._failure = self._failure or f"{gone[0]} is gone"
        self._ranks |= ranks
        for node in sight.dead.keys() & self.nodes:
            self._failure = self._failure or (
                f"node {sight.dead[node]} is gone, and the GPUs with it that the run had there"
            )
        for line in sight.said:
            self.say(line)
        return not sight.lost

    def _fail(self, error: Exception) -> None:
        """Say so, once."""
        if not self._failed:
            self._failed = True
            with suppress(Exception):  # it may be what has failed
                self.say(
                    f"looking for frozen processes failed ({type(error).__name__}: {error}). It "
                    "goes on, and no more is said where it fails again"
                )


@contextmanager
def start_watchdog(
    say: Callable[[str], Any], hang_timeout_s: float, nodes: Set[str] = frozenset()
) -> Iterator[Watchdog]:
    """Watch over what runs on Ray, from here on to the end. hang_timeout_s: the knob of `run`;
    nodes: as `Watch.nodes`."""
    own = own_processes()
    if own:
        (raylet,) = own["raylet"]
        rays = {words: own[kind][0] for kind, words in RAYS.items() if kind in own}
        start = ray_timeouts.start()
        looker = HangDetector(raylet, rays, start=start, hang_timeout_s=hang_timeout_s)
        watch = Watchdog(looker.look, say, *rays.values())
    else:
        watch = Watchdog(ClusterMonitor(hang_timeout_s).look, say)
    watch.nodes = nodes
    try:
        yield watch
    finally:
        watch.stop()
