"""Replaces Ray's dashboard agent: reports that it has no open ports, and exits with the raylet.

The raylet runs `ray_stub.py SESSION_DIR NODE_ID`. Only the standard library is used.
"""

import os
import sys
import time

_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")

if __name__ == "__main__":
    session, node = sys.argv[1:]
    raylet = os.getppid()
    for port in _PORTS:
        path = os.path.join(session, f"{port}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.replace(f"{path}.new", path)  # the raylet reads it as soon as it exists
    while os.getppid() == raylet:
        time.sleep(1.0)
