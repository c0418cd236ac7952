"""Entry point of an episode's process, `python start.py`. It supports Python 3.9 or later.

Messages are JSON lines on the original standard input and output. The environment's prints go to
standard error.

    → {"id": 1, "do": "open", "target": "my_env:Shop", "kind": "auto", "arguments": {…},
       "paths": […], "seed": 3, "memory_mib": 2048, "task": {…}}
    ← {"id": 1, "is": {"messages": […] or null, "tools": […], "grades": false without a verdict}}
    → {"id": 2, "do": "call", "name": "buy", "arguments": {…}, "call_s": its deadline}
    ← {"id": 2, "is": {"text": "…", "failed": false, "done": false}}
    → {"id": 3, "do": "reply", "turn": {…}}
    ← {"id": 3, "is": {"message": {…} or null}}
    → {"id": 4, "do": "verdict", "messages": […], "finish_reason": "stop"}
    ← {"id": 4, "is": {"parts": {…}, "facts": {…}}}
    → {"id": 5, "do": "close"}
    ← {"id": 5, "is": {}}

Instead of "is", a reply may have "refused" (why the target is not an environment, and how to fix
it), "raised" with "at" (an exception in the environment's own code), or "memory".

There are three other modes. `fork-server` runs fork_server.py, `drive` runs drive.py, and `call
module:function` runs an agent program that is a function.
"""

from __future__ import annotations

# ruff: noqa: E402 (the module path must be set first)
import os
import sys

_HERE, _, _ = __file__.rpartition("/")
if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(_HERE):
    del sys.path[0]  # files in this folder are not the environment's modules

import importlib.util

if "keel" not in sys.modules:  # this interpreter need not have Keel installed
    _keel = os.path.dirname(os.path.dirname(os.path.abspath(_HERE)))
    _keel = _keel if os.path.basename(_keel) == "keel" else os.path.join(_keel, "keel")
    _spec = importlib.util.spec_from_file_location("keel", os.path.join(_keel, "__init__.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules["keel"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["keel"])

# ruff: noqa: PLC0415 (each mode has its own imports)


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode == "fork-server":
        from keel.agents.env_runtime.fork_server import main as run_fork_server

        return run_fork_server()
    if mode == "drive":
        from keel.agents.env_runtime.drive import main as drive

        return drive()
    from keel.agents.env_runtime import episode
    from keel.agents.env_runtime.processes import protect_process

    if mode == "call":
        from keel.agents.env_runtime.tool_objects import InvalidEnvironment

        try:
            return episode.call_function(sys.argv[2])
        except InvalidEnvironment as error:
            sys.exit(str(error))
    protect_process()
    episode.serve(*episode.take_channel())


if __name__ == "__main__":
    main()
