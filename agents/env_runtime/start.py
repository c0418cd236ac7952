"""Starts all processes of episodes, as `python start.py MODULE:FUNCTION`. It supports Python 3.9 or
later, without Keel or any other package installed.

MODULE:FUNCTION is `server:serve_channel` (an environment), `fork_server:main` (forks environments),
`drive:main` (an agent program) or `server:call_function` (an agent program that is a function).
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
