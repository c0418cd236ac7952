"""The environment interface, and the validation of tool calls. Environments can be slow, crash or
hang, so every call has a deadline."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol, cast

from keel.rl.strict_json import compile_schema
from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import LOST, Prompt, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    text: str
    failed: bool = False
    """True if the call was refused or raised an exception. `text` contains the reason."""
    done: bool = False


class EnvironmentLost(RuntimeError):
    """Raised when the episode can't continue. By then, all of the environment's processes are
    dead."""

    def __init__(self, during: str, message: str, output: str = "") -> None:
        tail = f"; its output ends with: {output}" if output else ""
        super().__init__(f"{LOST}{during}: {message}{tail}")
        self.during, self.detail, self.output = during, message, output

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.during, self.detail, self.output)


class NodeLost(EnvironmentLost):
    """Raised when the node or actor that ran the environment is lost. The episode can be retried on
    another node."""


class Environment(Protocol):
    """An episode's environment. Its methods raise `EnvironmentLost` if the episode can't continue,
    except that `close` never raises."""

    async def open(self, task: Prompt, *, seed: int) -> Opening: ...

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Run a tool call. A call that violates its schema isn't run and counts as failed."""
        ...

    async def reply(self, turn: Message) -> Message | None:
        """Return the user's next message after a turn without tool calls, or None to end the
        episode."""
        ...

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        """Grade the trajectory. Returns the reason if that isn't possible. The trajectory is then
        dropped rather than scored 0."""
        ...

    async def close(self) -> None:
        """Release all resources. Can be called more than once, and after any failure."""
        ...


class NoEnvironment:
    """An empty environment for agent programs that bring their own. It opens each task with the
    prompt's messages and offers no tools."""

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        return Opening(messages=task.messages)

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        return ToolResult(text=f"there is no tool {call.name}", failed=True)

    async def reply(self, turn: Message) -> Message | None:
        return None

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict | str:
        return Verdict(parts={})

    async def close(self) -> None:
        pass


_MAX_CHARACTERS = 300
"""Maximum length of an error message, because it may quote the policy's text."""
_MAX_COMPLAINTS = 3
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ArgumentValidator:
    """Validates tool call arguments. Schemas must not refer to other documents. They are compiled
    once for all episodes with the same tools."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        schemas = [[tool.name, dict(tool.parameters)] for tool in tools]
        self._validators = _compile_schemas(json.dumps(schemas))

    def explain_error(self, call: ToolCall) -> str:
        """Return an error message for the policy, or "" if the call is valid."""
        validator = self._validators.get(call.name)
        if validator is None:
            near = difflib.get_close_matches(call.name, self._validators, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            known = ", ".join(self._validators) or "none"
            return f"there is no tool {call.name[:64]!r}{hint} (there are: {known})"
        try:
            every: Iterator[Any] = validator.iter_errors(dict(call.arguments))
            errors = list(islice(every, _MAX_COMPLAINTS))
        except Exception:  # the schema cannot be applied to these arguments
            return ""
        messages = [
            error.message[:_MAX_CHARACTERS] + (f" (at {error.json_path})" if error.path else "")
            for error in errors
        ]
        return f"{call.name}: {'; '.join(messages)}" if messages else ""


@lru_cache(maxsize=64)
def _compile_schemas(text: str) -> dict[str, Any]:
    validators: dict[str, Any] = {}
    for name, parameters in json.loads(text):
        if not _NAME.fullmatch(name):
            allowed = "1 to 64 letters, digits, '_', '-' and '.'"
            raise ValueError(f"tool {name!r}: a name must be {allowed}")
        if name in validators:
            raise ValueError(f"tool {name}: two tools have this name")
        try:
            if not isinstance(parameters, dict) or cast(Any, parameters).get("type") != "object":
                raise ValueError("must have type: object, with the arguments as its properties")
            validators[name] = compile_schema(cast(Any, parameters), keywords=_KEYWORDS)
        except ValueError as error:
            raise ValueError(f"tool {name}: its schema {error}") from error
        except RecursionError as error:
            raise ValueError(f"tool {name}: its schema is nested too deeply; flatten it") from error
        except Exception as error:  # jsonschema raises many types, as for `"$schema": []`
            reason = repr(error)[:_MAX_CHARACTERS]
            raise ValueError(f"tool {name}: its schema is invalid: {reason}") from error
    return validators


def _additional_properties(
    validator: Any, allowed: Any, value: Any, schema: Mapping[str, Any]
) -> Iterator[Any]:
    from jsonschema import Draft202012Validator  # noqa: PLC0415

    if "patternProperties" not in schema:
        check: Any = Draft202012Validator.VALIDATORS["additionalProperties"]
        yield from check(validator, allowed, value, schema)


def _unchecked(*_: Any) -> Iterator[Any]:
    return iter(())


_KEYWORDS = {
    "additionalProperties": _additional_properties,
    "pattern": _unchecked,
    "patternProperties": _unchecked,
    "unevaluatedProperties": _unchecked,  # it matches the patterns of `patternProperties`
    "uniqueItems": _unchecked,
}
"""Replacements for keywords. A policy could make patterns and `uniqueItems` slow enough to delay
all other episodes, so checking them is left to the environment."""
