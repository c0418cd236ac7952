"""Processes of an episode: commands with a deadline, and an end to all of them.

Any Python from 3.9, no package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress

MOST_CHARACTERS = 20_000
"""Of what a command prints: the first and the last half."""
ENDING_S = 10.0
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_adopts = False
"""Whether orphans become this process's children."""


def in_sandbox() -> bool:
    """Whether this process is in one of Keel's: what the policy leaves is thrown away by emptying
    /tmp, and that must be nobody else's."""
    read_only = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
    return socket.gethostname() == "sandbox" and read_only and os.path.exists("/proc/self/task")


def adopt() -> None:
    """From now on, what is started below and left by its parent is this process's child."""
    if ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
    global _adopts
    _adopts = True


def stop_all() -> None:
    """End every process below this one, in whatever session. Raises TimeoutError if one keeps
    ahead."""
    until = time.monotonic() + ENDING_S
    while below := _below():
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue
        if time.monotonic() > until:
            raise TimeoutError("processes were left that could not be ended")
        time.sleep(0.002)


def _reap() -> None:
    """The orphans that have ended: each that nobody waits for takes a place among the few
    processes of a sandbox. Only between commands: the status of one that runs is its `Popen`'s."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _below() -> list[int]:
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        folder = f"/proc/{pending.pop()}/task"
        try:
            tasks = os.listdir(folder)
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"{folder}/{task}/children") as file:
                    children = [int(one) for one in file.read().split()]
            except OSError:
                continue
            pending += children
            found += children
    return found


def run(
    command: list[str],
    *,
    env: Mapping[str, str],
    folder: str,
    within_s: float,
    given: bytes = b"",
) -> tuple[int | None, str]:
    """Its exit status, None where it took too long and was killed, and what it printed. What it
    leaves in the background goes on."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as wanted:
        wanted.write(given)
        wanted.seek(0)
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd=folder,
            stdin=wanted,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(ENDING_S)
            status = None
        if _adopts:
            _reap()
        size = said.seek(0, os.SEEK_END)
        half = MOST_CHARACTERS // 2
        said.seek(0)
        text = said.read(min(size, MOST_CHARACTERS)).decode(errors="replace")
        if size > MOST_CHARACTERS:
            said.seek(size - half)
            last = said.read(half).decode(errors="replace")
            text = f"{text[:half]}\n[{size - 2 * half} bytes left out]\n{last}"
        return status, text
