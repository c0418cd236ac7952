"""Runs a command, and stops it together with all its descendants when its owner dies.

    python reaper.py COMMAND …

The reaper stops the command when its own standard input closes, which happens at the latest when
the owner dies. It also stops the command if the command is suspended (SIGSTOP). Once the command
and all its descendants have ended, the reaper prints the command's exit status and exits. The
command's output goes to the reaper's standard error.

Without the reaper, the engine of a killed vLLM API server would keep running and keep its GPU
memory. The script uses only the standard library, so that it starts within milliseconds. It works
on Linux only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_GRACE_S = 5.0
"""Seconds to wait between SIGTERM and SIGKILL."""
_KILLED_S = 10.0
"""Seconds to wait for killed processes. A process that hangs in the kernel may never end."""
_POLL_S, _KILL_POLL_S = 1.0, 0.02
_MAX_STOPPED_POLLS = 5
"""Number of consecutive polls that must find the command suspended before the reaper kills it."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> None:
    # Become a grandchild: Ray kills the children of an actor that ends.
    if os.fork():
        os._exit(0)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopt orphaned descendants

    def prepare_child() -> None:
        # In case this process is killed.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # Ray actors block SIGTERM, and children inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=prepare_child,
    )
    ended, stopped_polls = os.pidfd_open(server.pid), 0
    while not select.select([sys.stdin.fileno(), ended], [], [], _POLL_S)[0]:
        stopped_polls = stopped_polls + 1 if _stopped(server.pid) else 0
        if stopped_polls == _MAX_STOPPED_POLLS:
            print(f"killed after {stopped_polls} polls in state stopped (SIGSTOP)", file=sys.stderr)
            server.kill()
            break
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_GRACE_S)
    _kill_children(server)
    print(server.returncode, flush=True)


def _stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        tasks = [t / "children" for t in Path(f"/proc/{pid}/task").iterdir()]
        children = [child for task in tasks for child in task.read_text().split()]
    except OSError:  # just ended
        return False
    return state == "T" or any(_stopped(int(child)) for child in children)


def _kill_children(server: subprocess.Popen[bytes]) -> None:
    """Kill all child processes. This process then adopts its grandchildren, and kills them in the
    next round."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    end = time.monotonic() + _KILLED_S
    while (pids := children.read_text().split()) and time.monotonic() < end:
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            if pid == server.pid:
                server.poll()
            else:
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_KILL_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
