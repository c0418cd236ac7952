"""Replaces Ray's `setup_worker.py`, which has to load Ray just to set the environment variables for
a worker.

Runtime environments that contain anything else are passed on to Ray's program. The file keeps the
name of Ray's program, because a raylet recognises it by this name and skips it for workers without
a runtime environment. Usage: `python setup_worker.py WORKER.py ARG…`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

CONTEXT, LANGUAGE = "--serialized-runtime-env-context", "--language"
SUPPORTED = {"env_vars", "py_executable"}
PLAIN_PATH = re.compile(r"/[\w./+@:-]+|'/[^']+'")
"""Matches a path without shell syntax, quoted or not."""
UNSET = re.compile(r"\$\{[A-Z0-9_]+\}")
"""Matches a reference to an unset variable, which Ray replaces with nothing."""


def command_of(arguments: Sequence[str]) -> list[str]:
    """Set the environment variables, and return the command that starts the worker, or the command
    for Ray's own program."""
    passed: list[str] = []
    options: dict[str, str] = {}
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and name in (CONTEXT, LANGUAGE):
            options[name] = value
        else:
            passed.append(word)
    context: dict[str, Any] = json.loads(options.get(CONTEXT) or "{}")
    python = context.get("py_executable") or ""
    unsupported = {name for name, value in context.items() if value} - SUPPORTED
    if unsupported or options.get(LANGUAGE) != "PYTHON" or not PLAIN_PATH.fullmatch(python):
        original = os.path.join(os.path.dirname(arguments[0]), os.path.basename(__file__))
        return [sys.executable, original, *arguments]
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = UNSET.sub("", os.path.expandvars(value))
    return [python.strip("'"), *passed]


if __name__ == "__main__":
    command = command_of(sys.argv[1:])
    os.execv(command[0], command)
