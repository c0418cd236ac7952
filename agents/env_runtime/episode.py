"""Handles the requests to the environment of one episode. start.py describes the protocol."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any, cast

from keel.agents.env_runtime.errors import (
    EnvironmentGone,
    InvalidEnvironment,
    error_location,
    error_text,
)
from keel.agents.env_runtime.load import load, make
from keel.agents.env_runtime.openenv import is_address
from keel.agents.env_runtime.processes import limit_memory
from keel.agents.env_runtime.tool_objects import Object, bind_arguments, parameters_of, resolve

Request = dict[str, Any]


def redirect_prints() -> None:
    """Redirect standard output to standard error, so that printed text is not mistaken for
    replies."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)


def take_channel() -> tuple[Any, Any]:
    """Return standard input and output as files, and redirect later output to standard error."""
    requests, replies = open(os.dup(0), "rb"), open(os.dup(1), "wb")  # noqa: SIM115
    redirect_prints()
    return requests, replies


def failure_of(error: Exception) -> Request:
    if isinstance(error, MemoryError):
        return {"memory": True}
    if isinstance(error, InvalidEnvironment):
        return {"refused": str(error)}
    return {"raised": error_text(error), "at": error_location(error)}


class _Episode:
    def __init__(self) -> None:
        self._environment: Any = None

    def answer(self, request: Request) -> Request:
        """Handle a request and return the reply. Exceptions from the environment are not caught."""
        action = request["do"]
        if action == "open":
            return self._open(request)
        if action == "call":
            return self._call(request)
        if action == "reply":
            return {"message": self._environment.reply(request["turn"])}
        if action == "verdict":
            return self._environment.verdict(request["messages"], request["finish_reason"])
        if self._environment is not None:
            self._environment.close()
        return {}

    def _open(self, request: Request) -> Request:
        limit_memory(request["memory_mib"])
        sys.path[:0] = request["paths"]
        seed = request["seed"]
        random.seed(0)  # draws at import are the same for all episodes
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
            self._environment.set_call_time(request["call_s"])
        try:
            return self._environment.call(request["name"], request["arguments"])
        except (MemoryError, EnvironmentGone):
            raise
        except Exception as error:  # the policy sees the error and may try again
            text = error_text(error)
            print(f"{request['name']}: {text} ({error_location(error)})", file=sys.stderr)
            done = getattr(self._environment, "done", False)
            return {"text": text, "failed": True, "done": done}


def serve(requests: Any, replies: Any) -> None:
    """Serve one episode. After `close`, wait to be killed, so that descendants can still be
    found."""
    episode = _Episode()
    for line in requests:
        request = json.loads(line)
        try:
            # Encoding is part of the try: an unencodable result is the environment's failure.
            text = json.dumps({"id": request["id"], "is": episode.answer(request)}, allow_nan=True)
        except Exception as error:
            text = json.dumps({"id": request["id"], **failure_of(error)})
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(text.encode() + b"\n")
        replies.flush()


def call_function(target: str) -> None:
    """Run an agent program that is a function, given as `module:function` or `file.py:function`. It
    may declare the parameters `task`, `prompt` (the last user message) and `seed`; see
    `bind_arguments`. The result is written to KEEL_VERDICT. A string is the answer, and a number or
    a dict of numbers is the verdict. A verdict can be paired with facts, as in `(verdict, facts)`.
    """
    sys.path.insert(0, os.getcwd())
    function = load(target)
    if not callable(function):
        raise InvalidEnvironment(f"{target} is not a function")
    with open(os.environ["KEEL_TASK_FILE"], encoding="utf-8") as file:
        task = json.load(file)
    prompts = [m["content"] for m in task["messages"] if m["role"] == "user"]
    values = {
        "task": task,
        "prompt": prompts[-1] if prompts else task["messages"][-1]["content"],
        "seed": int(os.environ["KEEL_SEED"]),
    }
    parameters = [
        one
        for one in parameters_of(function)
        if one.name in values or one.default is one.empty or one.kind is one.VAR_KEYWORD
    ]
    positional, named = bind_arguments(target, parameters, values)
    result = resolve(function(*positional, **named))
    if result is None:
        return
    parts, facts = cast("Any", result if isinstance(result, tuple) else (result, {}))
    verdict: Request = {"answer": result}
    if not isinstance(result, str):
        scores = cast("Any", parts if isinstance(parts, dict) else {"correct": float(parts)})
        verdict = {"parts": scores, "facts": facts}
    with open(os.environ["KEEL_VERDICT"], "w", encoding="utf-8") as file:
        json.dump(verdict, file, default=str)
