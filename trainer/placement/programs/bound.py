"""A command that the kernel ends together with the process that has started it.

A program of its own: `python bound.py COMMAND ARGUMENT…`.
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
    if os.getppid() == parent:  # it has not ended meanwhile
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
