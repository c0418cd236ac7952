"""Validates tool schemas before a run and tool calls against them."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

from keel.rl.strict_json import compile_schema
from keel.rl.turns import ToolCall, ToolSpec

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
            validators[name] = _validator(parameters)
        except ValueError as error:
            raise ValueError(f"tool {name}: its schema {error}") from error
        except RecursionError as error:
            raise ValueError(f"tool {name}: its schema is nested too deeply; flatten it") from error
        except Exception as error:  # jsonschema raises many types, as for `"$schema": []`
            reason = repr(error)[:_MAX_CHARACTERS]
            raise ValueError(f"tool {name}: its schema is invalid: {reason}") from error
    return validators


def _validator(parameters: Any) -> Any:
    if not isinstance(parameters, dict) or cast(Any, parameters).get("type") != "object":
        raise ValueError("must have type: object, with the arguments as its properties")
    return compile_schema(cast(dict[str, Any], parameters), keywords=_KEYWORDS)


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
