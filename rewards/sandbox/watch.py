"""Enforces the resource limits of a run, and reports how the run ended."""

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
from keel.rewards.sandbox.processes import kill_descendants, usage

FIRST_PROCESS = re.compile(rb'"child-pid": (\d+)')
"""Matches the PID of the first process in bubblewrap's status, which programs cannot write."""
Status = Literal["exited", "time", "memory", "output"]

_POLL_S = 0.05
_MAX_FILES = 16_384
"""The most files in the private folder. Even an empty one takes a KiB of kernel memory."""
_MAX_OUTPUT = 64 << 20
"""The maximum number of bytes that a run may print in total."""
_MAX_LIMIT = 1 << 24
"""The upper bound for each limit, against overflows in the kernel. For memory it is 16 TiB."""
GRACE_S = 60.0
"""How long a killed run may take to exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits for one run."""

    time_s: float = 2.0
    """CPU seconds of all processes together. The wall-time limit is twice this plus one second."""
    memory_mib: int = 512
    """Limits the address space of each process, and the total resident memory of all processes."""
    processes: int = 8
    """The maximum number of processes and threads at a time."""
    files_mib: int = 64
    """The maximum size of the private folder."""
    output_kib: int = 1024
    """Limits standard output and error together, or for each line if lines are counted."""

    def __post_init__(self) -> None:
        for name in ("time_s", "memory_mib", "processes", "files_mib", "output_kib"):
            value, least = getattr(self, name), 0 if name == "time_s" else 1
            if not least <= value <= _MAX_LIMIT or not value:
                raise ValueError(
                    f"sandbox limits: {name} = {value} must be positive and at most {_MAX_LIMIT}"
                )

    @property
    def wall_s(self) -> float:
        return 2 * self.time_s + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOutcome:
    """The result of a run."""

    status: Status
    """`exited`, or the name of the limit that the run exceeded."""
    exit_code: int
    """The exit status, or 128 + n after signal n. Only meaningful if the status is `exited`."""
    stdout: bytes
    stderr: bytes
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0

    def why(self) -> str:
        """Return a short message about why the run failed, which may quote the program, or ""."""
        if self.status != "exited":
            return f"over its limit of {self.status}"
        if self.exit_code == 0:
            return ""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        quote = f": {lines[-1][:200]}" if lines else ""
        if self.exit_code > 128 and self.exit_code - 128 in set(signal.Signals):
            return f"ended by {signal.Signals(self.exit_code - 128).name}{quote}"
        return f"exit status {self.exit_code}{quote}"


class Watch:
    """Reads the output of a run, and kills the run if it exceeds a limit."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        status_fd: int,
        alive_fd: int,
        limits: Limits,
        lines: int,
    ) -> None:
        """Watch a run until it has printed `lines` lines, or until it exits if `lines` is 0."""
        assert process.stdout is not None and process.stderr is not None
        self._process = process
        self._limits = limits
        self._lines = lines
        self._out, self._err = process.stdout.fileno(), process.stderr.fileno()
        self._status_fd = status_fd
        self.received = {fd: bytearray() for fd in (self._out, self._err, status_fd, alive_fd)}
        self._deadline = self._last_deadline = math.inf
        self._status: Status = "exited"
        self._killed_deadline = math.inf
        self._counted_output = 0  # bytes of output up to the last counted line
        self._line_count = 0
        self._max_output = max(_MAX_OUTPUT, limits.output_kib << 10)
        self._ignore_output = False

    def outcome(self, started: float, within_s: float) -> SandboxOutcome:
        """Wait for the end of the run. Raises RuntimeError if it cannot be killed."""
        self._last_deadline = started + within_s
        self._deadline = min(started + self._limits.wall_s, self._last_deadline)
        try:
            with selectors.DefaultSelector() as selector:
                self._listen(selector)
        finally:
            self._kill()
            code = self._process.wait(GRACE_S)
        return SandboxOutcome(
            status=self._status,
            exit_code=code if code >= 0 else 128 - code,
            stdout=bytes(self.received[self._out]),
            stderr=bytes(self.received[self._err]),
            wall_s=time.monotonic() - started,
        )

    def _listen(self, selector: selectors.BaseSelector) -> None:
        next_poll = time.monotonic() + _POLL_S
        for fd in self.received:
            selector.register(fd, selectors.EVENT_READ)
        # The first process inside holds `alive_fd`; when it exits, so have all others.
        while selector.get_map():
            now = time.monotonic()
            if now >= self._killed_deadline:
                raise RuntimeError(f"a sandbox is still alive {GRACE_S:g} s after its end")
            # The program may have exited in time while this process was not scheduled.
            if now >= self._deadline and self._process.poll() is None:
                self._end("time")
            elif now >= next_poll:
                self._poll()
                next_poll = now + _POLL_S
            until = min(self._deadline, next_poll, self._killed_deadline)
            for key, _ in selector.select(max(0.0, until - now)):
                if data := os.read(key.fd, 1 << 16):
                    self._receive(key.fd, data)
                else:
                    selector.unregister(key.fd)

    def _receive(self, fd: int, data: bytes) -> None:
        if self._ignore_output and fd != self._status_fd:  # the PID in the status is still needed
            return
        received = self.received[fd]
        received += data
        if self._lines and fd == self._out and b"\n" in data:
            self._deadline = min(time.monotonic() + self._limits.wall_s, self._last_deadline)
            self._counted_output = received.rfind(b"\n") + 1 + len(self.received[self._err])
            self._line_count += data.count(b"\n")
            if self._line_count >= self._lines:
                self._end("exited")
                return
        total = len(self.received[self._out]) + len(self.received[self._err])
        uncounted = total - self._counted_output
        if uncounted > self._limits.output_kib << 10 or len(received) > self._max_output:
            self._end("output")

    def _poll(self) -> None:
        if self._killed_deadline < math.inf:
            return
        if self._process.poll() is not None:  # a leftover process still holds its output
            self._deadline, self._killed_deadline = math.inf, time.monotonic() + GRACE_S
            self._kill()
            return
        try:
            used = usage(self._process.pid)
        except OSError:  # out of open files or memory, which is not the run's fault
            return
        # The files in the private folder. Until that is mounted, it is the machine's own folder.
        files, first = 0, FIRST_PROCESS.search(self.received[self._status_fd])
        with suppress(OSError):
            if first is not None:
                stats = os.statvfs(f"/proc/{int(first[1])}/root{TMP}")
                if stats.f_blocks * stats.f_frsize == self._limits.files_mib << 20:
                    files = stats.f_files - stats.f_ffree
        if used.resident > self._limits.memory_mib << 20 or files > _MAX_FILES:
            self._end("memory")
        elif used.cpu_s > self._limits.time_s * max(self._lines, 1):
            self._end("time")

    def _end(self, status: Status) -> None:
        self._status, self._ignore_output = status, True
        self._deadline, self._killed_deadline = math.inf, time.monotonic() + GRACE_S
        # Killing bubblewrap while it starts would leave a process that waits forever.
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)
            kill_descendants(self._process.pid, GRACE_S)
        self._kill()

    def _kill(self) -> None:
        # The outer process and its group; those inside a sandbox die with it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
