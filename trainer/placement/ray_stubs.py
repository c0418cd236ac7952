"""Stubs that the raylet starts in place of parts of Ray. They use only the standard library.

agent SESSION_DIR NODE_ID  replaces the dashboard agent: reports that it has no open ports, and
                           exits together with the raylet
bound COMMAND ARG…         runs a command that the kernel kills when its parent dies
"""

import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def _run_agent(session: str, node: str) -> None:
    raylet = os.getppid()
    for port in _PORTS:
        path = os.path.join(session, f"{port}_{node}")
        with open(f"{path}.new", "w") as file:
            file.write("-1")
        os.replace(f"{path}.new", path)  # the raylet reads it as soon as it exists
    while os.getppid() == raylet:
        time.sleep(1.0)


def _run_bound(*command: str) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # it has not exited meanwhile
        os.execvp(command[0], command)


if __name__ == "__main__":
    {"agent": _run_agent, "bound": _run_bound}[sys.argv[1]](*sys.argv[2:])
