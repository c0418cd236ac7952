"""Runs an author's tools, verifier and solution in separate processes."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast, get_type_hints

from keel.agents.env_runtime.errors import InvalidEnvironment, error_text
from keel.agents.env_runtime.tool_objects import Tool, functions_of
from keel.agents.environments.general.child import (
    AuthorCodeFailed,
    Channel,
    Child,
    ChildEnded,
    Message,
    serve,
    shut,
)
from keel.agents.environments.general.folder import Folder
from keel.agents.environments.general.rules import function, namespace, parsed


def tools_child(folder: Folder, seed: int) -> Child:
    """Start a process that runs the tools.

    It answers {"do": "describe"} with the specs of the tools by name, and {"do": "call", "name",
    "arguments"} with a text.
    """

    def run(channel: Channel) -> None:
        source, database = folder.text("tools.py"), folder.database()
        shut()
        tools: dict[str, Tool] = {}

        def answer(request: Message) -> Any:
            if not tools:
                tools.update(tools_of(source, database))
                random.seed(seed)
            if request["do"] == "describe":
                return {name: tool.spec for name, tool in tools.items()}
            if request["name"] not in tools:
                raise InvalidEnvironment(f"there is no tool {request['name']!r}")
            return tools[request["name"]](request["arguments"])

        serve(channel, answer)

    return Child(run)


def tools_of(source: str, database: Any) -> dict[str, Tool]:
    """Run a tools.py and return its public functions as tools.

    Raises InvalidEnvironment if there are none or one lacks type hints.
    """
    tree = parsed(source, "tools")
    module = ModuleType("tools")
    vars(module).update(namespace("tools"), database=database)
    sys.modules["tools"] = module  # dataclasses look up their module there
    _run(lambda: exec(compile(tree, "tools.py", "exec"), vars(module)), "tools.py")
    functions = functions_of(module)
    if not functions:
        raise InvalidEnvironment("tools.py has no public function")
    return {name: _typed(name, function) for name, function in functions.items()}


def _typed(name: str, given: Callable[..., Any]) -> Tool:
    if name == SUBMIT["name"]:
        raise InvalidEnvironment(f"tool {name}: that name is taken: it submits the answer")
    tool = Tool(name, given)
    hints = get_type_hints(given)
    parameters = inspect.signature(given).parameters
    for one in (*parameters, "return"):
        if hints.get(one, Any) is Any:
            raise InvalidEnvironment(
                f"tool {name}: {one} has no type hint, or one that says nothing"
            )
    if not tool.spec["description"]:
        raise InvalidEnvironment(f"tool {name} has no docstring: it is all that is known of it")
    tool.spec["returns"] = "text" if hints["return"] is str else "json"
    return tool


SUBMIT: dict[str, Any] = {
    "name": "submit_result",
    "description": "Submit the answer, in the form that the task asks for. This ends the task.",
    "parameters": {
        "type": "object",
        "properties": {"answer_text": {"type": "string", "description": "The answer, as JSON"}},
        "required": ["answer_text"],
        "additionalProperties": False,
    },
}


def answer_of(text: str) -> Any:
    """Parse a submitted answer as JSON, or return it as text if it is not JSON."""
    try:
        answer = json.loads(text)
        # Fails for 1e999, NaN and half of a surrogate pair, which are not JSON.
        json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text.encode(errors="replace").decode()
    return answer


def verified(folder: Folder, number: int, answer: Any, within_s: float) -> dict[str, bool] | str:
    """Return each demand and whether the answer meets it, or an error if the verifier fails.

    The verifier reads the original database, so it does not see changes that the tools made. Raises
    InvalidEnvironment if the verifier is invalid.
    """

    def run(channel: Channel) -> None:
        source, database = folder.text("verify.py"), folder.database()
        shut()
        verify = _function(source, "verify", f"verify_{number}", 2)

        def checked(request: Message) -> Any:
            result: Any = verify(request["answer"], database)
            if not isinstance(result, dict):
                result = {"correct": result}
            demands = cast(dict[Any, Any], result)
            if not demands or not all(type(one) is bool for one in demands.values()):
                raise AuthorCodeFailed(
                    f"it returned {str(demands)[:200]}; True or False, or a dict of them"
                )
            return {str(name): met for name, met in demands.items()}

        serve(channel, checked)

    child = Child(run)
    try:
        result = child.ask({"answer": answer}, within_s)
    except (ChildEnded, AuthorCodeFailed) as error:
        return str(error)
    finally:
        child.end()
    # The verifier's code may control the child, so check its reply again.
    if not isinstance(result, dict) or not result:
        return "it returned an invalid verdict"
    demands = cast(dict[str, Any], result)
    if not all(type(one) is bool for one in demands.values()):
        return "it returned an invalid verdict"
    return demands


def solving_child(source: str, number: int, returns: dict[str, str]) -> Child:
    """Start a process that runs a solution.

    The process sends {"call": name, "arguments"} and expects {"text"} or {"failed"}. It ends with
    {"is": the answer}. `returns` is the result type of each tool, `text` or `json`.
    """

    def run(channel: Channel) -> None:
        shut()
        solve = _function(source, "solve", f"solve_{number}", 1)
        answer = _run(lambda: solve(_tools(channel, returns)), "the solution")
        channel.send({"is": answer})

    return Child(run)


def _tools(channel: Channel, returns: dict[str, str]) -> Any:
    """Create the object through which a solution calls the tools."""

    def named(name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            channel.send({"call": name, "arguments": arguments})
            reply = channel.receive()
            if "failed" in reply:
                raise RuntimeError(reply["failed"])
            return reply["text"] if returns[name] == "text" else json.loads(reply["text"])

        return call

    return type("Tools", (), {name: staticmethod(named(name)) for name in returns})()


def _function(source: str, part: Any, name: str, parameters: int) -> Callable[..., Any]:
    tree, node = function(source, part, name)
    if len(node.args.args) != parameters or node.args.vararg or node.args.kwonlyargs:
        raise InvalidEnvironment(
            f"{part}.py: {name} has {parameters} parameter{'s' * (parameters > 1)}"
        )
    names = namespace(part)
    _run(lambda: exec(compile(tree, f"{part}.py", "exec"), names), f"{part}.py")
    return names[name]


def _run(what: Callable[[], Any], where: str) -> Any:
    try:
        return what()
    except (InvalidEnvironment, ChildEnded):
        raise
    except (Exception, SystemExit) as error:
        raise InvalidEnvironment(f"{where} raises {error_text(error)}") from error
