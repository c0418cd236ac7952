"""Checks and raises the OS limits of this process before many episodes open at once."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_FILES_PER_EPISODE = 3
"""File descriptors for each open episode: its channel, its standard error and its pidfd."""
_FILES_PER_DRIVEN_EPISODE = 8
"""File descriptors for each episode that a program drives, including its connections."""
_SPARE_CONNECTIONS = 256
_SPARE_FILES = 512
_PROCESSES_PER_EPISODE = 3
"""Processes for an environment that starts none itself. It needs three in a sandbox, or two if it
is forked."""
_SPARE_PROCESSES = 256
_CGROUPS = Path("/sys/fs/cgroup")


def make_room(episodes: int, *, programs: bool = False) -> None:
    """Raise the limit on open files so that `episodes` episodes can be open at once.

    `programs` says whether agent programs drive some of them. Raises ValueError if the machine
    allows too few files or processes.
    """
    processes = _PROCESSES_PER_EPISODE * (1 + programs) * episodes + _SPARE_PROCESSES
    limit, source, cure = _process_limit()
    if processes > limit:
        raise ValueError(
            f"{episodes} episodes at once need {processes} processes, and {source} allows {limit}. "
            f"Raise it ({cure}) or open fewer"
        )
    files = _FILES_PER_EPISODE * (1 + programs) * episodes + _SPARE_FILES
    files += connection_limit(episodes) if programs else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return
    if hard != resource.RLIM_INFINITY and hard < files:
        raise ValueError(
            f"{episodes} episodes at once need {files} open files, and this process may have "
            f"{hard}. Raise the limit (`ulimit -Hn`, LimitNOFILE of a service) or open fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def connection_limit(episodes: int) -> int:
    """Return how many connections the programs that drive `episodes` episodes may open."""
    return (_FILES_PER_DRIVEN_EPISODE - _FILES_PER_EPISODE) * episodes + _SPARE_CONNECTIONS


def _process_limit() -> tuple[float, str, str]:
    """Return the lowest limit on processes, where it is set, and how to raise it."""
    limits: list[tuple[float, str, str]] = [(float("inf"), "", "")]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:
        limits.append((soft, "this user's limit", "`ulimit -u`, LimitNPROC of a service"))
    for name in ("pid_max", "threads-max"):
        if (value := _read_int(Path("/proc/sys/kernel") / name)) is not None:
            limits.append((value, "the kernel", f"sysctl kernel.{name}"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names not in ("", "pids"):
            continue
        group = _CGROUPS / names / path.lstrip("/")
        for folder in (one for one in (group, *group.parents) if one.is_relative_to(_CGROUPS)):
            if (value := _read_int(folder / "pids.max")) is not None:
                cure = "--pids-limit of a container, TasksMax of a service"
                limits.append((value, f"the control group ({folder}/pids.max)", cure))
    return min(limits)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None
