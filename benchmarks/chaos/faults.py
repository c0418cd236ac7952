"""Faults, their injection and the reaction of the run."""

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

from benchmarks.chaos.means import Means
from benchmarks.chaos.run import ROLES, TIMEOUT_S, Run, marked, words_of
from keel.rl.supervisor import MAX_RESTARTS
from keel.trainer.placement.watchdog import has_exited
from keel.trainer.run.signals import PREEMPTED

# fmt: off
Action = Literal[
    "kill", "freeze", "moment", "end", "flip", "unwritable",
    "slow", "full", "jump ahead", "jump back",
]
# fmt: on
Kind = tuple[Action, str]
"""Action and its target."""
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
EVERY: tuple[Kind, ...] = (*PROCESSES, *PRELOADED, *ON_DISK)
RAY: tuple[Kind, ...] = tuple(
    (action, role) for action in ("kill", "freeze") for role in ("raylet", "gcs")
)
STATUSES: Mapping[Kind, tuple[int | None, ...]] = {
    **dict.fromkeys(RAY, (1,)),
    ("kill", "driver"): (-signal.SIGKILL,),
    ("flip", "driver"): (-signal.SIGKILL,),
    ("end", "driver"): (PREEMPTED,),
    ("full", "disk"): (1, None),
}
"""Allowed exit statuses by fault (docs/reliability.md); None: the run continues, the default."""

GONE_S = 90.0
"""Timeout in seconds for the processes of an ended run."""
MOMENT_S = 8.0
"""Maximum duration of a temporary stop in seconds."""
SETTLED_S = 4.0
"""Seconds of training that count as recovery."""
DISK_S = 20.0
"""Duration of a full or slow disk in seconds."""
SLOW_WRITE_S, SLOW_SYNC_S = 0.02, 2.0
JUMP_S = 3600.0


@dataclass(slots=True)
class Fault:
    """One fault and the reaction of the run; times count from its injection."""

    action: Action
    kind: str
    step: int
    """Last step before the fault."""
    lasted_s: float = 0.0
    """Duration of a temporary fault."""
    reported_s: float | None = None
    """Time until the next message; None: no message before training continued."""
    again_s: float | None = None
    """Time until the next trained step."""
    start: int = 0
    """Start count of the run at the fault."""
    statuses: list[int] = field(default_factory=list[int])
    """Exit statuses after the fault; negative: a signal."""
    gone_s: float | None = None
    """Time from the exit of the driver to the exit of its last process."""
    left: int = 0
    """Processes still alive `GONE_S` after the exit of the driver."""
    flipped: str = ""
    """File with the flipped bit."""
    named: bool = False
    """True if the run reported the checkpoint of `flipped` as damaged."""
    words: list[str] = field(default_factory=list[str])
    """First messages after the fault."""

    @property
    def name(self) -> str:
        return f"{self.action} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault in effect."""

    victim: psutil.Process | None = None
    lasts_s: float = 0.0
    undo: Callable[[], None] | None = None
    """Called after `lasts_s` or at the end of the run."""


def kinds(*, preloaded: bool, on_disk: bool) -> tuple[Kind, ...]:
    return (*PROCESSES, *(PRELOADED if preloaded else ()), *(ON_DISK if on_disk else ()))


def due(fault: Fault, before: Sequence[Fault]) -> tuple[int | None, ...]:
    """Return the allowed exit statuses of a fault after the faults `before`; None: no exit."""

    def takes_engines(one: Fault) -> bool:
        return one.kind == "engine" and one.action != "moment"

    if takes_engines(fault):
        lost = sum(one.start == fault.start and takes_engines(one) for one in before)
        return (None, 1) if lost >= MAX_RESTARTS else (None,)
    return STATUSES.get((fault.action, fault.kind), (None,))


def chosen(words: Sequence[str], possible: Sequence[Kind]) -> list[Kind]:
    """Select kinds by action, target or both; raises ValueError for an unknown word."""
    if not words:
        return list(possible)
    names: dict[Kind, set[str]] = {kind: {kind[0], kind[1], " ".join(kind)} for kind in EVERY}
    for word in words:
        if not any(word in some for some in names.values()):
            known = ", ".join(" ".join(kind) for kind in EVERY)
            raise ValueError(f"--only {word!r} is not a kind of fault; choose from {known}")
    selected = [kind for kind in possible if names[kind] & set(words)]
    if not selected:
        raise ValueError(f"--only {' '.join(words)}: none of these faults is possible here")
    return selected


def strike(run: Run, fault: Fault, draw: random.Random, means: Means) -> Struck | None:
    """Inject the fault; return None if no process has its role."""
    if fault.kind in ("disk", "clock"):
        return _strike_surroundings(fault, means)
    processes = run.of(fault.kind)
    if not processes:
        return None
    victim = draw.choice(processes)
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
        else:  # unwritable: writes beyond this many bytes fail
            before = victim.rlimit(resource.RLIMIT_FSIZE)
            victim.rlimit(resource.RLIMIT_FSIZE, (4096, before[1]))

            def restore() -> None:
                victim.rlimit(resource.RLIMIT_FSIZE, before)

            return Struck(victim=victim, lasts_s=2 * MOMENT_S, undo=restore)
    except psutil.NoSuchProcess:
        return None
    return Struck(victim=victim)


def _strike_surroundings(fault: Fault, means: Means) -> Struck:
    preload, disk = means.preload, means.disk
    if fault.action == "slow":
        assert preload
        preload.slow(write_s=SLOW_WRITE_S, sync_s=SLOW_SYNC_S)
        return Struck(lasts_s=DISK_S, undo=lambda: preload.slow(write_s=0, sync_s=0))
    if fault.kind == "clock":
        assert preload
        preload.jump(JUMP_S if fault.action == "jump ahead" else -JUMP_S)
        return Struck()
    assert disk
    disk.fill()
    return Struck(lasts_s=DISK_S, undo=disk.free)


def flip(folder: Path, draw: random.Random) -> str:
    """Flip a bit of the newest checkpoint and return the file's name.

    Returns "" without a flip if there is only one checkpoint, because the run could not resume.
    """
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
    """Return True if the messages report the checkpoint of this file as damaged."""
    folder = Path(flipped).parts[1] if flipped else ""
    return bool(folder) and any("is damaged" in line and folder in line for line in lines)


def suffer(run: Run, fault: Fault, draw: random.Random, means: Means) -> bool:
    """Inject a fault and follow the run until it trains again or is done.

    Returns False if the fault has no target. Raises TimeoutError if the run hangs.
    """
    fault.start, since = run.starts, run.position()
    run.fresh()
    began = time.monotonic()
    if (struck := strike(run, fault, draw, means)) is None:
        return False
    undo = struck.undo
    trained: list[float] = []
    """Times of new steps since the last fault or start."""

    def over() -> bool:
        return undo is None and not (
            fault.action == "freeze" and struck.victim and not has_exited(struck.victim)
        )

    try:
        was_over = over()
        while True:
            if over() and not was_over:  # a run may train on until it notices a frozen process
                was_over = True
                trained.clear()
            now = time.monotonic()
            trained += [now] * bool(run.fresh())
            if over() and trained and trained[-1] >= trained[0] + SETTLED_S:
                break
            if fault.reported_s is None and run.messages(since):
                fault.reported_s = now - began
            ended = run.ended()
            if undo and (ended or now - began > struck.lasts_s):
                with suppress(psutil.NoSuchProcess):
                    undo()
                fault.lasted_s, undo = time.monotonic() - began, None
            if ended:
                fault.statuses.append(int(run.process.returncode))
                if fault.statuses[-1] == 0:
                    break
                if fault.action == "flip" and not fault.flipped:
                    fault.flipped = flip(run.folder, draw)
                restart(run, fault)
                trained.clear()
            if now - began > TIMEOUT_S:
                raise TimeoutError(
                    f"no step within {TIMEOUT_S:g} s of {fault}: {run.messages(since)[-5:]}"
                )
            time.sleep(0.05)
    finally:  # also record hangs and interruptions
        fault.again_s = trained[0] - began if trained else None
        messages = run.messages(since)
        fault.words += messages[:8]
        fault.named = named(fault.flipped, messages)
    return True


def restart(run: Run, fault: Fault) -> None:
    """Restart an ended run after its processes have exited or been killed."""
    began = time.monotonic()
    _, alive = psutil.wait_procs(marked(run.folder), timeout=GONE_S)
    fault.left += len(alive)
    fault.gone_s = time.monotonic() - began
    for process in alive:
        print(f"left: {words_of(process)}", flush=True)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.start()
