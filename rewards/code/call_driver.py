# pyright: basic
"""Calls functions of a program inside the sandbox, and prints their results.

The script cannot import the rest of the package. Its output is as untrusted as the program's.
Standard input is a JSON list of `[name, args, kwargs]`. Standard output has one line of JSON per
call: `{"returned": …}` or `{"raised": "…"}`. If the source cannot be loaded, the only line is
`{"broken": "…"}`. Everything that the program itself prints is discarded.

Values without a JSON equivalent are encoded as in `keel.data.procedural`. Programs can use the
names in `_PREAMBLE` without importing them.
"""

import builtins
import json
import os
import sys

_PREAMBLE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random
import re, string, sys, typing
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from string import *
from typing import *
"""
"""Names that LeetCode solutions use without importing them. Built-in functions take precedence:
`pow`, for example, is the built-in function and not `math.pow`."""


def from_jsonable(value: object) -> object:
    """Decode a value that `keel.data.procedural` encoded as JSON."""
    if isinstance(value, list):
        return [from_jsonable(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            ((key, content),) = value.items()
            if key == "~tuple":
                return tuple(from_jsonable(item) for item in content)
            if key == "~set":
                return {from_jsonable(item) for item in content}
            if key == "~dict":
                return {from_jsonable(k): from_jsonable(v) for k, v in content}
            # Imported late: every program in the sandbox would wait for them.
            if key == "~decimal":
                from decimal import Decimal  # noqa: PLC0415

                return Decimal(content)
            if key == "~fraction":
                from fractions import Fraction  # noqa: PLC0415

                return Fraction(content)
        return {key: from_jsonable(item) for key, item in value.items()}
    return value


def _to_jsonable(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_to_jsonable(item) for item in value]
    if isinstance(value, tuple):
        return {"~tuple": [_to_jsonable(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"~set": [_to_jsonable(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("~") for key in value):
            return {key: _to_jsonable(item) for key, item in value.items()}
        return {"~dict": [[_to_jsonable(key), _to_jsonable(item)] for key, item in value.items()]}
    raise TypeError(f"returned a {type(value).__name__}, which a test cannot compare")


def _find(name, names):
    holder, _, method = name.rpartition(".")
    if not holder:
        return names[name]
    value = names[holder]
    return getattr(value() if isinstance(value, type) else value, method)


def main(path):
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)

    def send(kind, value):
        line = json.dumps({kind: value})
        channel.write(line + "\n")
        channel.flush()

    if hasattr(sys, "set_int_max_str_digits"):  # 3.11, and late releases of 3.8 to 3.10
        sys.set_int_max_str_digits(0)
    calls = json.loads(sys.stdin.read())
    builtins.exit = builtins.quit = sys.exit  # as `site` would
    module = type(sys)("solution")
    sys.modules["solution"] = module
    preamble = {}
    exec(_PREAMBLE, preamble)
    # Among the built-ins rather than in the module, so that only its own functions can be called.
    module.__dict__["__builtins__"] = {**preamble, **vars(builtins)}
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        send("broken", f"{type(error).__name__}: {error}"[:200])
        return
    for name, args, kwargs in calls:
        try:
            value = _find(name, module.__dict__)(*from_jsonable(args), **from_jsonable(kwargs))  # pyright: ignore[reportCallIssue]
            send("returned", _to_jsonable(value))
        except BaseException as error:
            send("raised", f"{type(error).__name__}: {error}"[:200])


if __name__ == "__main__":
    main(sys.argv[1])
