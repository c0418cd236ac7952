"""Replaces Ray's dashboard agent: reports that it has no open ports, and exits with the raylet.

Usage: `python no_agent.py SESSION_DIR NODE_ID`.
"""

from __future__ import annotations

import os
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def main(session: str, node: str) -> None:
    raylet = os.getppid()
    for port in PORTS:
        path = os.path.join(session, f"{port}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.replace(f"{path}.new", path)  # the raylet reads it as soon as it exists
    while os.getppid() == raylet:
        time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
