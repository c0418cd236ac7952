"""From the name of an environment to one that is ready to open."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from contextlib import suppress
from typing import Any, Optional

from keel.agents.env_runtime.errors import InvalidEnvironment, error_location, error_text
from keel.agents.env_runtime.games import Game
from keel.agents.env_runtime.openenv import CLIENT, Here, OpenEnv, There, is_address, is_openenv
from keel.agents.env_runtime.tool_objects import Object, functions_of, methods_of

OPTIONS = ("play_by", "scale", "rules")
"""Arguments of the adapter and not of the game."""
_loaded: dict[str, Any] = {}


def preload(target: str, action: Optional[str]) -> None:  # noqa: UP045
    """What each episode would load. Raises InvalidEnvironment as `load`."""
    if is_address(target):
        with suppress(ImportError):  # said when one is opened
            importlib.import_module(CLIENT)
        return
    load(target)
    if action:
        load(action)
    name = target.partition(":")[0]
    module = sys.modules[_module_of(name) if name.endswith(".py") else name]
    for late in getattr(module, "PRELOAD", ()):
        with suppress(ImportError):  # said when it is wanted
            importlib.import_module(late)


def load(target: str) -> Any:
    """What `module:name`, `module` or `file.py:name` names. A process loads it once."""
    if target not in _loaded:
        _loaded[target] = _load(target)
    return _loaded[target]


def _load(target: str) -> Any:
    name, _, attribute = target.partition(":")
    if name.endswith(".py") and not os.path.isfile(name):
        begins = "" if os.path.isabs(name) else f" in folder {os.getcwd()}; paths begin there"
        raise InvalidEnvironment(
            f"there is no {name}{begins}{_near(os.path.basename(name), attribute)}"
        )
    try:
        if name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(_module_of(name), name)
            assert spec is not None and spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = found
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(name)
    except Exception as error:  # a module may raise anything
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and (meant := _meant(name, attribute, str(missing))):
            raise InvalidEnvironment(f"{name} is no module{meant}") from error
        install = f"{sys.executable} -m pip install {str(missing).partition('.')[0]}"
        if missing and not f"{name}.".startswith(f"{missing}."):
            cure = f"; install it for this interpreter: {install}"
        elif missing:
            cure = f"; looked in {', '.join(filter(None, sys.path))}; if it is a package: {install}"
        else:
            cure = f" ({error_location(error)})" if error_location(error) else ""
        raise InvalidEnvironment(f"{name} cannot be imported: {error_text(error)}{cure}") from error
    for part in filter(None, attribute.split(".")):
        if not hasattr(found, part):
            known = ", ".join(key for key in vars(found) if not key.startswith("_"))
            raise InvalidEnvironment(f"{name} has no {part!r}; it has {known or 'nothing public'}")
        found = getattr(found, part)
    return found


def _meant(name: str, attribute: str, missing: str) -> str:
    """Of a target whose module is `missing`: where `shop.Shop`, as rewards are named, or `shp:Shop`
    was to be `shop:Shop`."""
    outer, _, inner = name.rpartition(".")
    if missing == name and (module := sys.modules.get(outer)):
        named = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        near = difflib.get_close_matches(inner, named, n=1)
        if near and not attribute:
            return f"; write {outer}:{near[0]}"
        if not hasattr(module, "__path__"):
            return f"; {outer} is a file, not a package; it has {', '.join(named) or 'nothing'}"
    first, _, rest = name.partition(".")
    return _near(first, attribute or rest) if missing == first else ""


def _near(file: str, attribute: str) -> str:
    """A file named nearly so, `shop` or `shop.py`, that speaks of the attribute."""
    stem, end = os.path.splitext(file)
    folder = "." if end else sys.path[0] or "."
    with suppress(OSError):
        stems = [one[:-3] for one in os.listdir(folder) if one.endswith(".py")]
        for near in difflib.get_close_matches(stem, stems, n=1):
            with open(os.path.join(folder, f"{near}.py"), encoding="utf-8", errors="replace") as it:
                if re.search(rf"\b{re.escape(attribute)}\b", it.read()):
                    return f"; did you mean {near}{end}{attribute and ':'}{attribute}?"
    return ""


def _module_of(path: str) -> str:
    """What a file is imported as: by its name, unless others would import another by that."""
    name = os.path.basename(path)[:-3]
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    origin = found.origin if found is not None else None
    own = origin is None or (os.path.exists(origin) and os.path.samefile(origin, path))
    return name if own else f"{name} ({path})"


def make(request: dict[str, Any]) -> Any:
    """The environment that an `open` asks for."""
    target, kind, arguments = request["target"], request["kind"], request["arguments"]
    options = {key: arguments[key] for key in OPTIONS if key in arguments}
    rest = {key: value for key, value in arguments.items() if key not in options}
    if is_address(target):
        return OpenEnv(There(target, **rest), **options)
    found = load(target)
    if kind == "openenv" or (kind == "auto" and is_openenv(found)):
        action = rest.pop("action", None)
        return OpenEnv(Here(found(**rest), action and load(action)), **options)
    if kind == "auto":
        made = inspect.isclass(found) or not (inspect.isroutine(found) or inspect.ismodule(found))
        game = made and hasattr(found, "reset") and hasattr(found, "step")
        several = isinstance(found, (list, tuple))
        kind = "game" if game else "class" if made and not several else "functions"
    if kind == "functions":
        functions = functions_of(found)
        if not functions:
            raise InvalidEnvironment(f"{target} has no public function to be a tool")
        return Object(None, functions)
    if kind == "class":
        environment = found(**arguments) if callable(found) else found
        return Object(environment, methods_of(environment))
    if "score" in rest:
        options["score"] = rest.pop("score")
    environment = found(**rest) if callable(found) else found
    if not hasattr(environment, "reset") or not hasattr(environment, "step"):
        raise InvalidEnvironment(f"{target} has no `reset` and `step`, and is no game")
    return Game(environment, **options)
