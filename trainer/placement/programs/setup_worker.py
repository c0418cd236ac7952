"""In the place of Ray's program of this name, which becomes a worker that has the environment
variables of its actor, and for that loads Ray, half a second a process. What this one does not know
of a runtime environment is left to Ray's.

A program of its own: `python setup_worker.py WORKER.py ARGUMENT…`, of which a raylet leaves it out,
by its name, where a worker has no runtime environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

CONTEXT, LANGUAGE = "--serialized-runtime-env-context", "--language"
KNOWN = {"env_vars", "py_executable"}
"""What of a context is set here."""
PLAIN = re.compile(r"/[\w./+@:-]+|'/[^']+'")
"""A path as a shell reads it, quoted or not."""
UNSET = re.compile(r"\$\{[A-Z0-9_]+\}")
"""A variable that is not there; Ray puts nothing in its place."""


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command of the worker, whose variables this process has from then on; or of Ray's
    program, with the same arguments."""
    passed: list[str] = []
    told: dict[str, str] = {}
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and name in (CONTEXT, LANGUAGE):
            told[name] = value
        else:
            passed.append(word)
    context: dict[str, Any] = json.loads(told.get(CONTEXT) or "{}")
    python = context.get("py_executable") or ""
    further = {name for name, value in context.items() if value} - KNOWN
    if further or told.get(LANGUAGE) != "PYTHON" or not PLAIN.fullmatch(python):
        theirs = os.path.join(os.path.dirname(arguments[0]), os.path.basename(__file__))
        return [sys.executable, theirs, *arguments]
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = UNSET.sub("", os.path.expandvars(value))
    return [python.strip("'"), *passed]


if __name__ == "__main__":
    command = command_of(sys.argv[1:])
    os.execv(command[0], command)
