"""Calls are checked in bounded time, whatever the policy writes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from keel.agents.schemas import Arguments
from keel.rl.turns import ToolCall, ToolSpec


def complaint(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    tool = ToolSpec(name="f", description="", parameters={"type": "object", **schema})
    return Arguments([tool]).complaint(ToolCall(call_id="c", name="f", arguments=arguments))


def check(schema: dict[str, Any], value: Any) -> str:
    return complaint({"properties": {"a": schema}}, {"a": value})


def test_unique_items_take_linear_time() -> None:
    unique = {"uniqueItems": True}
    many = [{"x": [i]} for i in range(30_000)]
    assert check(unique, many) == ""
    assert check(unique, [*many, {"x": [7.0]}])
    assert check(unique, [1, True, "1", None, [1], [True], {}, {"1": 1}, 0, False]) == ""
    assert check(unique, [{"b": 1, "a": [2]}, {"a": [2.0], "b": 1}]) and check(unique, [None, None])
    assert check({"uniqueItems": False}, [1, 1]) == check(unique, "aa") == ""


SLOW, LONG = "^(a|aa)+$", "a" * 80 + "!"
"""A pattern with exponential backtracking, and a text it fails on."""


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"pattern": SLOW}}}, {"a": LONG}),
        ({"patternProperties": {SLOW: {}}}, {LONG: 1}),
        ({"additionalProperties": False, "patternProperties": {SLOW: {}}}, {LONG: 1}),
    ],
)
def test_slow_pattern_times_out(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    began = time.thread_time()
    assert "too long" in complaint(schema, arguments)
    assert time.thread_time() - began < 5


def test_replaced_keywords_keep_their_meaning() -> None:
    assert check({"pattern": "^a+$"}, "aaa") == check({"pattern": "a"}, 3) == ""
    assert check({"pattern": "b"}, "ab") == ""
    assert "$.a" in check({"pattern": "^a$"}, "b")
    known = {
        "properties": {"a": {}},
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert complaint(known, {"a": 1, "x1": 2, "x2": 3}) == ""
    message = complaint(known, {"a": 1, "x1": "2", "z": 3})
    assert "x1" in message and "'z'" in message
    assert complaint({"additionalProperties": {"type": "integer"}}, {"z": "2"})
    assert complaint({"additionalProperties": True}, {"z": "2"}) == ""


def test_pattern_dialect_is_the_matching_engines() -> None:
    letters = {"pattern": r"^\p{L}+$"}  # valid in JSON schema's dialect, not in `re`
    assert check(letters, "Größe") == "" and check(letters, "a1")
    with pytest.raises(ValueError, match="tool f"):
        check({"pattern": r"\p{None}"}, "a")
