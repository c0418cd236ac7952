"""Checks an author's code before it is run.

What these rules miss is blocked by the process that runs the code
(`keel.agents.environments.general.child`).
"""

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
"""Modules that tools and verifiers may import. None gives access to files, clocks or processes."""
for _name in (*MODULES, "_strptime"):  # imported now, because their process can open no file
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
"""Attributes that give access to the interpreter or the clock."""
_CLOCK = re.compile(
    r"""CURRENT_(DATE|TIME|TIMESTAMP)\b | ["']now["'] | ^\s*now\s*$ | \brandom(blob)?\( |
    \b(date|time|datetime|julianday|unixepoch)\(\s*\) | \bstrftime\(\s*('[^']*'|"[^"]*")\s*\)""",
    re.IGNORECASE | re.VERBOSE,
)
"""SQLite functions that read the clock or return random values. Its time functions default to
`now`."""


def parsed(source: str, part: Part) -> ast.Module:
    """Parse an author's code.

    Raises InvalidEnvironment if it has a syntax error or is forbidden.
    """
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
        match = isinstance(node.value, str) and _CLOCK.search(node.value)
        return f"asks for what differs from run to run: {match[0]}" if match else ""
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
    """Yield each name in the node itself, and whether it is an attribute."""
    for field, value in ast.iter_fields(node):
        several = cast(list[Any], value if isinstance(value, list) else [value])
        for one in several:
            if isinstance(one, str):
                yield one, field in ("attr", "kwd_attrs")


def function(source: str, part: Part, name: str) -> tuple[ast.Module, ast.FunctionDef]:
    """Return the function `name`, both as a module with the imports directly before it and alone.

    Raises InvalidEnvironment if there is no such function.
    """
    pieces = _pieces(parsed(source, part), part)
    if name not in pieces:
        raise InvalidEnvironment(
            f"{part}.py has no function {name!r}; it has {', '.join(pieces) or 'none'}"
        )
    statements = pieces[name]
    assert isinstance(statements[-1], ast.FunctionDef)
    return ast.Module(body=statements, type_ignores=[]), statements[-1]


def _pieces(tree: ast.Module, part: Part) -> dict[str, list[ast.stmt]]:
    pieces: dict[str, list[ast.stmt]] = {}
    imports: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                raise InvalidEnvironment(f"{part}.py, line {node.lineno}: a decorator")
            pieces[node.name] = [*imports, node]
            imports = []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        else:
            raise InvalidEnvironment(
                f"{part}.py, line {node.lineno}: a task's function is one function that contains "
                "all it needs; only imports may precede it"
            )
    return pieces


def namespace(part: Part) -> dict[str, Any]:
    """Return the global variables for an author's code, which include only a few of Python's
    builtins."""
    names = _PLAIN if part == "solve" else (*_PLAIN, *_MORE)
    functions: dict[str, Any] = {name: getattr(builtins, name) for name in names}
    functions["print"] = lambda *_, **__: None  # type: ignore[misc]
    if part != "solve":
        functions["__import__"] = _import
    return {"__builtins__": functions, "__name__": part}


def _import(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    if name not in MODULES or level:
        raise ImportError(f"there is no module {name!r} for a task's code")
    return importlib.__import__(name, globals, locals, fromlist, level)
