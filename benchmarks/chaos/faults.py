"""The faults: what each does to a run, and what came of it."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.chaos.disk import Disk
from benchmarks.chaos.preload import Preload
from benchmarks.chaos.run import DEADLINE_S, ROLES, Run, words_of
from keel.rollout.pool.lifecycle import MAX_RESTARTS
from keel.trainer.cluster.processes import gone
from keel.trainer.run.interrupt import PREEMPTED

# fmt: off
Action = Literal[
    "kill", "freeze", "moment", "end", "flip", "unwritable",
    "slow", "full", "jump ahead", "jump back", "cut", "cut for long",
]
# fmt: on
Kind = tuple[Action, str]
PROCESSES: tuple[Kind, ...] = (
    *(("kill", role) for role in (*ROLES, "driver")),
    *(("freeze", role) for role in ROLES),
    *(("moment", role) for role in (*ROLES, "driver")),
    ("end", "driver"),
    ("flip", "driver"),
    ("unwritable", "rank"),
)
PRELOADED: tuple[Kind, ...] = (("slow", "disk"), ("jump ahead", "clock"), ("jump back", "clock"))
ON_DISK: tuple[Kind, ...] = (("full", "disk"),)
OF_NODES: tuple[Kind, ...] = (("cut", "node"), ("cut for long", "node"))
EVERY: tuple[Kind, ...] = (*PROCESSES, *PRELOADED, *ON_DISK, *OF_NODES)
RAY: tuple[Kind, ...] = tuple((what, of) for what in ("kill", "freeze") for of in ("raylet", "gcs"))
ENDS: Mapping[Kind, tuple[int | None, ...]] = {
    **dict.fromkeys(RAY, (1,)),
    ("kill", "driver"): (-signal.SIGKILL,),
    ("flip", "driver"): (-signal.SIGKILL,),
    ("end", "driver"): (PREEMPTED,),
    ("full", "disk"): (1, None),
}
"""Exit statuses to which a fault may lead, on one node; None: the run goes on, as under all others
(docs/reliability.md)."""

GONE_S, MOMENT_S, SETTLED_S = 90.0, 8.0, 4.0
"""Longest wait for a run to be gone; longest moment; until all is well."""
DISK_S, CUT_S, LONG_S = 20.0, 40.0, 200.0
"""How long a disk is full or slow; how long a network is cut, at most so that Ray does not give up
the node, and so that it has."""
SLOW_WRITE_S, SLOW_SYNC_S = 0.02, 2.0
JUMP_S = 3600.0


@dataclass(slots=True)
class Fault:
    action: Action
    kind: str
    step: int
    """The last one that was trained before it."""
    lasted_s: float = 0.0
    """Until it was taken back, if it was."""
    said_s: float | None = None
    """Until the run's next line that is no step's; None: it said nothing until it trained."""
    again_s: float | None = None
    """Until a step was trained again."""
    away_s: float | None = None
    """Until nothing of the run was left on a node that was cut off."""
    start: int = 0
    """Of the run, by number: the one that it was done to."""
    statuses: list[int] = field(default_factory=list[int])
    """With which the run ended of it, each time; negative: a signal."""
    gone_s: float | None = None
    """From there until all its processes were gone."""
    left: int = 0
    """Processes that were still there `GONE_S` after the run had ended."""
    flipped: str = ""
    """The file with the flipped bit."""
    named: bool = False
    """Whether the run has said that the checkpoint of `flipped` is damaged."""
    words: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        return f"{self.action} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a run has been given so that faults can be done to it."""

    preload: Preload | None = None
    disk: Disk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    victim: psutil.Process | None = None
    lasts_s: float = 0.0
    undo: Callable[[], None] | None = None
    """What takes it back after `lasts_s`, or when the run has ended of it."""


def kinds(nodes: int, *, preloaded: bool, on_disk: bool) -> tuple[Kind, ...]:
    """Those that are possible on so many nodes, with a `Preload` and a `Disk` or without."""
    more = PRELOADED if preloaded else ()
    more += ON_DISK if on_disk else ()
    # A first node that stands still or is gone is the end of all, and no start brings it back.
    without = {("freeze", "gcs"), ("kill", "gcs"), ("moment", "gcs")} if nodes > 1 else set()
    more += OF_NODES if nodes > 1 else ()
    return tuple(kind for kind in (*PROCESSES, *more) if kind not in without)


def due(fault: Fault, before: Sequence[Fault], nodes: int) -> tuple[int | None, ...]:
    """Exit statuses to which it may lead; None: the run goes on. before: faults."""

    def takes_engines(one: Fault) -> bool:
        away = ("engine", "raylet", "node") if nodes > 1 else ("engine",)
        return one.kind in away and one.action != "moment"

    if takes_engines(fault):  # on two nodes the raylet is the second one's
        lost = sum(one.start == fault.start and takes_engines(one) for one in before)
        return (None, 1) if lost >= MAX_RESTARTS else (None,)
    return ENDS.get((fault.action, fault.kind), (None,))


def chosen(words: Sequence[str], there: Sequence[Kind]) -> list[Kind]:
    """Kinds that an action, what it is done to, or both together name. Raises ValueError for a word
    that names none."""
    if not words:
        return list(there)
    names: dict[Kind, set[str]] = {kind: {kind[0], kind[1], " ".join(kind)} for kind in EVERY}
    for word in words:
        if not any(word in some for some in names.values()):
            known = ", ".join(" ".join(kind) for kind in EVERY)
            raise ValueError(f"--only {word!r}: there are {known}")
    found = [kind for kind in there if names[kind] & set(words)]
    if not found:
        raise ValueError(f"--only {' '.join(words)}: none of them is possible here")
    return found


def strike(run: Run, fault: Fault, draw: random.Random, means: Means) -> Struck | None:
    """None: there is no process of the kind."""
    if fault.kind in ("disk", "clock", "node"):
        return _around(run, fault, draw, means)
    found = run.of(fault.kind)
    if not found:
        return None
    victim = draw.choice(found)
    try:
        if fault.action in ("kill", "flip"):
            victim.kill()
        elif fault.action == "freeze":
            victim.suspend()
        elif fault.action == "moment":
            victim.suspend()
            lasts = draw.uniform(0.5, MOMENT_S)
            return Struck(victim=victim, lasts_s=lasts, undo=victim.resume)
        elif fault.action == "end":
            victim.send_signal(draw.choice([signal.SIGTERM, signal.SIGUSR1]))
        else:  # what it writes past this many bytes fails
            before = victim.rlimit(resource.RLIMIT_FSIZE)
            victim.rlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

            def back() -> None:
                victim.rlimit(resource.RLIMIT_FSIZE, before)

            return Struck(victim=victim, lasts_s=2 * MOMENT_S, undo=back)
    except psutil.NoSuchProcess:
        return None
    return Struck(victim=victim)


def _around(run: Run, fault: Fault, draw: random.Random, means: Means) -> Struck:
    """What is done to what a run stands on."""
    preload, disk, cluster = means.preload, means.disk, run.cluster
    if fault.action == "slow":
        assert preload
        preload.slow(write_s=SLOW_WRITE_S, sync_s=SLOW_SYNC_S)
        return Struck(lasts_s=DISK_S, undo=lambda: preload.slow(write_s=0, sync_s=0))
    if fault.kind == "clock":
        assert preload
        preload.jump(JUMP_S if fault.action == "jump ahead" else -JUMP_S)
        return Struck()
    if fault.action == "full":
        assert disk
        disk.fill()
        return Struck(lasts_s=DISK_S, undo=disk.free)
    assert cluster
    cluster.cut()
    lasts = draw.uniform(1, CUT_S) if fault.action == "cut" else LONG_S
    return Struck(lasts_s=lasts, undo=cluster.mend)


def flip(folder: Path, draw: random.Random) -> str:
    """A bit of the newest checkpoint; the file's name. Nothing (and "") where there is no other:
    the run would have to end."""
    steps = sorted((folder / "checkpoints").glob("step_*"))
    if len(steps) < 2:
        return ""
    path = draw.choice(
        [one for one in sorted(steps[-1].rglob("*")) if one.is_file() and one.stat().st_size]
    )
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return str(path.relative_to(folder))


def named(flipped: str, lines: Sequence[str]) -> bool:
    """Whether the run says there that the checkpoint with this file is damaged."""
    folder = Path(flipped).parts[1] if flipped else ""
    return bool(folder) and any("is damaged" in line and folder in line for line in lines)


def suffer(run: Run, fault: Fault, draw: random.Random, means: Means) -> bool:
    """One fault, until it is over and a step is trained after it, or the run is done. False: there
    is nothing here to do it to."""
    fault.start, since = run.starts, run.position()
    run.fresh()
    began = time.monotonic()
    if (struck := strike(run, fault, draw, means)) is None:
        return False
    undo = struck.undo
    there = run.own_on_second() if fault.kind == "node" else []
    trained: list[float] = []
    """When new steps were seen since the run was last struck or started."""

    def over() -> bool:
        return undo is None and not (
            fault.action == "freeze" and struck.victim and not gone(struck.victim)
        )

    try:
        was_over = over()
        while True:
            if over() and not was_over:  # as where the run goes on until it notices what is frozen
                was_over = True
                trained.clear()
            now = time.monotonic()
            trained += [now] * bool(run.fresh())
            if over() and trained and trained[-1] >= trained[0] + SETTLED_S:
                break
            if fault.said_s is None and run.said(since):
                fault.said_s = now - began
            if there and fault.away_s is None and all(map(gone, there)):
                fault.away_s = now - began
            ended = run.ended()
            if undo and (ended or now - began > struck.lasts_s):
                with suppress(psutil.NoSuchProcess):
                    undo()
                fault.lasted_s, undo = time.monotonic() - began, None
                if fault.kind == "node":
                    trained.clear()
            if ended:
                fault.statuses.append(int(run.process.returncode))
                if fault.statuses[-1] == 0:
                    break
                if fault.action == "flip" and not fault.flipped:
                    fault.flipped = flip(run.folder, draw)
                again(run, fault)
                trained.clear()
            if now - began > DEADLINE_S:
                raise TimeoutError(
                    f"no step in {DEADLINE_S:g} s of {fault}: {run.said(since)[-5:]}"
                )
            if run.cluster and over() and not run.of("raylet"):
                run.cluster.start_second()  # as whoever looks after its machine does
            time.sleep(0.05)
    finally:  # what hangs, or is broken off, is of all things what to keep
        fault.again_s = trained[0] - began if trained else None
        said = run.said(since)
        fault.words += said[:8]
        fault.named = named(fault.flipped, said)
    return True


def again(run: Run, fault: Fault) -> None:
    """Start a run that has ended, once nothing of it is there."""
    began = time.monotonic()
    _, alive = psutil.wait_procs(run.own(), timeout=GONE_S)
    fault.left += len(alive)
    fault.gone_s = time.monotonic() - began
    for process in alive:  # or the next start would have less of the machine
        print(f"left: {words_of(process)}", flush=True)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.start()
