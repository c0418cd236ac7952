"""Limits, runs and kills processes inside an episode. Supports Python 3.9 or later."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Optional

_PDEATHSIG, _DUMPABLE, _CHILD_SUBREAPER = 1, 4, 36
_MAX_SOCKET_PATH = 107
_MAX_CHARACTERS = 20_000
_KILL_S = 10.0  # a tool call waits for killed processes
_adopts = False
"""True once this process adopts its orphaned descendants."""


def die_with_parent() -> None:
    _prctl(_PDEATHSIG, 9)


def protect_process() -> None:
    """Protect the process that computes the verdict. Other processes can't read its memory, and it
    is killed when its parent exits."""
    die_with_parent()
    _prctl(_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def limit_memory(mib: Optional[int]) -> None:  # noqa: UP045  (Python 3.9)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mib is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = mib << 20 if hard == resource.RLIM_INFINITY else min(mib << 20, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def descendants(pid: int) -> list[int]:
    """List the descendants of `pid` in all process groups, except those whose parent has died."""
    pids: list[int] = []
    pending = [pid]
    while pending:
        folder = f"/proc/{pending.pop()}/task"
        with suppress(OSError):
            for task in os.listdir(folder):
                with suppress(OSError), open(f"{folder}/{task}/children") as file:
                    children = [int(one) for one in file.read().split()]
                    pending += children
                    pids += children
    return pids


def make_socket_folder(prefix: str, socket: str) -> str:
    """Create a temporary folder for `socket`. It is created in /tmp if TMPDIR would make the
    socket's path too long."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(os.path.join(folder, socket))) <= _MAX_SOCKET_PATH:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")


def in_sandbox() -> bool:
    """Check whether this process runs in Keel's sandbox, where emptying /tmp is safe."""
    read_only = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
    return os.uname().nodename == "sandbox" and read_only and os.path.exists("/proc/self/task")


def adopt_orphans() -> None:
    """Become the parent of any descendants that are orphaned from now on."""
    global _adopts
    _prctl(_CHILD_SUBREAPER, 1)
    _adopts = True


def kill_descendants() -> None:
    """Kill all descendants. Raises TimeoutError if any survive, for example because they keep
    forking."""
    deadline = time.monotonic() + _KILL_S
    while pids := descendants(os.getpid()):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap_zombies()
        if time.monotonic() > deadline:
            raise TimeoutError("some processes could not be killed")
        time.sleep(0.002)


def _reap_zombies() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run(
    command: list[str], *, env: Mapping[str, str], folder: str, within_s: float, stdin: bytes = b""
) -> tuple[int | None, str]:
    """Run a command. Returns its exit status (None on timeout) and its output."""
    import subprocess  # noqa: PLC0415  (slow, and most environments start no process)

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as source:
        source.write(stdin)
        source.seek(0)
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=folder,
            stdin=source,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILL_S)
            status = None
        if _adopts:  # zombies take process slots; between commands, no status is lost
            _reap_zombies()
        size = output.seek(0, os.SEEK_END)
        half = _MAX_CHARACTERS // 2
        output.seek(0)
        text = output.read(min(size, _MAX_CHARACTERS)).decode(errors="replace")
        if size > _MAX_CHARACTERS:
            output.seek(size - half)
            last = output.read(half).decode(errors="replace")
            text = f"{text[:half]}\n[{size - 2 * half} bytes left out]\n{last}"
        return status, text
