"""Strict JSON rejects what Python's parser accepts but cannot serialise again."""

import json

import pytest

from keel.rl import strict_json


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        '{"a": [-Infinity]}',
        "[1e999]",
        "1" * 5000,
        "[" * 101 + "]" * 101,
        '{"a": ' * 60 + "[" * 60 + "]" * 60 + "}" * 60,
        "[" * 100_000,
        "{",
        b"\xff",
    ],
)
def test_invalid_text_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        strict_json.load(text)


def test_valid_text_is_parsed_like_python() -> None:
    for value in (None, True, 1, -2.5e300, "é", [[]] * 3, {"a": {"b": [1, "x"]}}, 10**400):
        assert strict_json.load(json.dumps(value)) == value
    deep = "[" * 100 + "]" * 100
    assert strict_json.load(deep) == json.loads(deep)
    with pytest.raises(ValueError, match="99"):
        strict_json.load(deep, max_depth=99)
