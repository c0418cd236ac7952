"""An agent program that is a function, called with its task in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, cast

from keel.agents.env_runtime.errors import InvalidEnvironment
from keel.agents.env_runtime.load import load
from keel.agents.env_runtime.tool_objects import bind_arguments, parameters_of, resolve


def call(target: str) -> None:
    """Call `module:function` or `path/to/file.py:function` with what it has parameters for: `task`
    (as in KEEL_TASK), `prompt` (its last user message) and `seed`, or `**` for all; a single
    one of another name is the task. What it returns goes to KEEL_VERDICT: a text is its answer; a
    number, numbers by name, or (either, facts) is its verdict; None says nothing. Raises what it
    raises, and InvalidEnvironment."""
    sys.path.insert(0, os.getcwd())
    function = load(target)
    if not callable(function):
        raise InvalidEnvironment(f"{target} is no function")
    with open(os.environ["KEEL_TASK_FILE"], encoding="utf-8") as file:
        task = json.load(file)
    asked = [m["content"] for m in task["messages"] if m["role"] == "user"]
    given = {
        "task": task,
        "prompt": asked[-1] if asked else task["messages"][-1]["content"],
        "seed": int(os.environ["KEEL_SEED"]),
    }
    wanted = [
        one
        for one in parameters_of(function)
        if one.name in given or one.default is one.empty or one.kind is one.VAR_KEYWORD
    ]
    first, named = bind_arguments(target, wanted, given)
    returned = resolve(function(*first, **named))
    if returned is not None:
        said = verdict(returned)
        with open(os.environ["KEEL_VERDICT"], "w", encoding="utf-8") as file:
            json.dump(said, file, default=str)


def verdict(returned: Any) -> dict[str, Any]:
    if isinstance(returned, str):
        return {"answer": returned}
    parts, facts = cast(
        "tuple[Any, Any]", returned if isinstance(returned, tuple) else (returned, {})
    )
    return {
        "parts": parts if isinstance(parts, dict) else {"correct": float(parts)},
        "facts": facts,
    }
