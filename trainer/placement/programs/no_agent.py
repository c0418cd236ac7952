"""In the place of the agent of Ray's dashboard, which a raylet wants beside it: says, as that of a
Ray without its dashboard does, that none of its ports is open, and ends with the raylet.

A program of its own: `python no_agent.py SESSION_DIR NODE_ID`.
"""

from __future__ import annotations

import os
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NONE = "-1"
LOOK_S = 1.0


def main(session: str, node: str) -> None:
    raylet = os.getppid()
    for port in PORTS:
        path = os.path.join(session, f"{port}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write(NONE)
        os.replace(f"{path}.new", path)  # the raylet reads it as soon as it is there
    while os.getppid() == raylet:
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
