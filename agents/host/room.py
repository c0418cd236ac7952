"""Room for many episodes at once, seen to before the first one opens."""

from __future__ import annotations

import resource

FILES_EACH = 2
"""Descriptors that an open episode holds here."""
FILES_DRIVEN = 8
"""More, of one that a program drives: its own process, and its connections."""
FILES_ELSE = 512
"""For the rest of this process, and for processes that are being started."""


def make_room(episodes: int, *, programs: bool = False) -> None:
    """Raise this process's limit of open files to what `episodes` at once need. `programs`: whether
    programs drive some of them.

    Raises ValueError where the machine does not let it.
    """
    wanted = (FILES_EACH + FILES_DRIVEN * programs) * episodes + FILES_ELSE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(
            f"{episodes} episodes at once need {wanted} open files, and this process may have "
            f"{hard}; raise the limit (`ulimit -Hn`, LimitNOFILE of a service) or open fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
