"""Reads, checks and runs the code of an author's environment.

The environment's folder contains these files:

database.json
tools.py           the tools, which are typed functions over `database`
task.json          {"name", "category", "tasks": [{"question", "tools": [names]}, …]},
                   with easy tasks first
solve.py           solve_0(tools), solve_1(tools), …, which no environment or policy reads
verify.py          verify_0(answer, database), …, which return a bool, or a dict with a bool for
                   each requirement
provenance.json    how the environment was made

The code runs in forked processes inside the sandbox. These processes cannot open files or start
other processes, and can write only to their channel. Their messages are untrusted.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import os
import random
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn, cast, get_type_hints

from keel.agents.env_runtime.processes import protect_process
from keel.agents.env_runtime.tool_objects import (
    InvalidEnvironment,
    Tool,
    error_text,
    object_schema,
    public_functions,
)

_SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Folder:
    path: Path

    def text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def tasks(self) -> list[dict[str, Any]]:
        try:
            tasks: list[dict[str, Any]] = json.loads(self.text("task.json"))["tasks"]
            for task in tasks:
                _ = str(task["question"]), list(task["tools"])
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{self.path / 'task.json'}: {error!r}") from error
        return tasks

    def database(self) -> Any:
        return json.loads(self.text("database.json"))


def resolve_folders(names: Sequence[str]) -> list[Folder]:
    """Resolve names to environment folders. A name can be an environment's folder, a folder of
    several environments, or `shipped`."""
    environments: list[Folder] = []
    for name in names:
        path = _SHIPPED if name == "shipped" else Path(name).expanduser()
        inside = [path, *sorted(each.parent for each in path.glob("*/task.json"))]
        inside = inside[:1] if (path / "task.json").is_file() else inside[1:]
        if not inside:
            reason = f"no task.json below {path}; in a sandbox it must be among `readable`"
            raise ValueError(f"{name} is not a folder of tasks: {reason}")
        environments += map(Folder, inside)
    return environments


# The rules for an author's code. The process that runs it blocks everything else.

_Part = Literal["solve", "verify", "tools"]
MODULES = (
    *("__future__", "bisect", "calendar", "collections", "collections.abc", "copy", "dataclasses"),
    *("datetime", "decimal", "difflib", "enum", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "operator", "random", "re", "statistics", "string", "textwrap", "typing"),
    "unicodedata",
)
"""Modules that tools and verifiers may import. None of them gives access to files, clocks or
processes."""
_IMPORTABLE = (*MODULES, "_strptime")
"""`datetime.strptime` imports `_strptime` itself."""
for _name in _IMPORTABLE:  # imported now, because their process can open no file
    importlib.import_module(_name)
_PLAIN = (
    *("abs", "all", "any", "bin", "bool", "chr", "dict", "divmod", "enumerate", "filter", "float"),
    *("frozenset", "hex", "int", "isinstance", "iter", "len", "list", "map", "max", "min", "next"),
    *("oct", "ord", "pow", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str"),
    *("sum", "tuple", "zip"),
    *("ArithmeticError", "AssertionError", "AttributeError", "Exception", "IndexError", "KeyError"),
    *("LookupError", "OverflowError", "RuntimeError", "StopIteration", "TypeError", "ValueError"),
    *("ZeroDivisionError", "NotImplementedError"),
)
_MORE = (
    *("__build_class__", "bytes", "callable", "complex", "format", "issubclass", "object"),
    *("property", "staticmethod", "classmethod", "super", "type"),
)
_CLOSED = re.compile(r"_.*|(gi|cr|ag|tb|f|co|func)_\w+|format|format_map|mro|now|today|utcnow")
"""Forbidden attributes, which would give access to the interpreter or the clock."""


def _parse_code(source: str, part: _Part) -> ast.Module:
    """Parse Python code written by an author model. Raises InvalidEnvironment if it is invalid or
    uses a forbidden feature."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError) as error:
        raise InvalidEnvironment(f"{part}.py is no Python: {error}") from error
    for node in ast.walk(tree):
        if why := _complaint(node, part):
            raise InvalidEnvironment(f"{part}.py, line {getattr(node, 'lineno', '?')}: {why}")
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name in names:  # a tool added later would change an earlier task
                raise InvalidEnvironment(f"{part}.py, line {node.lineno}: {node.name} comes twice")
            names.add(node.name)
    return tree


def _complaint(node: ast.AST, part: _Part) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        if part == "solve":
            return "a solution imports nothing: it calls tools and does logic"
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            module = "." if node.level or not node.module else node.module
            names = [module, *_imported_modules(module, names)]
        if part == "verify" and "random" in names:
            return "imports random: a verifier says the same each time"
        unknown = [name for name in names if name not in MODULES]
        return f"imports {unknown[0]}; there are {', '.join(MODULES[1:])}" if unknown else ""
    if isinstance(node, ast.Global):
        return "has a `global` statement"
    if isinstance(node, ast.AsyncFunctionDef | ast.Await):
        return "is asynchronous"
    if part == "solve" and isinstance(node, ast.ClassDef):
        return "defines a class"
    for field, value in ast.iter_fields(node):
        is_attribute = field in ("attr", "kwd_attrs")
        for name in cast(list[Any], value if isinstance(value, list) else [value]):
            if isinstance(name, str) and (
                name.startswith("__") or (is_attribute and _CLOSED.fullmatch(name))
            ):
                return f"uses {name!r}, which is not for a task's code"
    return ""


def _imported_modules(module: str, names: Sequence[str]) -> list[str]:
    """Return the modules and private names that `from module import names` would import, such as
    `statistics.sys` and `random._os`."""
    attributes = vars(sys.modules[module]) if module in MODULES else {}
    return [
        f"{module}.{name}"
        for name in names
        if name.startswith("_") or isinstance(attributes.get(name), ModuleType)
    ]


def _namespace(part: _Part) -> dict[str, Any]:
    def import_module(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        if name not in _IMPORTABLE or level:
            raise ImportError(f"there is no module {name!r} for a task's code")
        return importlib.__import__(name, globals, locals, fromlist, level)

    names = _PLAIN if part == "solve" else (*_PLAIN, *_MORE)
    functions: dict[str, Any] = {name: getattr(builtins, name) for name in names}
    functions["print"] = lambda *_, **__: None  # type: ignore[misc]
    if part != "solve":
        functions["__import__"] = import_module
    return {"__builtins__": functions, "__name__": part}


# The processes that run it.

_MEMORY_MIB = 512
_MAX_BYTES = 4 << 20
_Message = dict[str, Any]


class ChildEnded(Exception):
    """Raised when a child process exits, times out or sends an invalid message."""


class _AuthorCodeFailed(Exception): ...


class _Channel:
    def __init__(self, end: socket.socket) -> None:
        self._end, self._lines = end, end.makefile("rb")

    def send(self, message: _Message) -> None:
        line = json.dumps(message, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            self._end.sendall(line)
        except OSError as error:
            raise ChildEnded("its process ended") from error

    def receive(self, within_s: float | None = None) -> _Message:
        self._end.settimeout(within_s)
        try:
            line = self._lines.readline(_MAX_BYTES)
        except TimeoutError as error:
            raise ChildEnded(f"it did not end within {within_s:g} s") from error
        except OSError as error:
            raise ChildEnded("its process ended") from error
        if not line.endswith(b"\n"):
            raise ChildEnded("its message is too large" if line else "its process ended")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ChildEnded("it sent an invalid message")
        return cast(_Message, message)


class Child(_Channel):
    """A forked process that calls `run` with its channel. `run` must call `_shut` before it
    executes untrusted code."""

    def __init__(self, run: Callable[[_Channel], None]) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            _run_child(theirs, run)
        theirs.close()
        super().__init__(ours)

    def ask(self, message: _Message, within_s: float | None = None) -> Any:
        self.send(message)
        reply = self.receive(within_s)
        if "refused" in reply:
            raise InvalidEnvironment(str(reply["refused"]))
        if "raised" in reply:
            raise _AuthorCodeFailed(str(reply["raised"]))
        return reply.get("is")

    def end(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._end.close()
            self.pid = 0


def _run_child(end: socket.socket, run: Callable[[_Channel], None]) -> NoReturn:
    channel = _Channel(end)
    try:
        protect_process()
        # These include the parent's channels, which the child must not write to.
        os.closerange(3, end.fileno())
        os.closerange(end.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        run(channel)
    except BaseException as error:
        with suppress(BaseException):
            channel.send(_failure(error))
    finally:
        os._exit(0)


def _failure(error: BaseException) -> _Message:
    if isinstance(error, InvalidEnvironment):
        return {"refused": str(error)}
    return {"raised": error_text(error)}


def _serve(channel: _Channel, answer: Callable[[_Message], Any]) -> None:
    with suppress(ChildEnded):
        while True:
            request = channel.receive()
            try:
                channel.send({"is": answer(request)})
            except ChildEnded:
                raise
            except (Exception, SystemExit) as error:
                channel.send(_failure(error))


def _shut() -> None:
    memory, hard = _MEMORY_MIB << 20, resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def start_tools(folder: Folder, seed: int) -> Child:
    """Start a process that runs the tools. It answers {"do": "describe"} with the tool
    descriptions, and {"do": "call", "name", "arguments"} with the result as text."""

    def run(channel: _Channel) -> None:
        source, database = folder.text("tools.py"), folder.database()
        _shut()
        tools: dict[str, Tool] = {}

        def answer(request: _Message) -> Any:
            if not tools:
                tools.update(load_tools(source, database))
                random.seed(seed)
            if request["do"] == "describe":
                return {name: tool.spec for name, tool in tools.items()}
            if request["name"] not in tools:
                raise InvalidEnvironment(f"there is no tool {request['name']!r}")
            return tools[request["name"]](request["arguments"])

        _serve(channel, answer)

    return Child(run)


def load_tools(source: str, database: Any) -> dict[str, Tool]:
    """Execute the source of tools.py and return its public functions as tools. Every tool needs
    type hints and a docstring."""
    tree = _parse_code(source, "tools")
    module = ModuleType("tools")
    vars(module).update(_namespace("tools"), database=database)
    sys.modules["tools"] = module  # dataclasses look up their module there
    _run(lambda: exec(compile(tree, "tools.py", "exec"), vars(module)), "tools.py")
    tools: dict[str, Tool] = {}
    for name, function in public_functions(module).items():
        if name == SUBMIT["name"]:
            raise InvalidEnvironment(f"tool {name}: that name is taken: it submits the answer")
        tools[name] = tool = Tool(name, function)
        hints = get_type_hints(function)
        for one in (*inspect.signature(function).parameters, "return"):
            if hints.get(one, Any) is Any:
                raise InvalidEnvironment(f"tool {name}: {one} has no type hint, or the hint Any")
        if not tool.spec["description"]:
            raise InvalidEnvironment(f"tool {name} has no docstring: it is all that is known of it")
        tool.spec["returns"] = "text" if hints["return"] is str else "json"
    if not tools:
        raise InvalidEnvironment("tools.py has no public function")
    return tools


SUBMIT: dict[str, Any] = {
    "name": "submit_result",
    "description": "Submit the answer, in the form that the task asks for. This ends the task.",
    "parameters": object_schema(
        {"answer_text": {"type": "string", "description": "The answer, as JSON"}}, ["answer_text"]
    ),
}


def parse_answer(text: str) -> Any:
    """Parse a submitted answer as JSON, or return the text if it is not valid JSON."""
    try:
        answer = json.loads(text)
        # Fails for 1e999, NaN and half of a surrogate pair, which are not JSON.
        json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text.encode(errors="replace").decode()
    return answer


def run_verifier(
    folder: Folder, number: int, answer: Any, within_s: float
) -> dict[str, bool] | str:
    """Run a task's verifier on an answer and a fresh database. Returns which requirements are met,
    or an error message if the verifier fails."""

    def run(channel: _Channel) -> None:
        source, database = folder.text("verify.py"), folder.database()
        _shut()
        verify = _compile_function(source, "verify", f"verify_{number}", 2)

        _serve(channel, lambda request: verify(request["answer"], database))

    child = Child(run)
    try:
        result = child.ask({"answer": answer}, within_s)
    except (ChildEnded, _AuthorCodeFailed) as error:
        return str(error)
    finally:
        child.end()
    demands = cast("dict[str, Any]", result if isinstance(result, dict) else {"correct": result})
    if not demands or not all(type(one) is bool for one in demands.values()):
        return f"it returned {str(demands)[:200]}; True or False, or a dict of them"
    return demands


def start_solution(source: str, number: int, returns: dict[str, str]) -> Child:
    """Start a process that runs a solution. For each tool call, it sends {"call": name,
    "arguments"} and expects {"text"} or {"failed"}. At the end, it sends {"is": the answer}."""

    def run(channel: _Channel) -> None:
        def named(name: str) -> Callable[..., Any]:
            def call(**arguments: Any) -> Any:
                channel.send({"call": name, "arguments": arguments})
                reply = channel.receive()
                if "failed" in reply:
                    raise RuntimeError(reply["failed"])
                return reply["text"] if returns[name] == "text" else json.loads(reply["text"])

            return call

        _shut()
        solve = _compile_function(source, "solve", f"solve_{number}", 1)
        tools = type("Tools", (), {name: staticmethod(named(name)) for name in returns})()
        channel.send({"is": _run(lambda: solve(tools), "the solution")})

    return Child(run)


def _compile_function(source: str, part: _Part, name: str, parameters: int) -> Callable[..., Any]:
    """Compile the function `name` together with the imports directly before it. Raises
    InvalidEnvironment if the source contains anything but functions and imports."""
    pieces: dict[str, list[ast.stmt]] = {}
    imports: list[ast.stmt] = []
    for node in _parse_code(source, part).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            pieces[node.name] = [*imports, node]
            imports = []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        else:
            raise InvalidEnvironment(
                f"{part}.py, line {node.lineno}: a task's function is one function without "
                "decorators that contains all it needs; only imports may precede it"
            )
    if name not in pieces:
        known = ", ".join(pieces) or "none"
        raise InvalidEnvironment(f"{part}.py has no function {name!r}; it has {known}")
    tree, names = ast.Module(body=pieces[name], type_ignores=[]), _namespace(part)
    _run(lambda: exec(compile(tree, f"{part}.py", "exec"), names), f"{part}.py")
    if len(inspect.signature(names[name]).parameters) != parameters:
        count = f"{parameters} parameter{'s' * (parameters > 1)}"
        raise InvalidEnvironment(f"{part}.py: {name} must have exactly {count}")
    return names[name]


def _run(what: Callable[[], Any], where: str) -> Any:
    try:
        return what()
    except (InvalidEnvironment, ChildEnded):
        raise
    except (Exception, SystemExit) as error:
        raise InvalidEnvironment(f"{where} raises {error_text(error)}") from error
