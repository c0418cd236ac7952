"""Raises this process's limit on open files, so that many episodes can be open at once."""

from __future__ import annotations

import resource

_FILES_PER_EPISODE = 3
"""File descriptors per open episode: its channel, its standard error and its pidfd."""
_FILES_PER_DRIVEN_EPISODE = 8
"""File descriptors per episode that a program drives, including its connections."""
_SPARE_CONNECTIONS = 256
_SPARE_FILES = 512


def make_room(episodes: int, *, programs: bool = False) -> None:
    """Raise the open-file limit for `episodes` concurrent episodes, some driven by `programs`."""
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
    """Return how many connections may be open when agent programs drive `episodes` episodes."""
    return (_FILES_PER_DRIVEN_EPISODE - _FILES_PER_EPISODE) * episodes + _SPARE_CONNECTIONS
