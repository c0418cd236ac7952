"""The time limits and steps with which Keel stops, kills and restarts its processes.

Every wait has a limit. This module needs only the standard library, so that the judge's reaper
starts within milliseconds.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0
"""Seconds between asking a process to stop, with a message or SIGTERM, and killing it."""
EXIT_S = 30.0
"""Seconds for a process to exit after either side has closed its channel."""
KILL_S = 60.0
"""Seconds for a killed process to exit. Only a process that hangs in the kernel takes this long."""
JOIN_S = 10.0
"""Seconds for a daemon thread or a cancelled task to end. One that hangs is abandoned."""
MARGIN_S = 30.0
"""Seconds added to a time limit that another process enforces itself, so that it reports first."""
STOPPED_POLLS = 5
"""Number of consecutive polls, a second apart, that must find a process stopped (SIGSTOP) before
it is killed."""
PREEMPTION = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a scheduler sends to all processes of a job before it ends the job."""
MAX_RESTARTS, RESTART_PERIOD_S = 3, 3 * 3600.0
"""Maximum number of restarts of an engine or a judge server, within a period in seconds."""


class RestartLimit:
    """Limits how many times something is restarted within a period."""

    def __init__(
        self,
        most: int = MAX_RESTARTS,
        period_s: float = RESTART_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._period_s, self._clock = most, period_s, clock
        self._times: list[float] = []

    def count(self) -> str:
        """Count a restart. Returns "", or if the limit is exceeded, how often the failure occurred,
        such as "4 times within 3 hours"."""
        now = self._clock()
        self._times = [at for at in self._times if now - at < self._period_s]
        if len(self._times) >= self._most:
            times = f"{self._most + 1} time{'s' * (self._most > 0)}"
            return f"{times} within {self._period_s / 3600:.3g} hours"
        self._times.append(now)
        return ""


def walk_tree(root: int) -> Iterator[tuple[int, list[bytes], list[str]]]:
    """Yield the PID, the fields of `read_stat` and the threads of `root` and its descendants. This
    is ten times as fast as `psutil`, which reads every process on the machine."""
    pending = [root]
    while pending:
        pid = pending.pop()
        with suppress(FileNotFoundError, ProcessLookupError):  # exited meanwhile
            fields, tasks = read_stat(str(pid)), os.listdir(f"/proc/{pid}/task")
            for task in tasks:
                children = Path(f"/proc/{pid}/task/{task}/children").read_bytes()
                pending += map(int, children.split())
            yield pid, fields, tasks


def read_stat(name: str) -> list[bytes]:
    """Read the fields that follow the process name in `/proc/…/stat`. The name itself may contain
    any text."""
    return Path(f"/proc/{name}/stat").read_bytes().rpartition(b") ")[2].split()


def is_stopped(pid: int, *, descendants: bool = False) -> bool:
    """Return True if a process is stopped (SIGSTOP), or one of its `descendants` if they count
    too."""
    try:
        if descendants:
            return any(fields[0] == b"T" for _, fields, _ in walk_tree(pid))
        return read_stat(str(pid))[0] == b"T"
    except OSError:  # exited, or this process is out of open files or memory
        return False


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a process group, along with the group and all descendants."""
    # Stopped first, not killed: descendants are found through their living ancestor.
    process.send_signal(signal.SIGSTOP)
    if process.returncode is None:
        kill_descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_descendants(root: int, seconds: float = KILL_S) -> None:
    """Kill all processes below `root`, which must not reap any of them meanwhile, and wait up to
    `seconds` until they have exited."""
    end, previous = time.monotonic() + seconds, dict[int, bool]()
    while time.monotonic() < end:
        current = _descendants(root)
        # One scan can miss a process that changes parents meanwhile.
        if current == previous and not any(current.values()):
            return
        previous = current
        for pid in (pid for pid, alive in current.items() if alive):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _descendants(root: int) -> dict[int, bool]:
    return {
        # The main thread may exit before the others.
        pid: fields[0] not in (b"Z", b"X") or len(tasks) > 1
        for pid, fields, tasks in walk_tree(root)
        if pid != root
    }
