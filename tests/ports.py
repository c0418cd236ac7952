"""Ports of this machine for tests that have to name one before it is used."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_ports(count: int) -> list[int]:
    """Below those that the system hands out to whoever asks for any, so that nobody else takes one
    before it is used, and above those that Ray's workers have."""
    found: list[int] = []
    for port in random.sample(range(21_000, 32_000), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found[:count]
