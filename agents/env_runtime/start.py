"""Entry point of all processes, `python start.py server:serve_channel`. It supports Python 3.9 or
later.

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

Instead of "is", a reply may have "fault" and "why". A fault is "start" (the target is not an
environment), "raised" (an exception in the environment's own code) or "memory".

The argument names the function to run: `server:serve_channel`, `server:call_function` (an agent
program that is a function), `fork_server:main` or `drive:main`.
"""

from __future__ import annotations

# ruff: noqa: E402 (the module path must be set first)
import os
import sys

_HERE, _, _ = __file__.rpartition("/")
if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(_HERE):
    del sys.path[0]  # files in this folder are not the environment's modules

import importlib
import importlib.util

if "keel" not in sys.modules:  # this interpreter need not have Keel installed
    _keel = os.path.dirname(os.path.dirname(os.path.abspath(_HERE)))
    _keel = _keel if os.path.basename(_keel) == "keel" else os.path.join(_keel, "keel")
    _spec = importlib.util.spec_from_file_location("keel", os.path.join(_keel, "__init__.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules["keel"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["keel"])

if __name__ == "__main__":
    _module, _, _function = sys.argv[1].partition(":")
    getattr(importlib.import_module(f"keel.agents.env_runtime.{_module}"), _function)()
