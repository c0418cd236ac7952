"""A look at all machines of a cluster that this process has joined: an actor on each of them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from keel.model import ray_timeouts
from keel.trainer.placement.hang_detector import RAYLET, HangDetector, NodeHealth
from keel.trainer.placement.ray_internals import exit_now

NAME = "lookout"
ANSWER_S = 5.0
"""Longest wait for the nodes of a cluster to say what they see."""
SILENT_S = 15.0
"""A node that has not answered for so long is spoken of: up to two looks later, when the silent one
has kept others waiting."""
CUT_OFF_S = 90.0
"""A node that has not reached Ray's control service (GCS) for so long ends what the run has there:
Ray has given it up after 65 s, and what ran there is running elsewhere, or is to."""
TRY_S = 5.0
"""Between two tries to reach it, and for one."""
GCS = "Ray's control service (GCS), on the cluster's first node,"
GCS_SAID_S, GCS_S, SOON_S = 15.0, 40.0, 1.0
"""A question that it has not answered for so long is spoken of; it is given up after so long, while
this process can still say so, which Ray ends after 60 s; and how long a look waits for it."""
NODES_S = 5.0
"""Between two questions to Ray which nodes it takes for dead."""


class NodeMonitor:
    """A node's own `Looker`: a Ray actor. It ends with all of the run there once the node is cut
    off: Ray leaves alone what runs on a node whose network is gone, with all its memory."""

    def __init__(self, start: str, hang_timeout_s: float) -> None:
        raylet = os.getppid()
        self._looker = HangDetector(
            raylet, {RAYLET: raylet}, start=start, hang_timeout_s=hang_timeout_s
        )
        if hang_timeout_s:
            address: str = ray.get_runtime_context().gcs_address
            away = PartitionTimer(lambda: reached(address))
            threading.Thread(target=self._leave, args=(away,), daemon=True).start()

    def look(self) -> NodeHealth:
        return self._looker.look()

    def _leave(self, away: PartitionTimer) -> None:
        while not away.cut_off():
            time.sleep(TRY_S)
        self._looker.end_all()
        exit_now(1)


class PartitionTimer:
    """For how long a node has not reached Ray's control service."""

    def __init__(
        self, reaches: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reaches, self._turns, self._lost_s = (
            reaches,
            ray_timeouts.PollClock(2 * TRY_S, clock),
            0.0,
        )

    def cut_off(self) -> bool:
        """To be called every few seconds."""
        reached, passed = self._reaches(), self._turns.elapsed()
        self._lost_s = 0.0 if reached else self._lost_s + passed
        return self._lost_s >= CUT_OFF_S


def reached(address: str) -> bool:
    """Whether somebody listens at `host:port`, `[host]:port` included."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TRY_S).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Node:
    host: str
    actor: Any
    last: NodeHealth
    asked: Any = None
    """What it has not answered yet."""
    silent_s: float = 0.0
    lost: str = ""
    """What of Ray's own it has lost, as was said."""

    def answers(self, seconds: float) -> str:
        """Wait for the look that it was asked for, which is `last` then; why there is none. It is
        asked nothing more until it has answered: no look is lost, and a slow node does not get them
        all at once."""
        try:
            self.last = ray_timeouts.get(self.asked, seconds=seconds)
        except TimeoutError:
            return "no answer"
        except RayError as error:  # Ray starts the actor again
            self.asked = None
            said = ray_timeouts.death_reason(error).strip() or type(error).__name__
            return said.splitlines()[-1]
        self.asked = None
        return ""


class Question:
    """Which nodes are there, asked of Ray's control service (GCS) on a thread that may never come
    back."""

    def __init__(self, ask: Callable[[], Mapping[str, str]]) -> None:
        self.silent_s, self.said = 0.0, False
        self._answer: Future[Mapping[str, str]] = Future()
        threading.Thread(target=self._run, args=(ask,), name="keel-nodes", daemon=True).start()

    def answer(self, passed: float) -> tuple[Mapping[str, str] | None, str]:
        """What it was, or None and, once it is late, how. passed: seconds since the last look;
        raises what Ray has raised."""
        wait([self._answer], SOON_S)
        if self._answer.done():
            return self._answer.result(), ""
        self.silent_s += passed
        late = self.silent_s >= GCS_SAID_S
        return None, f"has not answered for {self.silent_s:.0f} s" if late else ""

    def _run(self, ask: Callable[[], Mapping[str, str]]) -> None:
        try:
            self._answer.set_result(ask())
        except Exception as error:  # whoever looks raises it
            self._answer.set_exception(error)


class ClusterMonitor:
    """What is seen on all nodes together."""

    def __init__(self, hang_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """hang_timeout_s: the knob of `run`."""
        self._nodes: dict[str, _Node] = {}
        self._dead: dict[str, str] = {}
        self._question: Question | None = None
        self._unasked_s, self._turns = 0.0, ray_timeouts.PollClock(ANSWER_S, clock)
        self._hang_timeout_s = hang_timeout_s
        self._place(self._hosts())

    def look(self) -> NodeHealth:
        passed, end = self._turns.elapsed(), time.monotonic() + ANSWER_S
        for there in self._nodes.values():
            there.asked = there.asked or there.actor.look.remote()
        here: dict[str, int] = {}
        said: list[str] = []
        for there in self._nodes.values():
            said += _heard(there, there.answers(max(0.1, end - time.monotonic())), passed)
            here |= there.last.here
        self._unasked_s += passed
        if self._question is None and self._unasked_s >= NODES_S:
            self._question, passed, self._unasked_s = Question(self._hosts), 0.0, 0.0
        lost = self._ask_ray(here, passed, said) if self._question else ""
        return NodeHealth(here=here, said=tuple(said), lost=lost, dead=dict(self._dead))

    def _ask_ray(self, here: dict[str, int], passed: float, said: list[str]) -> str:
        """Forget what was on nodes that Ray takes for dead, and look at new ones, too; why Ray is
        lost, if it does not say."""
        assert self._question is not None
        try:
            alive, silence = self._question.answer(passed)
        except TimeoutError as error:
            return str(error)
        if alive is None:
            if self._question.silent_s >= GCS_S:
                return f"{GCS} {silence}"
            if silence and not self._question.said:
                self._question.said = True
                said.append(f"{GCS} {silence}. After {GCS_S:g} s the run ends")
            return ""
        self._question = None
        for node in self._nodes.keys() - alive.keys():
            gone = self._nodes.pop(node)
            self._dead[node] = gone.host
            for name in gone.last.here:
                here.pop(name, None)
        self._place(alive)
        return ""

    def _place(self, nodes: Mapping[str, str]) -> None:
        """Have somebody look at each of them."""
        for node, host in nodes.items():
            if node not in self._nodes:
                actor = _lookout(node, self._hang_timeout_s)
                self._nodes[node] = _Node(host, actor, NodeHealth(here={}, host=host))

    def _hosts(self) -> Mapping[str, str]:
        """Nodes that are alive, by id, with their hosts."""
        nodes = ray_timeouts.bounded(ray.nodes, ray_timeouts.CALL_S, "list its nodes")
        return {n["NodeID"]: n["NodeManagerHostname"] for n in nodes if n["Alive"]}


def _heard(there: _Node, silence: str, passed: float) -> list[str]:
    """What to say of a node. silence: why it has not answered; passed: seconds since the last."""
    if silence:
        before, there.silent_s = there.silent_s, there.silent_s + passed
        if not before < SILENT_S <= there.silent_s:
            return []
        names = ", ".join(sorted(there.last.here.keys() - {NAME})) or "nothing of this run"
        return [
            f"node {there.host} does not answer ({silence}); on it: {names}. Ray gives a node up "
            "after about 65 s; what was on it starts again elsewhere then"
        ]
    there.silent_s = 0.0
    said = list(there.last.said)
    if there.last.lost and not there.lost:  # Ray gives the node up, in time
        said.append(there.last.lost)
    there.lost = there.last.lost
    return said


def _lookout(node: str, hang_timeout_s: float) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": where, "max_restarts": -1}
    return ray_timeouts.create(NodeMonitor, NAME, options, ray_timeouts.start(), hang_timeout_s)
