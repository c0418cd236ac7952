"""Ends sandboxes that take more memory than they may: one thread for all that are open."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from keel.rewards.sandbox.processes import usage

LOOK_EVERY_S = 0.1
SHARE = 0.1
"""Of one core, at most: with many sandboxes it looks less often."""

log = logging.getLogger(__name__)


class Keeper:
    """The processes of a sandbox are those below its outer one, given by number."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._inside: set[int] = set()
        """Those that are the first process inside, and of no account themselves."""
        self._begun: dict[int, bytes] = {}
        self._warned = False
        self._ended: dict[int, str] = {}
        self._lock = threading.Lock()
        self._none_left = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, pid: int, memory_mib: int, *, inside: bool = False) -> None:
        """Of a process that runs. inside: it is not the sandbox's outer one but the first in it, a
        copy of a process that is there anyway, and is not counted."""
        with self._lock:
            self._most[pid] = memory_mib
            if inside:
                self._inside.add(pid)
            self._begun.pop(pid, None)
            with suppress(OSError):  # then at the first look
                self._begun[pid] = _begun(pid)
            self._ended.pop(pid, None)
            self._none_left.clear()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._keep, name="sandboxes", daemon=True)
                self._thread.start()

    def release(self, pid: int) -> str:
        """What it was ended for, or ""."""
        with self._lock:
            self._drop(pid)
            return self._ended.pop(pid, "")

    def _drop(self, pid: int) -> None:
        self._most.pop(pid, None)
        self._begun.pop(pid, None)
        self._inside.discard(pid)
        if not self._most:
            self._none_left.set()

    def _keep(self) -> None:
        while True:
            with self._lock:
                if not self._most:
                    self._thread = None
                    return
                held = dict(self._most)
            started = time.monotonic()
            for pid, memory_mib in held.items():
                try:
                    self._look(pid, memory_mib)
                except OSError as error:  # out of open files or memory; it is looked at again
                    self._warn(error)
            took = time.monotonic() - started
            self._none_left.wait(max(LOOK_EVERY_S, took / SHARE))

    def _look(self, pid: int, memory_mib: int) -> None:
        if pid not in self._begun:  # it could not be read when it was to be held
            begun = _begun(pid)
            with self._lock:
                if pid in self._most:
                    self._begun.setdefault(pid, begun)
        used = usage(pid, itself=pid not in self._inside)
        over = used.resident > memory_mib << 20
        # The kernel may say that a small process which has just begun has no memory at all.
        if not over and (used.processes > 1 or _begun(pid)):
            return
        with self._lock:
            if self._most.get(pid) != memory_mib or pid not in self._begun:
                return  # released meanwhile, and maybe held anew
            # The number may be another process's by now.
            if over and self._begun[pid] == _begun(pid):
                if pid in self._inside:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                else:
                    end_inside(pid)
                self._ended[pid] = (
                    f"out of memory: its {used.processes} processes took {used.resident >> 20} MiB "
                    f"together, and may take {memory_mib}"
                )
            self._drop(pid)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("memory of sandboxes was not looked at, and is again: %s", error)
        self._warned = True


def end_inside(pid: int) -> None:
    """Kill the first process inside, which takes all the others along; then the outer one, `pid`,
    reaps it and ends. Raises OSError where it cannot be found out which that is."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_bytes().split():
                os.kill(int(child), signal.SIGKILL)


def _begun(pid: int) -> bytes:
    """When a process started, which tells it from another that has its number. b"": it has ended,
    reaped or not. Raises OSError where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    return b"" if fields[0] in (b"Z", b"X") else fields[19]


KEEPER = Keeper()
