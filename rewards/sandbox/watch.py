"""One run of a program: what it may use, how it ended, and the watch between the two."""

from __future__ import annotations

import math
import os
import re
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from keel.rewards.sandbox.bubblewrap import TMP
from keel.rewards.sandbox.processes import end_below, usage

FIRST_PROCESS = re.compile(rb'"child-pid": (\d+)')
"""Bubblewrap's own words, not the program's."""
Status = Literal["exited", "time", "memory", "output"]

LOOK_EVERY_S = 0.05
"""Between looks at the memory and CPU time of all of a run's processes together."""
MOST_TIME_S = 86_400.0
MOST_FILES = 16_384
"""In the private folder: each takes a KiB of the kernel's memory, empty or not."""
MOST_OUTPUT = 64 << 20
"""Bytes, all lines together."""
MOST = 1 << 24
"""Of every other limit: 16 TiB of memory. The kernel refuses what does not fit its numbers, and
then no program starts."""
GRACE_S = 60.0
"""Longest wait for a killed run to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use."""

    time_s: float = 2.0
    """CPU seconds, all processes together. Wall time: twice that and a second."""
    memory_mib: int = 512
    """Address space of each process, and resident memory of all together."""
    processes: int = 8
    """Processes and threads at once."""
    files_mib: int = 64
    """The private folder."""
    output_kib: int = 1024
    """Standard output and standard error together; where lines are counted, from line to line."""

    def __post_init__(self) -> None:
        if not 0 < self.time_s <= MOST_TIME_S:
            raise ValueError(
                f"sandbox limits: time_s = {self.time_s} must be positive, and at most "
                f"{MOST_TIME_S:g} seconds"
            )
        for name in ("memory_mib", "processes", "files_mib", "output_kib"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(
                    f"sandbox limits: {name} = {getattr(self, name)} must be from 1 to {MOST}"
                )

    @property
    def wall_s(self) -> float:
        return 2 * self.time_s + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, as seen from outside."""

    status: Status
    """exited: by itself; else the limit that it was killed for."""
    exit_code: int
    """128 + n: by signal n. Means nothing unless the status is `exited`."""
    stdout: bytes
    stderr: bytes
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0

    def why(self) -> str:
        """In a few words, for people: the program has a say in them. "" if all went well."""
        if self.status != "exited":
            return f"over its limit of {self.status}"
        if self.exit_code == 0:
            return ""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        said = f": {lines[-1][:200]}" if lines else ""
        if self.exit_code > 128 and self.exit_code - 128 in set(signal.Signals):
            return f"ended by {signal.Signals(self.exit_code - 128).name}{said}"
        return f"exit status {self.exit_code}{said}"


class Watch:
    """Reads what a run says, and ends it at its limits."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        status: int,
        alive: int,
        limits: Limits,
        lines: int,
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        self._limits = limits
        self._lines = lines
        self._out, self._err = process.stdout.fileno(), process.stderr.fileno()
        self.heard = {fd: bytearray() for fd in (self._out, self._err, status, alive)}
        self._deadline = self._latest = math.inf
        self._status: Status = "exited"
        self._gone_by = math.inf
        self._earlier = 0  # bytes of output up to the last line that counts
        self._heard_lines = 0
        self._most_output = max(MOST_OUTPUT, limits.output_kib << 10)
        self._deaf = False
        self._status_fd = status

    def outcome(self, started: float, within_s: float) -> Outcome:
        self._latest = started + within_s
        self._deadline = min(started + self._limits.wall_s, self._latest)
        try:
            self._listen()
        finally:
            self._kill()
            code = self._process.wait(GRACE_S)
        return Outcome(
            status=self._status,
            exit_code=code if code >= 0 else 128 - code,
            stdout=bytes(self.heard[self._out]),
            stderr=bytes(self.heard[self._err]),
            wall_s=time.monotonic() - started,
        )

    def _listen(self) -> None:
        look = time.monotonic() + LOOK_EVERY_S
        with selectors.DefaultSelector() as selector:
            for fd in self.heard:
                selector.register(fd, selectors.EVENT_READ)
            # `alive` is held by the first process inside, whose end is the end of all of them.
            while selector.get_map():
                now = time.monotonic()
                if now >= self._gone_by:
                    raise RuntimeError(f"a sandbox is still alive {GRACE_S:g} s after its end")
                # Where this process was kept waiting itself, the program may have ended in time.
                if now >= self._deadline and self._process.poll() is None:
                    self._end("time")
                elif now >= look:
                    self._look()
                    look = now + LOOK_EVERY_S
                until = min(self._deadline, look, self._gone_by)
                for key, _ in selector.select(max(0.0, until - now)):
                    data = os.read(key.fd, 1 << 16)
                    if data:
                        self._hear(key.fd, data)
                    else:
                        selector.unregister(key.fd)

    def _hear(self, fd: int, data: bytes) -> None:
        if self._deaf and fd != self._status_fd:  # which process it is has to be known at the end
            return
        heard = self.heard[fd]
        heard += data
        if self._lines and fd == self._out and b"\n" in data:
            self._deadline = min(time.monotonic() + self._limits.wall_s, self._latest)
            self._earlier = heard.rfind(b"\n") + 1 + len(self.heard[self._err])
            self._heard_lines += data.count(b"\n")
            if self._heard_lines >= self._lines:
                self._end("exited")
                return
        said = len(self.heard[self._out]) + len(self.heard[self._err]) - self._earlier
        if said > self._limits.output_kib << 10 or len(heard) > self._most_output:
            self._end("output")

    def _look(self) -> None:
        if self._gone_by < math.inf:
            return
        if self._process.poll() is not None:  # something it left behind still holds its output
            self._deadline, self._gone_by = math.inf, time.monotonic() + GRACE_S
            self._kill()
            return
        try:
            used = usage(self._process.pid)
        except OSError:  # out of open files or memory, which is not the run's fault
            return
        if used.resident > self._limits.memory_mib << 20 or self._files() > MOST_FILES:
            self._end("memory")
        elif used.cpu_s > self._limits.time_s * max(self._lines, 1):
            self._end("time")

    def _files(self) -> int:
        """In the private folder; 0 where that has none of its own, or nobody may look."""
        first = FIRST_PROCESS.search(self.heard[self._status_fd])
        if first is None:
            return 0
        try:
            found = os.statvfs(f"/proc/{int(first[1])}/root{TMP}")
        except OSError:
            return 0
        # While it is made, it is the machine's own.
        own = found.f_blocks * found.f_frsize == self._limits.files_mib << 20
        return found.f_files - found.f_ffree if own else 0

    def _end(self, status: Status) -> None:
        self._status, self._deaf = status, True
        self._deadline, self._gone_by = math.inf, time.monotonic() + GRACE_S
        # One that is killed while it starts would leave a process that waits for good.
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)
            end_below(self._process.pid, GRACE_S)
        self._kill()

    def _kill(self) -> None:
        # The outer process and its group. What is inside a sandbox is bound to die with it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
