"""Loads an environment and handles the requests of one episode.

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

Instead of "is", a reply may have "failed", the reason, and "raised", which is true if the
environment's own code raised an exception.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import random
import resource
import sys
from contextlib import suppress
from typing import Any, cast

from keel.agents.env_runtime.games import (
    CLIENT,
    OpenEnv,
    RemoteSession,
    TextGame,
    WrappedObject,
    is_address,
    is_openenv,
)
from keel.agents.env_runtime.processes import limit_memory, protect_process
from keel.agents.env_runtime.tool_objects import (
    EnvironmentGone,
    InvalidEnvironment,
    ObjectEnvironment,
    await_result,
    bind_arguments,
    error_location,
    error_text,
    public_functions,
    verdict_fields,
)

_Request = dict[str, Any]


def redirect_prints() -> None:
    """Redirect standard output to standard error, so that prints aren't mistaken for protocol
    messages."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)


def take_channel() -> tuple[Any, Any]:
    """Take over standard input and output as the message channel, and redirect any later prints to
    standard error."""
    requests, replies = open(os.dup(0), "rb"), open(os.dup(1), "wb")  # noqa: SIM115
    redirect_prints()
    return requests, replies


def failure_of(error: Exception) -> _Request:
    if isinstance(error, MemoryError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        mib = "not set" if limit == resource.RLIM_INFINITY else limit >> 20
        return {"failed": f"out of memory (memory_mib = {mib})"}
    if isinstance(error, InvalidEnvironment):
        return {"failed": str(error)}
    return {"failed": _located(error), "raised": True}


def _located(error: BaseException) -> str:
    where = error_location(error)
    return f"{error_text(error)} ({where})" if where else error_text(error)


class _Server:
    def __init__(self) -> None:
        self._environment: Any = None

    def answer(self, request: _Request) -> _Request:
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

    def _open(self, request: _Request) -> _Request:
        limit_memory(request["memory_mib"])
        sys.path[:0] = request["paths"]
        seed = request["seed"]
        random.seed(0)  # draws at import are the same for all episodes
        if not is_address(request["target"]):
            _load_object(request["target"])
        random.seed(seed)
        self._environment = _make(request)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        opening = self._environment.opening(request["task"], seed)
        return {**opening, "grades": self._environment.grades}

    def _call(self, request: _Request) -> _Request:
        if isinstance(self._environment, ObjectEnvironment):
            self._environment.set_call_time(request["call_s"])
        try:
            return self._environment.call(request["name"], request["arguments"])
        except (MemoryError, EnvironmentGone):
            raise
        except Exception as error:  # the policy sees the error and may try again
            text = error_text(error)
            print(f"{request['name']}: {_located(error)}", file=sys.stderr)
            done = getattr(self._environment, "done", False)
            return {"text": text, "failed": True, "done": done}


def serve_channel() -> None:
    protect_process()
    serve(*take_channel())


def serve(requests: Any, replies: Any) -> None:
    """Serve one episode. After `close`, wait to be killed instead of exiting, so that this
    process's descendants can still be found."""
    server = _Server()
    for line in requests:
        request = json.loads(line)
        try:
            # Encoding is part of the try: an unencodable result is the environment's failure.
            text = json.dumps({"id": request["id"], "is": server.answer(request)}, allow_nan=True)
        except Exception as error:
            text = json.dumps({"id": request["id"], **failure_of(error)})
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(text.encode() + b"\n")
        replies.flush()


def call_function() -> None:
    """Run an agent program that is a function, given as `module:function` or `file.py:function`.
    The function can take the parameters `task`, `prompt` (the last user message) and `seed`. Its
    result is written to KEEL_VERDICT: a string is the answer, a number or a dict of numbers is the
    verdict, and a pair `(verdict, facts)` is a verdict with additional facts."""
    sys.path.insert(0, os.getcwd())
    target = sys.argv[2]
    with open(os.environ["KEEL_TASK_FILE"], encoding="utf-8") as file:
        task = json.load(file)
    prompts = [m["content"] for m in task["messages"] if m["role"] == "user"]
    values = {
        "task": task,
        "prompt": prompts[-1] if prompts else task["messages"][-1]["content"],
        "seed": int(os.environ["KEEL_SEED"]),
    }
    try:
        function = _load_object(target)
        if not callable(function):
            raise InvalidEnvironment(f"{target} is not a function")
        arguments = bind_arguments(target, function, values)
    except InvalidEnvironment as error:
        sys.exit(str(error))
    result = await_result(function(**arguments))
    if result is None:
        return
    verdict = {"answer": result} if isinstance(result, str) else verdict_fields(result)
    with open(os.environ["KEEL_VERDICT"], "w", encoding="utf-8") as file:
        json.dump(verdict, file, default=str)


_ADAPTER_OPTIONS = ("play_by", "scale", "rules")
"""Arguments that go to the adapter instead of the environment."""
_loaded: dict[str, Any] = {}


def preload(request: _Request) -> None:
    """Import the modules that every episode needs before forking."""
    target = request["target"]
    late: tuple[str, ...] = (CLIENT,)
    if not is_address(target):
        _load_object(target)
        if request["kind"] in ("auto", "openenv") and request["arguments"].get("action"):
            _load_object(request["arguments"]["action"])
        name = target.partition(":")[0]
        module = sys.modules[_module_name(name) if name.endswith(".py") else name]
        late = getattr(module, "PRELOAD", ())
    for name in late:
        with suppress(ImportError):  # reported when it is used
            importlib.import_module(name)


def _load_object(target: str) -> Any:
    """Load an object given as `module:name`, `module` or `file.py:name`. Each target is loaded only
    once per process."""
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
        where = error_location(error)
        if isinstance(error, ModuleNotFoundError):
            where = f"looked in {', '.join(filter(None, sys.path))} for {sys.executable}"
            if "." in name and not attribute:
                where = f"an object of a module is {':'.join(name.rsplit('.', 1))}; {where}"
        message = f"{name} cannot be imported: {error_text(error)}; {where}"
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
    """Return a module name for a file: its stem, or a different name if the stem would shadow a
    module."""
    name = os.path.basename(path)[:-3]
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    origin = spec.origin if spec is not None else None
    same = origin is None or (os.path.exists(origin) and os.path.samefile(origin, path))
    return name if same else f"{name} ({path})"


def _make(request: dict[str, Any]) -> Any:
    target, kind, arguments = request["target"], request["kind"], request["arguments"]
    options = {key: arguments[key] for key in _ADAPTER_OPTIONS if key in arguments}
    rest = {key: value for key, value in arguments.items() if key not in options}
    if is_address(target):
        return OpenEnv(RemoteSession(target, **rest), **options)
    value = _load_object(target)
    if kind == "openenv" or (kind == "auto" and is_openenv(value)):
        action = rest.pop("action", None)
        return OpenEnv(WrappedObject(value(**rest), action and _load_object(action)), **options)
    if kind == "auto":
        no_object = inspect.isroutine(value) or inspect.ismodule(value)
        kind = "class"
        if no_object or type(value) in (list, tuple):
            kind = "functions"
        elif hasattr(value, "reset") and hasattr(value, "step"):
            kind = "game"
    if kind == "functions":
        functions = public_functions(value)
        if not functions:
            raise InvalidEnvironment(f"{target} has no public function to be a tool")
        return ObjectEnvironment(None, functions)
    if kind == "class":
        return ObjectEnvironment(value(**arguments) if callable(value) else value)
    if "score" in rest:
        options["score"] = rest.pop("score")
    environment = value(**rest) if callable(value) else value
    if not hasattr(environment, "reset") or not hasattr(environment, "step"):
        raise InvalidEnvironment(f"{target} is not a game: it has no `reset` and `step`")
    return TextGame(environment, **options)
