"""Runs a command, and ends it with everything that it has started.

    python reaper.py COMMAND …

The end of the guard's standard input is the order to end: whoever holds the other end of that pipe
may die in any way. When the command is gone, however that came, so is everything it left behind,
and only then does the guard write its exit status to standard output and leave. A command that
stands still (SIGSTOP) is ended, too. The command's own
output goes to the guard's standard error.

vLLM's API server needs one: when it is killed, its engine goes on as an orphan and keeps the GPU.
Runs as a script, of the standard library alone, so that it starts in milliseconds. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

GRACE_S = 5.0
"""Between asking the command to end and ending it."""
LOOK_S = 1.0
STOPPED = 5
"""Looks in a row, `LOOK_S` apart, that find the command stopped, after which it is ended."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> None:
    # A grandchild of whoever asked: Ray kills the children of an actor that ends, and the work of
    # this one begins then.
    if os.fork():
        os._exit(0)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the command leaves behind becomes our child

    def begun() -> None:
        # The second line of defence, should this process be killed itself.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # Whoever asked may be deaf to it, and its children with it (a run's actors are).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=begun,
    )
    ended, looks = os.pidfd_open(server.pid), 0
    while not select.select([sys.stdin.fileno(), ended], [], [], LOOK_S)[0]:
        looks = looks + 1 if stopped(server.pid) else 0
        if looks == STOPPED:  # it, or a process that it waits for
            print(f"{looks} looks found it stopped (SIGSTOP): it is ended", file=sys.stderr)
            server.kill()
            break
    server.terminate()
    try:
        server.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    end_children()
    print(server.returncode, flush=True)


def stopped(pid: int) -> bool:
    """Whether a process, or one below it, has been stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        tasks = [t / "children" for t in Path(f"/proc/{pid}/task").iterdir()]
        below = [child for task in tasks for child in task.read_text().split()]
    except OSError:  # it has just ended
        return False
    return state == "T" or any(stopped(int(child)) for child in below)


def end_children() -> None:
    """Kill all children of this process, and theirs, which become ours; wait until all are gone."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
