"""Free ports for tests that must name a port before using it."""

import random
import socket
from contextlib import suppress


def free_ports(count: int) -> list[int]:
    """Return ports between the range of Ray workers and the ephemeral range, so no other process
    takes them."""
    ports: list[int] = []
    for port in random.sample(range(21_000, 32_000), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports[:count]
