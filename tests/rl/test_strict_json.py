"""What is no JSON, and what could not be read again."""

from __future__ import annotations

import json

import pytest

from keel.rl import strict_json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("NaN", "NaN is no JSON"),
        ('{"a": [-Infinity]}', "-Infinity is no JSON"),
        ("[1e999]", "1e999 is too large a number"),
        ("1" * 5000, "5000 digits"),
        ("[" * 101 + "]" * 101, "more than 100 levels"),
        ('{"a": ' * 60 + "[" * 60 + "]" * 60 + "}" * 60, "more than 100 levels"),
        ("[" * 100_000, "nested too deep"),
        ("{", "Expecting property name"),
        (b"\xff", "can't decode"),
    ],
)
def test_what_is_refused_is_always_a_value_error(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        strict_json.load(text)


def test_everything_else_is_as_python_reads_it() -> None:
    for value in (None, True, 1, -2.5e300, "é", [[]] * 3, {"a": {"b": [1, "x"]}}, 10**400):
        assert strict_json.load(json.dumps(value)) == value
    deep = "[" * 100 + "]" * 100
    assert strict_json.load(deep) == json.loads(deep)
    with pytest.raises(ValueError, match="more than 99 levels"):
        strict_json.load(deep, most_deep=99)
