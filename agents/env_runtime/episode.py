"""Requests about one episode's environment, and their answers: the lines of start.py."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from keel.agents.env_runtime.errors import (
    EnvironmentGone,
    InvalidEnvironment,
    error_location,
    error_text,
)
from keel.agents.env_runtime.load import load, make
from keel.agents.env_runtime.openenv import is_address
from keel.agents.env_runtime.tool_objects import Object

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
        raise InvalidEnvironment(f"no such request: {do}")

    def _open(self, request: Request) -> Request:
        limit_memory(request["memory_mib"])
        sys.path[:0] = request["paths"]
        seed = request["seed"]
        random.seed(0)  # what a module draws when it is imported is the same for all episodes
        if not is_address(request["target"]):
            load(request["target"])
        random.seed(seed)
        self._environment = make(request)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        opening = self._environment.opening(request["task"], seed)
        return {**opening, "grades": self._environment.grades}

    def _call(self, request: Request) -> Request:
        if isinstance(self._environment, Object):
            self._environment.may_take(request["call_s"])
        try:
            return self._environment.call(request["name"], request["arguments"])
        except (MemoryError, EnvironmentGone):
            raise
        except Exception as error:  # a tool may raise anything: the policy is told, and goes on
            print(
                f"{request['name']}: {error_text(error)} ({error_location(error)})", file=sys.stderr
            )
            done = getattr(self._environment, "done", False)
            return {"text": error_text(error), "failed": True, "done": done}


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


def serve(requests: Any, replies: Any) -> None:
    """One episode, until Keel is gone. After `close` it waits to be killed: what it started is
    found below a process that lives."""
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
        except InvalidEnvironment as error:
            text = json.dumps({"id": request["id"], "refused": str(error)})
        except Exception as error:
            reply = {"raised": error_text(error), "at": error_location(error)}
            text = json.dumps({"id": request["id"], **reply})
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(text.encode() + b"\n")
        replies.flush()
