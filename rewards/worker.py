"""The worker process, which runs verifiers on untrusted text.

`python -m keel.rewards.worker FD DUMP` reads and writes JSON lines over the socket FD. The
process never sends pickles, because it has handled the policy's text and loading a pickle can run
code.

    ← {"spec": {…}, "completions": ["…"], "first_s": 30.0, "timeout_s": 3.0, "code": {…}}
    → {"ready": true}              the verifier is built
    → {"score": 1.0}               one line per completion, in order
    → {"score": 0.3, "parts": {"samples": 1.0}}            with further parts
    → {"error": "ValueError: …", "at": "my.py:12 in f"}    instead of a score
    → {"refused": "…"}             instead of "ready": the spec cannot be read

`first_s` is the time limit for the first completion, and `timeout_s` for each later one. At a
deadline, a timer signal ends the process, whatever it is doing and even if its parent is gone. The
parent then starts a new process. The stack trace of a timeout or crash is written to the file
descriptor DUMP.

Only the user's functions can print to standard output. The output of verifiers is discarded,
because they print something for every completion that they cannot parse.
"""

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
from typing import Any, cast

from keel.configs.sections.rewards import CodeConfig
from keel.rewards.custom import BadReward
from keel.rewards.failures import error_location
from keel.rewards.rules.verifiers import Verifier, verifier_for
from keel.rl.strict_json import allow_long_integers
from keel.rl.supervisor import PREEMPTION

_MAX_ERROR_CHARACTERS = 500
_MEMORY_BYTES = 8 << 30
"""Size of the address space that verifiers may use in addition to the memory already allocated."""


def _limit_memory(extra: int | None) -> None:
    """Limit this process's address space to its current size plus `extra` bytes, or remove the
    limit if `extra` is None.

    User functions have no limit, because they may load a model, and GPU drivers reserve more
    address space than they use.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard
    if extra is not None:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + extra
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def reply_to(verifier: Verifier, completion: str) -> dict[str, Any]:
    """Verify a completion. Returns the JSON reply for the parent process."""
    try:
        score = verifier(completion)
        if not isinstance(score, Mapping):
            return {"score": score}
        return {"score": score["correct"], "parts": {k: score[k] for k in score if k != "correct"}}
    except Exception as error:  # third-party code on hostile text may raise anything
        message = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
        at = "" if isinstance(error, BadReward) else error_location(error)
        return {"error": message, "at": at}


def _serve(connection: socket.socket) -> None:
    stdout, unlimited = sys.stdout, False
    with connection.makefile("rwb") as stream, open(os.devnull, "w") as devnull:

        def send(reply: dict[str, Any]) -> None:
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()

        for line in stream:
            request = json.loads(line)
            is_function = request["spec"].get("kind") == "function"
            sys.stdout = stdout if is_function else devnull
            if is_function is not unlimited:
                unlimited = is_function
                _limit_memory(None if is_function else _MEMORY_BYTES)
            try:
                verifier = verifier_for(request["spec"], CodeConfig(**request["code"]))
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


def _ignore(number: int, frame: object) -> None:
    pass


def main() -> None:
    # Only the parent reacts. If these signals, which all processes of a job receive, killed a
    # worker, the completion would be blamed. A handler, because programs would inherit SIG_IGN.
    for number in (signal.SIGINT, *PREEMPTION):
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PREEMPTION)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    dump = int(sys.argv[2])
    faulthandler.enable(dump, all_threads=False)
    faulthandler.register(signal.SIGALRM, dump, all_threads=False, chain=True)  # then exits
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    _limit_memory(_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allow_long_integers()
    warnings.simplefilter("ignore")  # `eval` of an answer warns about the answer's syntax
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
