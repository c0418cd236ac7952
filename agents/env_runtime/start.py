"""The process that one episode's environment lives in: `python start.py`, any Python from 3.9.
(And with `call module:function` the one of an agent program that is a function.)

JSON lines over what are standard input and output at the start; what the environment prints goes to
standard error.

    → {"id": 1, "do": "open", "target": "my_env:Shop", "kind": "auto", "arguments": {…},
       "paths": […], "seed": 3, "memory_mib": 2048, "task": {…}}
    ← {"id": 1, "is": {"messages": […] or null, "tools": […], "grades": whether it has a verdict}}
    → {"id": 2, "do": "call", "name": "buy", "arguments": {…}, "call_s": its deadline}
    ← {"id": 2, "is": {"text": "…", "failed": false, "done": false}}
    → {"id": 3, "do": "reply", "said": {…}}
    ← {"id": 3, "is": {"message": {…} or null}}
    → {"id": 4, "do": "verdict", "messages": […], "finish_reason": "stop"}
    ← {"id": 4, "is": {"parts": {…}, "facts": {…}}}
    → {"id": 5, "do": "close"}
    ← {"id": 5, "is": {}}

In place of "is": "refused" (what was named cannot be an environment: why, and the cure), "raised"
with "at" (the environment's own exception), or "memory".

`python start.py parent` is the process that such processes are forked from: parent.py.
"""

from __future__ import annotations

# ruff: noqa: E402 (where modules are found is settled first)
import os
import sys

_HERE, _, _ = __file__.rpartition("/")
if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(_HERE):  # links are followed
    del sys.path[0]  # the files beside this one are no modules of the environment's

import importlib.util

if "keel" not in sys.modules:  # this interpreter need not have Keel: the package by its file
    _keel = os.path.dirname(os.path.dirname(os.path.abspath(_HERE)))
    _keel = _keel if os.path.basename(_keel) == "keel" else os.path.join(_keel, "keel")
    _spec = importlib.util.spec_from_file_location("keel", os.path.join(_keel, "__init__.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules["keel"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["keel"])

from keel.agents.env_runtime.episode import serve, stand_alone


def run() -> None:
    if sys.argv[1:] == ["parent"]:
        from keel.agents.env_runtime.fork_server import main  # noqa: PLC0415  (most processes do without)

        return main()
    if sys.argv[1:2] == ["call"]:  # an agent program that is a function
        from keel.agents.env_runtime.call import call  # noqa: PLC0415
        from keel.agents.env_runtime.errors import InvalidEnvironment  # noqa: PLC0415

        try:
            return call(sys.argv[2])
        except InvalidEnvironment as error:
            sys.exit(str(error))
    stand_alone()
    requests = open(os.dup(0), "rb")  # noqa: SIM115
    replies = open(os.dup(1), "wb")  # noqa: SIM115
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # what the environment prints must not be taken for a reply
    os.close(nowhere)
    serve(requests, replies)


if __name__ == "__main__":
    run()
