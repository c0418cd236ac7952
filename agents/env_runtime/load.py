"""Loads an environment by name and wraps it in an adapter."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from contextlib import suppress
from typing import Any, Optional, cast

from keel.agents.env_runtime.errors import InvalidEnvironment, error_location, error_text
from keel.agents.env_runtime.games import TextGame
from keel.agents.env_runtime.openenv import (
    CLIENT,
    OpenEnv,
    RemoteSession,
    WrappedObject,
    is_address,
    is_openenv,
)
from keel.agents.env_runtime.tool_objects import Object, functions_of, methods_of

_ADAPTER_OPTIONS = ("play_by", "scale", "rules")
"""Arguments that go to the adapter instead of the environment."""
_loaded: dict[str, Any] = {}


def preload(target: str, action: Optional[str]) -> None:  # noqa: UP045
    """Import the modules that every episode needs."""
    late: tuple[str, ...] = (CLIENT,)
    if not is_address(target):
        load(target)
        if action:
            load(action)
        name = target.partition(":")[0]
        module = sys.modules[_module_name(name) if name.endswith(".py") else name]
        late = getattr(module, "PRELOAD", ())
    for name in late:
        with suppress(ImportError):  # reported when it is used
            importlib.import_module(name)


def load(target: str) -> Any:
    """Return the object named by `module:name`, `module` or `file.py:name`. Each object is loaded
    only once per process."""
    if target in _loaded:
        return _loaded[target]
    name, _, attribute = target.partition(":")
    if name.endswith(".py") and not os.path.isfile(name):
        raise InvalidEnvironment(f"there is no {name} in folder {os.getcwd()}")
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(_module_name(name), name)
            assert spec is not None and spec.loader is not None
            value: Any = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = value
            spec.loader.exec_module(value)
        else:
            value = importlib.import_module(name)
    except Exception as error:  # a module may raise anything
        outer, _, inner = name.rpartition(".")
        cure = error_location(error)
        if hasattr(sys.modules.get(outer), inner):
            cure = f"write {outer}:{inner}"
        elif isinstance(error, ModuleNotFoundError):
            install = f"{sys.executable} -m pip install {str(error.name).partition('.')[0]}"
            cure = f"looked in {', '.join(filter(None, sys.path))}; if it is a package: {install}"
        message = f"{name} cannot be imported: {error_text(error)}; {cure}"
        raise InvalidEnvironment(message) from error
    for part in filter(None, attribute.split(".")):
        if not hasattr(value, part):
            names = cast("dict[str, Any]", vars(value))
            public = ", ".join(key for key in names if not key.startswith("_"))
            raise InvalidEnvironment(f"{name} has no {part!r}; it has {public or 'nothing public'}")
        value = getattr(value, part)
    _loaded[target] = value
    return value


def _module_name(path: str) -> str:
    """Return the module name for a file. It is the stem of the file name, unless that would shadow
    another module."""
    name = os.path.basename(path)[:-3]
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    origin = spec.origin if spec is not None else None
    same = origin is None or (os.path.exists(origin) and os.path.samefile(origin, path))
    return name if same else f"{name} ({path})"


def make(request: dict[str, Any]) -> Any:
    target, kind, arguments = request["target"], request["kind"], request["arguments"]
    options = {key: arguments[key] for key in _ADAPTER_OPTIONS if key in arguments}
    rest = {key: value for key, value in arguments.items() if key not in options}
    if is_address(target):
        return OpenEnv(RemoteSession(target, **rest), **options)
    value = load(target)
    if kind == "openenv" or (kind == "auto" and is_openenv(value)):
        action = rest.pop("action", None)
        return OpenEnv(WrappedObject(value(**rest), action and load(action)), **options)
    if kind == "auto":
        no_object = inspect.isroutine(value) or inspect.ismodule(value)
        kind = "class"
        if no_object or type(value) in (list, tuple):
            kind = "functions"
        elif hasattr(value, "reset") and hasattr(value, "step"):
            kind = "game"
    if kind == "functions":
        functions = functions_of(value)
        if not functions:
            raise InvalidEnvironment(f"{target} has no public function to be a tool")
        return Object(None, functions)
    if kind == "class":
        environment = value(**arguments) if callable(value) else value
        return Object(environment, methods_of(environment))
    if "score" in rest:
        options["score"] = rest.pop("score")
    environment = value(**rest) if callable(value) else value
    if not hasattr(environment, "reset") or not hasattr(environment, "step"):
        raise InvalidEnvironment(f"{target} is not a game: it has no `reset` and `step`")
    return TextGame(environment, **options)
