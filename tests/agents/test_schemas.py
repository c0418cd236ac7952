"""What a policy writes into a call is checked in a time that it does not decide."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from keel.agents.schemas import Arguments
from keel.rl.turns import ToolCall, ToolSpec


def complaint(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    tool = ToolSpec(name="f", description="", parameters={"type": "object", **schema})
    return Arguments([tool]).complaint(ToolCall(call_id="c", name="f", arguments=arguments))


def of(schema: dict[str, Any], value: Any) -> str:
    return complaint({"properties": {"a": schema}}, {"a": value})


def test_equal_items_are_found_among_many_and_of_any_kind() -> None:
    unique = {"uniqueItems": True}
    many = [{"x": [i]} for i in range(30_000)]  # by pairs: half a thousand million
    assert of(unique, many) == ""
    assert "has an item that is there twice" in of(unique, [*many, {"x": [7.0]}])
    assert of(unique, [1, True, "1", None, [1], [True], {}, {"1": 1}, 0, False]) == ""
    assert of(unique, [{"b": 1, "a": [2]}, {"a": [2.0], "b": 1}]) and of(unique, [None, None])
    assert of({"uniqueItems": False}, [1, 1]) == of(unique, "aa") == ""


SLOW, LONG = "^(a|aa)+$", "a" * 80 + "!"
"""A pattern that tries all ways to cut the text, and fails."""


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"pattern": SLOW}}}, {"a": LONG}),
        ({"patternProperties": {SLOW: {}}}, {LONG: 1}),
        ({"additionalProperties": False, "patternProperties": {SLOW: {}}}, {LONG: 1}),
        ({"patternProperties": {SLOW: {}}, "additionalProperties": False}, {LONG: 1}),
    ],
)
def test_a_pattern_that_would_never_end_is_given_up(
    schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    began = time.thread_time()
    assert "takes too long to match" in complaint(schema, arguments)
    assert time.thread_time() - began < 5


def test_patterns_and_further_arguments_mean_what_they_did() -> None:
    assert of({"pattern": "^a+$"}, "aaa") == of({"pattern": "a"}, 3) == of({"pattern": "b"}, "ab")
    assert of({"pattern": "^a$"}, "b") == "f: 'b' does not match '^a$' (at $.a)"
    known = {
        "properties": {"a": {}},
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert complaint(known, {"a": 1, "x1": 2, "x2": 3}) == ""
    said = complaint(known, {"a": 1, "x1": "2", "z": 3})
    assert re.fullmatch(
        "f: '2' is not of type 'integer' .at .*x1.; Additional .* .'z' was unexpected.", said
    )
    assert "not of type" in complaint({"additionalProperties": {"type": "integer"}}, {"z": "2"})
    assert complaint({"additionalProperties": True}, {"z": "2"}) == ""


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        schema = {"type": "object", "allOf": [schema]}
    with pytest.raises(ValueError, match=r"tool f: .* nested too deeply"):
        complaint(schema, {})


def test_a_pattern_is_checked_by_the_engine_that_matches_it() -> None:
    letters = {"pattern": r"^\p{L}+$"}  # in JSON schema's own dialect, not in that of `re`
    assert of(letters, "Größe") == "" and "does not match" in of(letters, "a1")
    assert complaint({"patternProperties": {r"^\p{Lu}": {"type": "integer"}}}, {"A": 1}) == ""
    for broken in ("(", r"\p{None}"):
        with pytest.raises(ValueError, match=r"tool f: its schema is no JSON schema: .* 'regex'"):
            of({"pattern": broken}, "a")
