"""Room for many episodes at once, seen to before the first one opens."""

from __future__ import annotations

import os
import resource
from pathlib import Path

FILES_EACH = 3
"""Descriptors that an open episode holds here: its channel, its standard error, its process."""
FILES_DRIVEN = 8
"""More, of one that a program drives: its own process, and its connections."""
CONNECTIONS_ELSE = 256
"""Of programs, beside these: a few may have many at once."""
FILES_ELSE = 512
"""For the rest of this process, and for processes that are being started."""
PROCESSES_EACH = 3
"""Of an open episode whose environment starts none: three in a sandbox of its own, two forked."""
PROCESSES_ELSE = 256
_CGROUPS = Path("/sys/fs/cgroup")


def make_room(episodes: int, *, programs: bool = False) -> None:
    """Raise this process's limit of open files to what `episodes` at once need. `programs`: whether
    programs drive some of them.

    Raises ValueError where the machine does not let it, and where it allows too few processes.
    """
    processes = PROCESSES_EACH * (1 + programs) * episodes + PROCESSES_ELSE
    most, whose, cure = most_processes()
    if processes > most:
        raise ValueError(
            f"{episodes} episodes at once need {processes} processes, and {whose} allows {most}; "
            f"raise it ({cure}) or open fewer"
        )
    wanted = FILES_EACH * (1 + programs) * episodes + FILES_ELSE
    wanted += connections(episodes) if programs else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(
            f"{episodes} episodes at once need {wanted} open files, and this process may have "
            f"{hard}; raise the limit (`ulimit -Hn`, LimitNOFILE of a service) or open fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections(episodes: int) -> int:
    """How many there is room for, of the programs that drive so many."""
    return (FILES_DRIVEN - FILES_EACH) * episodes + CONNECTIONS_ELSE


def most_processes() -> tuple[float, str, str]:
    """How many there may be, what says so, and what raises it: the least of the limits."""
    limits: list[tuple[float, str, str]] = [(float("inf"), "", "")]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY:
        limits.append((soft, "this user's limit", "`ulimit -u`, LimitNPROC of a service"))
    for name in ("pid_max", "threads-max"):
        if (value := _number(Path("/proc/sys/kernel") / name)) is not None:
            limits.append((value, "the kernel", f"sysctl kernel.{name}"))
    for folder in _groups():
        if (value := _number(folder / "pids.max")) is not None:
            cure = "--pids-limit of a container, TasksMax of a service"
            limits.append((value, f"the control group ({folder}/pids.max)", cure))
    return min(limits)


def _groups() -> list[Path]:
    """The folders of this process's control groups that count processes, and those above them."""
    found: list[Path] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names in ("", "pids"):
            below = _CGROUPS / names / path.lstrip("/")
            found += [one for one in (below, *below.parents) if one.is_relative_to(_CGROUPS)]
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is none, or it says "max"
        return None
