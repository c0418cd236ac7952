"""What an author's code may say. Read before it runs; what it could reach all the same is closed by
the process that it runs in (`keel.agents.environments.general.child`)."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, cast

from keel.agents.env_runtime.errors import InvalidEnvironment

Part = Literal["solve", "verify", "tools"]

MODULES = (
    *("__future__", "bisect", "calendar", "collections", "collections.abc", "copy", "dataclasses"),
    *("datetime", "decimal", "difflib", "enum", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "operator", "random", "re", "statistics", "string", "textwrap", "typing"),
    "unicodedata",
)
"""What tools and verifiers may import: no files, no clock, no processes."""
for _name in (*MODULES, "_strptime"):  # a process of theirs can open no file any more
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
"""Attributes that lead out of what a function was given, or to the clock."""
_CLOCK = re.compile(
    r"""CURRENT_(DATE|TIME|TIMESTAMP)\b | ["']now["'] | ^\s*now\s*$ | \brandom(blob)?\( |
    \b(date|time|datetime|julianday|unixepoch)\(\s*\) | \bstrftime\(\s*('[^']*'|"[^"]*")\s*\)""",
    re.IGNORECASE | re.VERBOSE,
)
"""SQLite's: its functions of time take none for `now`."""


def parsed(source: str, part: Part) -> ast.Module:
    """Raises InvalidEnvironment for what is no Python, or says what it may not."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError, SystemError) as error:
        raise InvalidEnvironment(f"{part}.py is no Python: {error}") from error
    for node in ast.walk(tree):
        if why := _complaint(node, part):
            raise InvalidEnvironment(f"{part}.py, line {getattr(node, 'lineno', '?')}: {why}")
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    names = [node.name for node in defined]
    for node in defined:
        if names.count(node.name) > 1:  # a tool added later would change an earlier task
            raise InvalidEnvironment(f"{part}.py, line {node.lineno}: {node.name} is defined twice")
    return tree


def _complaint(node: ast.AST, part: Part) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom):
        if part == "solve":
            return "a solution imports nothing: it calls tools and does logic"
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "."] if not node.level else ["."]
        if part == "verify" and "random" in names:
            return "imports random: a verifier says the same each time"
        unknown = [name for name in names if name not in MODULES]
        return f"imports {unknown[0]}; there are {', '.join(MODULES[1:])}" if unknown else ""
    if isinstance(node, ast.Constant):
        said = isinstance(node.value, str) and _CLOCK.search(node.value)
        return f"asks for what differs from run to run: {said[0]}" if said else ""
    if isinstance(node, ast.Global):
        return "has a `global` statement"
    if isinstance(node, ast.AsyncFunctionDef | ast.Await):
        return "is asynchronous"
    if part == "solve" and isinstance(node, ast.ClassDef):
        return "defines a class"
    for name, inner in _names(node):
        if name.startswith("__") or (inner and _CLOSED.fullmatch(name)):
            return f"uses {name!r}, which is not for a task's code"
    return ""


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each name in a node itself, and whether it is one of an attribute."""
    for field, value in ast.iter_fields(node):
        several = cast(list[Any], value if isinstance(value, list) else [value])
        for one in several:
            if isinstance(one, str):
                yield one, field in ("attr", "kwd_attrs")


def function(source: str, part: Part, name: str) -> tuple[ast.Module, ast.FunctionDef]:
    """What there is between the function before it and the end of `name`: imports and itself.

    Raises InvalidEnvironment."""
    found = _pieces(parsed(source, part), part)
    if name not in found:
        raise InvalidEnvironment(
            f"{part}.py has no function {name!r}; it has {', '.join(found) or 'none'}"
        )
    own = found[name]
    assert isinstance(own[-1], ast.FunctionDef)
    return ast.Module(body=own, type_ignores=[]), own[-1]


def _pieces(tree: ast.Module, part: Part) -> dict[str, list[ast.stmt]]:
    found: dict[str, list[ast.stmt]] = {}
    own: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                raise InvalidEnvironment(f"{part}.py, line {node.lineno}: a decorator")
            found[node.name] = [*own, node]
            own = []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            own.append(node)
        else:
            raise InvalidEnvironment(
                f"{part}.py, line {node.lineno}: a task's function is one function, with what it "
                "needs inside; nothing but imports stands beside it"
            )
    return found


def namespace(part: Part) -> dict[str, Any]:
    """What a part's code finds there: a few functions of Python's, and nothing else."""
    names = _PLAIN if part == "solve" else (*_PLAIN, *_MORE)
    own: dict[str, Any] = {name: getattr(builtins, name) for name in names}
    own["print"] = lambda *_, **__: None  # type: ignore[misc]
    if part != "solve":
        own["__import__"] = _import
    return {"__builtins__": own, "__name__": part}


def _import(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    if name not in MODULES or level:
        raise ImportError(f"there is no module {name!r} for a task's code")
    return importlib.__import__(name, globals, locals, fromlist, level)
