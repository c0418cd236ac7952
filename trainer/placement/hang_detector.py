"""What stands still of a run on a machine: said soon, and ended when that goes on.

A process that is busy for long is not frozen: the kernel counts how often its threads were given a
processor. One that was stopped (SIGSTOP) says so, and of one that its machine does not run any more
(a hanging driver, a frozen container) no thread gets on. One in a debugger is meant to stand still.

Seconds are those between looks, and few of them (`PollClock`): whoever looks may have been stopped,
too, together with all the rest, and have gone on with it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from keel.model.ray_timeouts import NAME, PollClock, process_name
from keel.trainer.placement.processes import (
    GONE,
    Thread,
    below,
    children,
    end,
    gone_by,
    has_exited,
    thread,
    threads,
)

RAYLET = "Ray's node process (raylet)"
RAYS = {"raylet": RAYLET, "gcs_server": "Ray's control service (GCS)"}
"""Ray's processes without which nothing goes on, by Ray's name for them."""
LOOK_S = 1.0
"""Between two looks."""
SAID_S = 20.0
"""What has stood still for so long is spoken of."""
STILL_S = 60.0
"""What was not stopped, but is not given a processor, has at least so long: on a machine with too
much to do it may get its turn yet. Ray's processes wake up a hundred times a second."""
RAYS_S = 60.0
"""What Ray's own have at most. Ray gives up a raylet that has not answered for 65 s, and all on its
node with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """What a look has found."""

    here: Mapping[str, int]
    """Each actor of the run by its name, with its process."""
    host: str = ""
    said: tuple[str, ...] = ()
    """What stands still, once, and what was ended for it, in words."""
    lost: str = ""
    """What of Ray's own is gone or has stood still for too long, in words."""
    dead: Mapping[str, str] = field(default_factory=dict[str, str])
    """Nodes that Ray has given up, by id, with their hosts."""


@dataclass(slots=True)
class ProcessHealth:
    """A process, as looks have found it."""

    process: psutil.Process
    name: str = ""
    """Of an actor of the run."""
    stopped: float = 0.0
    """Seconds for which every look has found it so."""
    still: float = 0.0
    """Seconds for which no look has found that it got on."""
    said: bool = False
    below: dict[int, ProcessHealth] = field(default_factory=dict[int, "ProcessHealth"])
    """What it has started, by number."""
    _threads: dict[int, Thread] = field(default_factory=dict[int, Thread])
    _awake: int = 0
    """A thread that got on when all were looked at, and probably does again."""

    def look(self, passed: float, *, wakes: bool = True) -> None:
        """passed: seconds since the look before. wakes: whether it has threads that never rest.
        Raises one of `GONE`."""
        first = thread(self.process.pid, self.process.pid)
        self.stopped = self.stopped + passed if first.stopped and not first.debugged else 0.0
        moved = not wakes or first.debugged or not first.switches or self._moved()
        self.still = 0.0 if moved else self.still + passed

    def how(self, most: float) -> tuple[str, float, float]:
        """How it stands still ("": it does not), for how many seconds, and how many it may."""
        if self.stopped:
            return "has been stopped (SIGSTOP)", self.stopped, most
        return "has not run at all" if self.still else "", self.still, most and max(most, STILL_S)

    def _moved(self) -> bool:
        """Whether a thread has got on since the last look, as far as is known."""
        if before := self._threads.get(self._awake):
            with suppress(*GONE):  # one file, not those of hundreds of threads
                now = self._threads[self._awake] = thread(self.process.pid, self._awake)
                if now != before:
                    return True
        known, self._threads = self._threads, threads(self.process.pid)
        moved = [n for n, now in self._threads.items() if now.debugged or now != known.get(n)]
        self._awake = moved[0] if moved else self._awake
        return bool(moved)


class HangDetector:
    """Looks at the actors that a raylet has started, with all below them, and at Ray's own
    processes."""

    def __init__(
        self,
        raylet: int,
        rays: Mapping[str, int],
        *,
        start: str,
        hang_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rays: those of Ray's own without which nothing goes on, by what to call them. start:
        whose actors these are (`keel.model.ray_timeouts.start`). hang_timeout_s: the knob of
        `run`."""
        self._raylet, self._start, self._most = raylet, start, hang_timeout_s
        self._rays = {name: ProcessHealth(psutil.Process(pid)) for name, pid in rays.items()}
        self._children: dict[int, ProcessHealth] = {}
        self._turns = PollClock(LOOK_S, clock)
        self._host = socket.gethostname()

    def look(self) -> NodeHealth:
        """Ends what of the run has stood still for too long."""
        passed = self._turns.elapsed()
        said: list[str] = []
        lost = [self._look_at_ray(name, seen, passed, said) for name, seen in self._rays.items()]
        self._children = living(self._children, children(self._raylet))
        here: dict[str, int] = {}
        for pid, seen in self._children.items():
            seen.name = seen.name or process_name(_mark(seen.process), self._start)
            if seen.name:
                here[seen.name] = pid
                self._look_at(seen, passed, said)
        why = next(filter(None, lost), "")
        if why and gone_by(self._raylet):
            self.end_all()
        return NodeHealth(host=self._host, here=here, said=tuple(said), lost=why)

    def end_all(self) -> None:
        """Every actor of the run here, with all below them, but for this process; those whose
        raylet is gone, too, which a frozen one would outlive."""
        self._children = living(self._children, children(self._raylet))
        own = [pid for pid, seen in self._children.items() if self._is_actor(seen)]
        trees = [[pid, *below(pid)] for pid in own if pid != os.getpid()]
        end(list(_there(pid for tree in trees for pid in tree)))

    def _is_actor(self, seen: ProcessHealth) -> bool:
        return bool(seen.name or process_name(_mark(seen.process), self._start))

    def _look_at_ray(self, name: str, seen: ProcessHealth, passed: float, said: list[str]) -> str:
        """Why nothing goes on without it; "" while it does."""
        who = f"{name} (process {seen.process.pid} on {self._host})"
        with suppress(*GONE):
            if not has_exited(seen.process):
                seen.look(passed)
                most = min(self._most, RAYS_S)
                return self._too_long(seen, who, most, "it is given up", said)
        return f"{who} is gone"

    def _look_at(self, actor: ProcessHealth, passed: float, said: list[str]) -> None:
        """It stands still, too, where a process does that it has started and waits for."""
        actor.below = living(actor.below, below(actor.process.pid))
        who = f"{actor.name} (process {actor.process.pid} on {self._host})"
        tree, frozen = [actor, *actor.below.values()], ""
        for seen in tree:
            whose = "" if seen is actor else f" waits for its process {seen.process.pid}, which"
            with suppress(*GONE):
                seen.look(passed, wakes=seen is actor)
                if seen.stopped and not self._ours(seen):
                    seen.stopped = 0.0
                frozen = frozen or self._too_long(
                    seen, who + whose, self._most, "it is ended", said
                )
        if frozen:
            said.append(f"{frozen}, and was ended{end([seen.process for seen in tree])}")
            for seen in tree:  # what is not gone is tried again, in time
                seen.stopped = seen.still = 0.0

    def _too_long(
        self, seen: ProcessHealth, who: str, most: float, then: str, said: list[str]
    ) -> str:
        """How it has stood still for too long, in words. What has not yet is spoken of once, with
        what comes `then`."""
        how, seconds, most = seen.how(most)
        words = f"{who} {how} for {seconds:.0f} s"
        if most and seconds >= most:
            return words
        if seconds >= SAID_S and not seen.said:
            what = f"After {most:g} s {then}" if most else "It is left alone"
            said.append(f"{words}. {what} (run.hang_timeout_s = {self._most:g})")
        seen.said = seconds >= SAID_S
        return ""

    def _ours(self, seen: ProcessHealth) -> bool:
        """What an actor has started may be another run, whose processes have marks of their own."""
        mark = _mark(seen.process)
        return not mark or bool(process_name(mark, self._start))


def living(known: Mapping[int, ProcessHealth], pids: Iterable[int]) -> dict[int, ProcessHealth]:
    """Those of `pids`, and those known that live yet: the kernel may have left them out."""
    found = dict(known)
    for pid in pids:
        if pid not in found:
            with suppress(psutil.NoSuchProcess):
                found[pid] = ProcessHealth(psutil.Process(pid))
    return {pid: seen for pid, seen in found.items() if not has_exited(seen.process)}


def _there(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _mark(process: psutil.Process) -> str:
    """Ray starts a process first, and gives it its environment then."""
    with suppress(psutil.Error, OSError):
        return process.environ().get(NAME, "")
    return ""
