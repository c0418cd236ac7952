"""Kernel settings for this process and its descendants. Supports Python 3.9 or later."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
from contextlib import suppress
from typing import Optional

_PDEATHSIG, _DUMPABLE, _CHILD_SUBREAPER = 1, 4, 36
_MAX_SOCKET_PATH = 107
"""Maximum length of a unix socket's path in bytes (see unix(7))."""


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    _prctl(_PDEATHSIG, 9)


def protect_process() -> None:
    """Protect this process, which computes the verdict: it ends with its parent, and other
    processes cannot read its memory."""
    end_with_parent()
    _prctl(_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants that are orphaned from now on."""
    _prctl(_CHILD_SUBREAPER, 1)


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
    """Return all descendants of `pid` whose parents are alive, in any process group."""
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


def socket_folder(prefix: str, socket: str) -> str:
    """Create a temporary folder for `socket`. It is in /tmp if the path in TMPDIR would be too
    long."""
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(os.fsencode(os.path.join(folder, socket))) <= _MAX_SOCKET_PATH:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix=prefix, dir="/tmp")
