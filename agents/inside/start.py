"""The process that one episode's environment lives in: `python start.py`, any Python from 3.9.
(And with `call module:function` the one of an agent program that is a function.)

JSON lines over what are standard input and output at the start; what the environment prints goes to
standard error.

    → {"id": 1, "do": "open", "target": "my_env:Shop", "kind": "auto", "arguments": {…},
       "paths": […], "seed": 3, "memory_mib": 2048, "task": {…}}
    ← {"id": 1, "is": {"messages": […] or null, "tools": […]}}
    → {"id": 2, "do": "call", "name": "buy", "arguments": {…}}
    ← {"id": 2, "is": {"text": "…", "failed": false, "done": false}}
    → {"id": 3, "do": "reply", "said": {…}}
    ← {"id": 3, "is": {"message": {…} or null}}
    → {"id": 4, "do": "verdict", "messages": […], "finish_reason": "stop"}
    ← {"id": 4, "is": {"parts": {…}, "facts": {…}}}
    → {"id": 5, "do": "close"}
    ← {"id": 5, "is": {}}

In place of "is": "refused" (what was named cannot be an environment: why, and the cure), "raised"
with "at" (the environment's own exception), or "memory".
"""

from __future__ import annotations

# ruff: noqa: E402 (where modules are found is settled first)
import os
import sys

_HERE, _, _ = __file__.rpartition("/")
if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(_HERE):  # links are followed
    del sys.path[0]  # the files beside this one are no modules of the environment's

import importlib.util
import json
import random
from typing import Any

if "keel" not in sys.modules:  # this interpreter need not have Keel: the package by its file
    _keel = os.path.dirname(os.path.dirname(os.path.abspath(_HERE)))
    _keel = _keel if os.path.basename(_keel) == "keel" else os.path.join(_keel, "keel")
    _spec = importlib.util.spec_from_file_location("keel", os.path.join(_keel, "__init__.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules["keel"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["keel"])

from keel.agents.inside.call import call
from keel.agents.inside.errors import Lost, Refused, place, told
from keel.agents.inside.load import make

Request = dict[str, Any]


class Episode:
    """One environment, and the requests about it."""

    def __init__(self) -> None:
        self._environment: Any = None

    def answer(self, request: Request) -> Request:
        """Raises what the environment raises."""
        do = request["do"]
        if do == "open":
            return self._open(request)
        if do == "call":
            return self._call(request)
        if do == "reply":
            return {"message": self._environment.reply(request["said"])}
        if do == "verdict":
            return self._environment.verdict(request["messages"], request["finish_reason"])
        if do == "close":
            if self._environment is not None:
                self._environment.close()
            return {}
        raise Refused(f"no such request: {do}")

    def _open(self, request: Request) -> Request:
        limit_memory(request["memory_mib"])
        sys.path[:0] = request["paths"]
        seed = request["seed"]
        random.seed(seed)
        self._environment = make(request)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        return self._environment.opening(request["task"], seed)

    def _call(self, request: Request) -> Request:
        try:
            return self._environment.call(request["name"], request["arguments"])
        except (MemoryError, Lost):
            raise
        except Exception as error:  # a tool may raise anything: the policy is told, and goes on
            print(f"{request['name']}: {told(error)} ({place(error)})", file=sys.stderr)
            return {"text": told(error), "failed": True}


def limit_memory(mib: int | None) -> None:
    import resource  # noqa: PLC0415  (not on every system)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mib is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = mib << 20
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def stand_alone() -> None:
    """Keel may be killed at any time, and nobody would miss this process then. And what it starts
    may be the policy's: that must not write to the memory in which the verdict is made."""
    try:
        import ctypes  # noqa: PLC0415

        prctl = ctypes.CDLL(None).prctl
        prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody else opens /proc/…/mem
    except Exception:  # another system, or a filter: the end of standard input is seen all the same
        pass


def main() -> None:
    if sys.argv[1:2] == ["call"]:  # an agent program that is a function
        try:
            call(sys.argv[2])
        except Refused as error:
            sys.exit(str(error))
        return
    stand_alone()
    requests = open(os.dup(0), "rb")  # noqa: SIM115
    replies = open(os.dup(1), "wb")  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # what the environment prints must not be taken for a reply
    os.close(nowhere)
    episode = Episode()
    for line in requests:
        request = json.loads(line)
        reply: Request
        try:
            # Text of it here: what cannot be written down is the environment's failure, too.
            reply = {"is": episode.answer(request)}
            text = json.dumps({"id": request["id"], **reply}, allow_nan=True)
        except MemoryError:
            text = json.dumps({"id": request["id"], "memory": True})
        except Refused as error:
            text = json.dumps({"id": request["id"], "refused": str(error)})
        except Exception as error:
            reply = {"raised": told(error), "at": place(error)}
            text = json.dumps({"id": request["id"], **reply})
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(text.encode() + b"\n")
        replies.flush()
        if request["do"] == "close":
            break


if __name__ == "__main__":
    main()
