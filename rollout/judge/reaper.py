"""Runs a command, and stops it together with all its descendants when its owner dies.

    python reaper.py COMMAND …

The reaper stops the command when its own standard input closes, which happens at the latest when
the owner dies. It also stops the command if the command is suspended (SIGSTOP). Once the command
and all its descendants have ended, the reaper prints the command's exit status and exits. The
command's output goes to the reaper's standard error.

Without the reaper, the engine of a killed vLLM API server would keep running and keep its GPU
memory. The script starts within milliseconds, because it imports only the standard library and
`keel.rl.supervisor`. It works on Linux only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # `-S` leaves out the folder of `keel`
    sys.path.append(str(Path(__file__).parents[3]))

from keel.rl.supervisor import GRACE_S, STOPPED_POLLS, is_stopped, kill_descendants

_POLL_S = 1.0
_KILLED_S = 10.0
"""Seconds for killed processes to exit. With `GRACE_S`, it is less than the owner's `EXIT_S`."""
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
        stopped_polls = stopped_polls + 1 if is_stopped(server.pid, descendants=True) else 0
        if stopped_polls == STOPPED_POLLS:
            print(f"killed after {stopped_polls} polls in state stopped (SIGSTOP)", file=sys.stderr)
            server.kill()
            break
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    kill_descendants(os.getpid(), _KILLED_S)
    status = server.poll()
    # In many containers, the first process would never reap them.
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    print(status, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
