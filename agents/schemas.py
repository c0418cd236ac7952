"""Validates tool schemas before a run and tool calls against them. Answers are checked by separate
code in `keel.rewards.rules.verifiers`, because there is no package that both modules may import."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

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
    # Importing takes a fifth of a second, which runs without tools save.
    from jsonschema import Draft202012Validator, SchemaError, validators  # noqa: PLC0415
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry, Resource  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415

    if not isinstance(parameters, Mapping) or cast(Any, parameters).get("type") != "object":
        raise ValueError("must have type: object, with the arguments as its properties")
    schema = dict(cast(Mapping[str, Any], parameters))
    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=None)
    except SchemaError as error:
        message = error.message[:_MAX_CHARACTERS]
        raise ValueError(f"is not a JSON schema: {message} (at {error.json_path})") from error
    # This registry holds only the schema itself and never downloads another.
    resource = Resource[Any].from_contents(schema, default_specification=DRAFT202012)
    registry = Registry[Any]().with_resource("", resource).crawl()
    for reference in _references(schema):
        try:
            registry.resolver().lookup(reference)
        except Unresolvable as error:
            raise ValueError(f"refers to {reference!r}, which is not in it") from error
    return cast(Any, validators).extend(kind, _KEYWORDS)(schema, registry=registry)


def _references(value: Any) -> Iterator[str]:
    items: Any = cast(Any, value) if isinstance(value, list) else ()
    if isinstance(value, Mapping):
        items = cast(Any, value).values()
        if isinstance(reference := cast(Any, value).get("$ref"), str):
            yield reference
    for item in items:
        yield from _references(item)


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
