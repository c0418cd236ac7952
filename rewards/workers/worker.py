"""The process that runs verifiers on untrusted text: `python -m keel.rewards.workers.worker FD`
(and `STACKS`, another file descriptor).

It speaks JSON lines over the socket it inherits as FD. JSON, because what comes out of a process
that ran a policy's text must not be unpickled.

    ← {"spec": {…}, "completions": ["…"], "first_s": 30.0, "timeout_s": 3.0, "code": {…}}
       first_s: of the first completion; code: as `CodeConfig`
    → {"ready": true}              the verifier is built (libraries are imported at the first)
    → {"score": 1.0}               one line per completion, in order
    → {"score": 0.3, "parts": {"samples": 1.0}}            where the verifier says more
    → {"error": "ValueError: …", "at": "my.py:12 in f"}    in place of a score
    → {"refused": "…"}             in place of "ready": no rule reads the spec

Each completion is verified under a timer whose signal ends the process, whatever it is stuck in,
even if the parent is gone. The parent sees the socket close and starts another worker. What a
process says when it ends that way, where it was, it writes to STACKS, else to standard error.

Standard output is for what the user's functions print. Verifiers print about every completion that
they cannot read, so theirs goes nowhere.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from io import TextIOWrapper
from types import FrameType
from typing import Any, cast

from keel.rewards.code.verifier import CodeSettings
from keel.rewards.failure_budget import place
from keel.rewards.rules.verifiers import Verifier, verifier_for

PREEMPTION = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Schedulers send these to every process of a job: what to make of them is the parent's business,
and a worker that ended of one would look as if a completion had ended it."""
MOST_SAID = 500
"""Characters of an error: it may quote a completion."""
MEMORY_BYTES = 8 << 30
"""Address space of a worker, beyond what functions have made it take: a completion that asks for
more gets a MemoryError, not the machine."""


def bound(more: int | None) -> None:
    """So many bytes of address space more than there are. None: no bound, for what the recipe's
    author has written: it may keep a model, or use a GPU, whose driver reserves far more."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = hard
    if more is not None:
        with open("/proc/self/statm") as file:
            wanted = int(file.read().split()[0]) * resource.getpagesize() + more
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def reply_to(verifier: Verifier, completion: str) -> dict[str, Any]:
    """The reply for one completion."""
    try:
        found = verifier(completion)
        if not isinstance(found, Mapping):
            return {"score": found}
        return {"score": found["correct"], "parts": {k: found[k] for k in found if k != "correct"}}
    except Exception as error:  # third-party code on hostile text may raise anything
        at = getattr(error, "at", "") or place(error)
        notes: list[str] = getattr(error, "__notes__", [])
        said = f"{type(error).__name__}: {error}"[:MOST_SAID]
        return {"error": "; ".join([said, *notes])[: 2 * MOST_SAID], "at": at}


def serve(connection: socket.socket) -> None:
    """Serve requests until the other side closes."""
    theirs, unbound = sys.stdout, False
    with connection.makefile("rwb") as stream, open(os.devnull, "w") as nowhere:

        def send(reply: dict[str, Any]) -> None:
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()

        for line in stream:
            request = json.loads(line)
            ours = request["spec"].get("kind") == "function"
            sys.stdout = theirs if ours else nowhere
            if ours is not unbound:
                unbound = ours
                bound(None if ours else MEMORY_BYTES)
            try:
                verifier = verifier_for(request["spec"], CodeSettings.from_knobs(request["code"]))
            except (KeyError, TypeError, ValueError) as error:
                send({"refused": f"{type(error).__name__}: {error}"})
                continue
            send({"ready": True})
            for number, completion in enumerate(request["completions"]):
                timeout_s = request["timeout_s" if number else "first_s"]
                signal.setitimer(signal.ITIMER_REAL, timeout_s)
                reply = reply_to(verifier, completion)
                signal.setitimer(signal.ITIMER_REAL, 0)
                send(reply)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


def main() -> None:
    # Theirs to handle is the parent's. A handler, as programs under test would inherit it if these
    # were ignored, or blocked as they are when this starts.
    for number in (signal.SIGINT, *PREEMPTION):
        signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    stacks = int(sys.argv[2]) if len(sys.argv) > 2 else sys.stderr.fileno()
    faulthandler.enable(stacks, all_threads=False)
    faulthandler.register(signal.SIGALRM, stacks, all_threads=False, chain=True)  # then it ends us
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    bound(MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")  # `eval` of an answer warns about the answer's own syntax
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
