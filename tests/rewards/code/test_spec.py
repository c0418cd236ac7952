"""Specs of programming tasks, and the program in an answer. Nothing here runs a program."""

from typing import Any

import pytest

from keel.configs.schema import CodeConfig
from keel.rewards.code.call_driver import _find, from_jsonable, to_jsonable
from keel.rewards.code.spec import code_block, read_task
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.sandbox.sandbox import Limits
from tests.rewards.code.hostile import ADD_CALL, ADD_STDIN

BLOCKS = {
    "```\na\n```": "a\n",
    "```python\na\n\nb\n```\nDone.": "a\n\nb\n",
    "```\na\n```\nthen\n```\nb\n```": "b\n",
    "~~~\na\n```\n~~~": "a\n```\n",
    "````\na\n```\nb\n````": "a\n```\nb\n",
    "1. so:\n   ```py\n   if a:\n       b\n   ```": "if a:\n    b\n",
    "```\r\na\r\n```\r\n": "a\n",
    "```\na\u2028b\n```": "a\u2028b\n",
    **dict.fromkeys(("```\na\n```\n```\nb", "```\na", "`a`", "```a```", "", "```\n" * 100_001)),
}


def test_the_last_code_block_is_the_program() -> None:
    for text, code in BLOCKS.items():
        assert code_block(text) == code


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        *(({}, "tests"), ({"tests": []}, "tests"), ({"tests": [ADD_STDIN, 3]}, r"tests\[1\]")),
        ({"tests": [{"stdin": "1", "stdou": "1"}]}, r"tests\[0\]"),
        ({"tests": [{"call": "f", "args": [1]}]}, "returns"),
        ({"tests": [{"call": "f", "args": 1, "returns": 1}]}, "args"),
        ({"tests": [{"call": "os.system('x')", "args": [], "returns": 1}]}, "call"),
        ({"tests": [ADD_CALL], "language": "c++"}, "Python"),
        ({"tests": [ADD_STDIN], "language": "cobol"}, "language"),
        ({"tests": [ADD_STDIN], "partial": 1}, "partial"),
        ({"tests": [ADD_STDIN], "time_limit_s": -1}, "time_limit_s"),
        ({"tests": [ADD_STDIN], "memory_mib": 0.5}, "memory_mib"),
        ({"tests": [ADD_STDIN], "time_limit": 1}, "time_limit_s"),
        ({"tests": [ADD_STDIN | {"subtask": "a"}]}, "subtasks"),
        ({"tests": [ADD_STDIN], "subtasks": {"a": 0}}, r"subtasks\[a\]"),
        ({"tests": [ADD_STDIN], "subtasks": {"a": 1}}, "'a'"),
        ({"tests": [ADD_STDIN | {"subtask": "b"}], "subtasks": {"a": 1}}, "'b'"),
        ({"tests": [ADD_STDIN, ADD_CALL | {"subtask": "a"}], "subtasks": {"a": 1}}, "tests"),
    ],
)
def test_bad_specs_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_task({"kind": "code", **fields})


def test_a_prompt_may_set_limits() -> None:
    task = read_task({"kind": "code", "tests": [ADD_STDIN], "time_limit_s": 5, "memory_mib": 64})
    assert task.within(Limits()) == Limits(time_s=5, memory_mib=64)


def test_the_driver_encodes_values() -> None:
    value = {"t": (1, ("a",)), "s": {1}, "d": {1: "x", (1, 2): [None]}, "~set": 1.5}
    assert from_jsonable(to_jsonable(value)) == value
    with pytest.raises(TypeError, match="object"):
        to_jsonable([object()])
    assert _find("str.upper", {"str": str})() == ""


def test_knobs() -> None:
    knobs = {name: getattr(CodeConfig(), name) for name in CodeConfig.__dataclass_fields__}
    assert CodeSettings.from_knobs(knobs) == CodeSettings()
