# pyright: basic
"""Calls an answer's functions and says what they return. Runs inside the sandbox, alone: nothing of
ours can be imported there, and nothing that it says is believed further than any other output.

Standard input: a JSON list of `[name, args, kwargs]`. Standard output: a line of JSON for each,
`{"returned": …}` or `{"raised": "…"}`; or one `{"broken": "…"}` if the source does not even load.
What the answer prints goes nowhere. Values beyond JSON are written as `keel.data.jsonable` does.
"""

import builtins
import json
import os
import sys


def decoded(value):
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            ((key, content),) = value.items()
            if key == "~tuple":
                return tuple(decoded(item) for item in content)
            if key == "~set":
                return {decoded(item) for item in content}
            if key == "~dict":
                return {decoded(k): decoded(v) for k, v in content}
        return {key: decoded(item) for key, item in value.items()}
    return value


def encoded(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, tuple):
        return {"~tuple": [encoded(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"~set": [encoded(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("~") for key in value):
            return {key: encoded(item) for key, item in value.items()}
        return {"~dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
    raise TypeError(f"returned a {type(value).__name__}, which no test can compare")


def found(name, names):
    """`f`, or `Solution.f` of a fresh Solution."""
    holder, _, method = name.rpartition(".")
    if not holder:
        return names[name]
    kept = names[holder]
    return getattr(kept() if isinstance(kept, type) else kept, method)


def main(path):
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)

    def say(kind, what):
        line = json.dumps({kind: what})
        channel.write(line + "\n")
        channel.flush()

    calls = json.loads(sys.stdin.read())
    builtins.exit = builtins.quit = sys.exit  # as `site` would
    module = type(sys)("solution")
    sys.modules["solution"] = module
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        say("broken", f"{type(error).__name__}: {error}"[:200])
        return
    for name, args, kwargs in calls:
        try:
            value = found(name, module.__dict__)(*decoded(args), **decoded(kwargs))
            say("returned", encoded(value))
        except BaseException as error:
            say("raised", f"{type(error).__name__}: {error}"[:200])


if __name__ == "__main__":
    main(sys.argv[1])
