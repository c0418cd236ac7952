"""Watches over the processes of a run: one that stands still is ended, so that whoever needs it
finds it dead, and goes on as for any that has died.

On a cluster that this process has started it looks for itself; on one that it has joined, each node
has an actor that does.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.model import ray_calls
from keel.trainer.cluster.looks import LOOK_S, RAYLET, RAYS, Looker, Sight
from keel.trainer.cluster.ray_internals import own_processes
from keel.trainer.run.restarts import Lost

RANK = "trainer rank"
"""How the names of those begin without which a step cannot end."""
ANSWER_S = 5.0
"""Longest wait for the nodes of a cluster to say what they see."""
SILENT = 4
"""Times that a node does not answer in a row before that is said."""
NODES_EVERY = 10
"""Looks between two questions to Ray which nodes it takes for dead."""
STOP_S = 2 * ANSWER_S


class Lookout:
    """A node's own `Looker`: a Ray actor."""

    def __init__(self) -> None:
        self._looker = Looker(os.getppid(), {RAYLET: os.getppid()})

    def look(self) -> Sight:
        return self._looker.look()


class Watch:
    """What the processes of a run are at, from a thread that looks every second."""

    def __init__(self, look: Callable[[], Sight], say: Callable[[str], Any], *needed: int) -> None:
        """look: at all nodes; needed: processes here at whose end it looks at once."""
        self.say = say
        """Told, on the thread, of what was ended."""
        self._look, self._failure = look, ""
        self._ranks: set[str] = set()
        """That have been seen."""
        self._stopping = os.eventfd(0)
        self._wake = [self._stopping, *map(os.pidfd_open, needed)]
        self._thread = threading.Thread(target=self._run, name="keel-watch", daemon=True)
        self._thread.start()

    def well(self) -> bool:
        """`check`, for those who ask whether to stop waiting."""
        self.check()
        return False

    def check(self) -> None:
        """Raises `RayLost` where one of Ray's own processes is gone or stands still, and `Lost`
        where a trainer rank is, or a node."""
        if ray_calls.lost():
            raise ray_calls.RayLost(ray_calls.lost())
        if self._failure:
            raise Lost(self._failure)

    def stop(self) -> None:
        """What ends from now on is meant to."""
        os.eventfd_write(self._stopping, 1)
        self._thread.join(STOP_S)
        while not self._thread.is_alive() and self._wake:
            os.close(self._wake.pop())

    def _run(self) -> None:
        try:
            while self._stopping not in select.select(self._wake, [], [], LOOK_S)[0]:
                if not self._note(self._look()):
                    return
        except ray_calls.RayLost:  # which somebody else has found, and says
            return

    def _note(self, sight: Sight) -> bool:
        """Whether to look again."""
        for line in sight.ended:
            self.say(line)
        if sight.lost:
            ray_calls.lose(f"{sight.lost}. Nothing on Ray goes on without it")
            return False
        ranks = {name for name in sight.here if name.startswith(RANK)}
        if gone := sorted(self._ranks - ranks):
            self._failure = self._failure or f"{gone[0]} is gone"
        self._ranks |= ranks
        return True


@dataclass(slots=True)
class _Node:
    host: str
    actor: Any
    last: Sight
    silent: int = 0


class Lookouts:
    """All nodes of a cluster that this process has joined, at one look."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._looks = 0
        self._alive = self._hosts()
        for node, host in self._alive.items():
            self._nodes[node] = _Node(host, _lookout(node), Sight(here={}, host=host))

    def look(self) -> Sight:
        asked = {node: there.actor.look.remote() for node, there in self._nodes.items()}
        end = time.monotonic() + ANSWER_S
        here: dict[str, int] = {}
        ended: list[str] = []
        for node, answer in asked.items():
            there = self._nodes[node]
            try:
                there.last = ray_calls.get(answer, seconds=max(0.1, end - time.monotonic()))
                there.silent = 0
                ended += there.last.ended
                if (
                    there.last.lost
                ):  # Ray tells of it when it has noticed, and of all that was there
                    ended.append(there.last.lost)
            except (RayError, TimeoutError):
                there.silent += 1
                if there.silent == SILENT:
                    names = ", ".join(sorted(there.last.here)) or "nothing of this run"
                    ended.append(f"node {there.host} does not answer; on it: {names}")
            here |= there.last.here
        self._looks += 1
        if self._looks % NODES_EVERY == 0:
            return Sight(here=here, ended=tuple(ended), lost=self._ask_ray(here))
        return Sight(here=here, ended=tuple(ended))

    def _ask_ray(self, here: dict[str, int]) -> str:
        """Forget what was on nodes that Ray takes for dead; why Ray is lost, if it does not say."""
        try:
            alive = self._hosts()
        except TimeoutError as error:
            return str(error)
        for node in self._nodes.keys() - alive.keys():
            for name in self._nodes.pop(node).last.here:
                here.pop(name, None)
        return ""

    def _hosts(self) -> Mapping[str, str]:
        """Nodes that are alive, by id, with their hosts."""
        nodes = ray_calls.bounded(ray.nodes, ray_calls.CALL_S, "list its nodes")
        return {n["NodeID"]: n["NodeManagerHostname"] for n in nodes if n["Alive"]}


def _lookout(node: str) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray_calls.create(
        Lookout, "lookout", {"num_cpus": 0, "scheduling_strategy": where, "max_restarts": -1}
    )


@contextmanager
def watched(say: Callable[[str], Any]) -> Iterator[Watch]:
    """Watch over what runs on Ray, from here on to the end."""
    own = own_processes()
    if own:
        (raylet,) = own["raylet"]
        rays = {words: own[kind][0] for kind, words in RAYS.items() if kind in own}
        watch = Watch(Looker(raylet, rays).look, say, *rays.values())
    else:
        watch = Watch(Lookouts().look, say)
    try:
        yield watch
    finally:
        watch.stop()
