"""Runs a command that the kernel kills when its parent dies.

Usage: `python bound.py COMMAND ARG…`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # it has not exited meanwhile
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
