# pyright: basic
"""Calls a program's functions and says what they return. Runs inside the sandbox, alone: nothing
of ours can be imported there, and nothing that it says is believed further than any other output.

Standard input: a JSON list of `[name, args, kwargs]`. Standard output: a line of JSON for each,
`{"returned": …}` or `{"raised": "…"}`; or one `{"broken": "…"}` if the source does not even load.
What the program prints goes nowhere. Values beyond JSON are written as `keel.data.jsonable` does.
The source may use the names of `PREAMBLE` as if they were built in.
"""

import builtins
import json
import os
import sys

PREAMBLE = """
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
"""The names that solutions in LeetCode's style use without importing them. Built-in functions stay
what they are: `pow` is not `math.pow`."""


def from_jsonable(value: object) -> object:
    """The Python value that `keel.data.jsonable.to_jsonable` was given. For verifiers, too."""
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
            # Imported where they are met: every program in the sandbox would wait for them.
            if key == "~decimal":
                from decimal import Decimal  # noqa: PLC0415

                return Decimal(content)
            if key == "~fraction":
                from fractions import Fraction  # noqa: PLC0415

                return Fraction(content)
        return {key: from_jsonable(item) for key, item in value.items()}
    return value


def to_jsonable(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_jsonable(item) for item in value]
    if isinstance(value, tuple):
        return {"~tuple": [to_jsonable(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"~set": [to_jsonable(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("~") for key in value):
            return {key: to_jsonable(item) for key, item in value.items()}
        return {"~dict": [[to_jsonable(key), to_jsonable(item)] for key, item in value.items()]}
    raise TypeError(f"returned a {type(value).__name__}, which no test can compare")


def find(name, names):
    """Return `f`, or `Solution.f` of a fresh Solution."""
    holder, _, method = name.rpartition(".")
    if not holder:
        return names[name]
    value = names[holder]
    return getattr(value() if isinstance(value, type) else value, method)


def main(path):
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)

    def say(kind, what):
        line = json.dumps({kind: what})
        channel.write(line + "\n")
        channel.flush()

    if hasattr(sys, "set_int_max_str_digits"):  # from 3.11 on, and in late releases of 3.8 to 3.10
        sys.set_int_max_str_digits(0)
    calls = json.loads(sys.stdin.read())
    builtins.exit = builtins.quit = sys.exit  # as `site` would
    module = type(sys)("solution")
    sys.modules["solution"] = module
    offered = {}
    exec(PREAMBLE, offered)
    # Beside the built-in functions, and not in the module, whose own functions alone are called.
    module.__dict__["__builtins__"] = {**offered, **vars(builtins)}
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        say("broken", f"{type(error).__name__}: {error}"[:200])
        return
    for name, args, kwargs in calls:
        try:
            value = find(name, module.__dict__)(*from_jsonable(args), **from_jsonable(kwargs))  # pyright: ignore[reportCallIssue]
            say("returned", to_jsonable(value))
        except BaseException as error:
            say("raised", f"{type(error).__name__}: {error}"[:200])


if __name__ == "__main__":
    main(sys.argv[1])
