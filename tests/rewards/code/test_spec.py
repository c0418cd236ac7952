"""What a prompt says about its programs, how an answer's program is found, and when values are
the same. Nothing here runs a program."""

from __future__ import annotations

from typing import Any

import pytest

from keel.configs.schema import CodeConfig, ConfigError
from keel.rewards.code.call_driver import find, from_jsonable, to_jsonable
from keel.rewards.code.compare import same_text, same_value
from keel.rewards.code.languages import LANGUAGES
from keel.rewards.code.spec import code_block, read_task
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.sandbox.watch import Limits
from tests.rewards.code.hostile import ADD_CALL, ADD_STDIN


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```\na\n```", "a\n"),
        ("```python\na\n\nb\n```\nDone.", "a\n\nb\n"),
        ("```\na\n```\nthen\n```\nb\n```", "b\n"),
        ("~~~\na\n```\n~~~", "a\n```\n"),
        ("````\na\n```\nb\n````", "a\n```\nb\n"),
        ("1. so:\n   ```py\n   if a:\n       b\n   ```", "if a:\n    b\n"),
        ("```\r\na\r\n```\r\n", "a\n"),
        ("```\na\u2028b\n```", "a\u2028b\n"),
        ("```\na\n```\n```\nb", None),
        ("```\na", None),
        ("`a`", None),
        ("```a```", None),
        ("", None),
        ("```\n" * 100_001, None),
    ],
)
def test_the_last_code_block_is_the_program(text: str, code: str | None) -> None:
    assert code_block(text) == code


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "tests must be a list"),
        ({"tests": []}, "at least one test"),
        ({"tests": [ADD_STDIN, 3]}, r"tests\[1\] must be an object"),
        ({"tests": [{"stdin": "1"}]}, r"tests\[0\]: stdin and stdout must be texts"),
        ({"tests": [{"stdin": "1", "stdou": "1"}]}, r"tests\[0\]: no field 'stdou'; did you mean"),
        ({"tests": [{"call": "f", "args": [1]}]}, "returns"),
        ({"tests": [{"call": "f", "args": 1, "returns": 1}]}, r"args \(a list\)"),
        ({"tests": [{"call": "os.system('x')", "args": [], "returns": 1}]}, "must name a function"),
        ({"tests": [ADD_CALL], "language": "c++"}, "in Python only"),
        ({"tests": [ADD_STDIN], "language": "cobol"}, "language 'cobol'; there are python, c"),
        ({"tests": [ADD_STDIN], "partial": 1}, "partial = 1"),
        ({"tests": [ADD_STDIN], "time_limit_s": -1}, "time_limit_s = -1"),
        ({"tests": [ADD_STDIN], "memory_mib": 0.5}, "memory_mib = 0.5"),
        ({"tests": [ADD_STDIN], "time_limit": 1}, "did you mean time_limit_s"),
        ({"tests": [ADD_STDIN], "reference": 1}, "reference must be the source"),
        ({"tests": [ADD_STDIN | {"sample": 1}]}, r"tests\[0\]: sample must be true or false"),
        ({"tests": [ADD_STDIN | {"subtask": "a"}]}, "of subtask 'a'; say in `subtasks`"),
        ({"tests": [ADD_STDIN], "subtasks": {}}, "must be an object"),
        ({"tests": [ADD_STDIN], "subtasks": {"a": 0}}, r"subtasks\[a\] = 0 must be a positive"),
        ({"tests": [ADD_STDIN], "subtasks": {"a": 1}}, "subtask 'a': has no test"),
        (
            {"tests": [ADD_STDIN | {"subtask": "b"}], "subtasks": {"a": 1}},
            "'b': a test names it, and `subtasks` does not",
        ),
        (
            {"tests": [ADD_STDIN, ADD_CALL | {"subtask": "a"}], "subtasks": {"a": 1}},
            r"tests\[0\] needs a `subtask`, or",
        ),
        (
            {"tests": [ADD_CALL | {"subtask": "a"}], "subtasks": {"a": 1}, "partial": True},
            "keep one",
        ),
    ],
)
def test_a_spec_that_cannot_be_read(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_task({"kind": "code", **wrong})


def test_a_prompt_may_set_its_own_limits() -> None:
    task = read_task({"kind": "code", "tests": [ADD_STDIN], "time_limit_s": 5, "memory_mib": 64})
    assert task.within(Limits()) == Limits(time_s=5, memory_mib=64)


@pytest.mark.parametrize(
    ("wanted", "given", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1, True, False),
        (0, None, False),
        (0, False, False),
        ("1", 1, False),
        (1, 2, False),
        (10**400, 1.0, False),
        (10**400, 10**400, True),
        (float("nan"), float("nan"), True),
        (float("inf"), 1e308, False),
        ([1, [2]], {"~tuple": [1, {"~tuple": [2]}]}, True),
        ([1], [1, 1], False),
        ([], {}, False),
        ([], None, False),
        ({"~set": [1, 2]}, {"~set": [2, 1]}, True),
        ({"~set": [1, 2]}, [1, 2], False),
        ({"~set": [10.0, 5.0]}, {"~set": [9.999999999999998, 5.0]}, True),
        ({"~set": [[10.0, "a"], [5, "b"]]}, {"~set": [[9.999999999999998, "a"], [5, "b"]]}, True),
        (
            {"~set": [{"~set": ["a", "z"]}, {"~set": ["b"]}]},
            {"~set": [{"~set": ["z", "a"]}, {"~set": ["b"]}]},
            True,
        ),
        ({"~set": [1, "1", None, [1]]}, {"~set": [{"~tuple": [1]}, None, "1", 1]}, True),
        ({"~set": [float("nan"), 2]}, {"~set": [2, float("nan")]}, True),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"1": 1}, {"~dict": [[1, 1]]}, False),
        ({"~dict": [[1, "a"]]}, {"~dict": [[1, "a"]]}, True),
        ({"a": 1}, {"~dict": [["a", 1]]}, True),
        ({"a": 1}, {"~dict": [["a"]]}, False),
        ({"a": 1}, {"~dict": 3}, False),
        ({"a": 1}, {"a": {"~any": []}}, False),
    ],
)
def test_values(wanted: Any, given: Any, same: bool) -> None:
    assert same_value(wanted, given) is same


def test_tolerance() -> None:
    assert not same_value([0.5], [0.501]) and same_value([0.5], [0.501], 0.01)
    assert same_text("0.5 x\n", " 0.501  x", 0.01) and not same_text("0.5 x", "0.5 y", 0.01)
    assert not same_text("0.5", "nan", 0.01) and not same_text("0.5", "0.5 0.5", 0.01)
    assert same_text("a \nb\n", "a\nb\n\n") and not same_text("a b", "a  b")
    assert not same_text("a\nb", "ab") and not same_text("a", " a")


def test_the_driver_writes_values_as_data() -> None:
    value = {"t": (1, ("a",)), "s": {1}, "d": {1: "x", (1, 2): [None]}, "~set": 1.5}
    assert from_jsonable(to_jsonable(value)) == value
    with pytest.raises(TypeError, match="returned a object"):
        to_jsonable([object()])
    assert find("str.upper", {"str": str})() == ""


def test_knobs() -> None:
    knobs = {name: getattr(CodeConfig(), name) for name in CodeConfig.__dataclass_fields__}
    assert CodeSettings.from_knobs(knobs) == CodeSettings()
    for name, value in (("time_s", 0), ("completion_s", -1), ("memory_mib", 1), ("processes", 0)):
        with pytest.raises(ConfigError, match=f"rewards.code.{name} = "):
            CodeConfig(**{name: value})


def test_every_language_names_its_files() -> None:
    for name, language in LANGUAGES.items():
        words = " ".join((*language.run, *language.compile))
        assert language.source in words, name
