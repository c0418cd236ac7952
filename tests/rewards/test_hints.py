"""What a function asked Keel's objects for, and what they have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from keel.rewards.custom import function, prompt_fields
from keel.rewards.pickled_functions import passing
from keel.rewards.workers.worker import reply_to
from tests.rewards.groups import PROMPT
from tests.rewards.test_custom import said

ASKED = replace(PROMPT, reward={"kind": "answer", "answer": "3", "columns": {"level": 2}})
HAS = "trajectory has all_said, all_thinking, answer, finish_reason, messages, opening, raw, "


def error_of(body: Callable[[Any, Any], Any], *, group: bool = False) -> str:
    def mine(prompt: Any, trajectory: Any) -> Any:
        return body(prompt, trajectory)

    with passing([mine]):
        spec = {"name": "python.mine", "prompt": prompt_fields(ASKED), "group": group}
        text = json.dumps([said("3")]) if group else said("3")
        return reply_to(function(spec), text)["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda p, t: p.reward["gold"], "KeyError: 'gold'; prompt.reward has columns, kind, answ"),
        (lambda p, t: p.reward["level"], "; write prompt.reward['columns']['level']"),
        (lambda p, t: p.reward["anser"], "; did you mean prompt.reward['answer']?"),
        (lambda p, t: p.reward["columns"]["x"], "; prompt.reward['columns'] has level"),
        (lambda p, t: p.messages[0]["text"], "; messages have role, content"),
        (lambda p, t: t.messages[-1]["text"], "; messages have role, content"),
        (lambda p, t: t.text, f"has no attribute 'text'; a {HAS}"),
        (lambda p, t: p.answer, "; write prompt.reward['answer']"),
        (lambda p, t: p.level, "; write prompt.reward['columns']['level']"),
        (lambda p, t: list(t), f"'TextTrajectory' object is not iterable; a {HAS}"),
        (lambda p, t: "a" in t, "sampled_tokens, thinking; its text is trajectory.answer"),
        (lambda p, t: p["answer"], "'Prompt' object is not subscriptable; a prompt has domain,"),
    ],
)
def test_an_error_about_an_object_of_keels_says_what_it_has(
    body: Callable[[Any, Any], Any], words: str
) -> None:
    assert words in error_of(body)


def test_a_group_is_no_trajectory() -> None:
    assert "call the parameter `trajectory`" in error_of(lambda p, t: t.answer, group=True)
    assert f"a {HAS}" in error_of(lambda p, t: t[0].text, group=True)


def test_other_errors_are_left_as_they_are() -> None:
    assert error_of(lambda p, t: {}["gold"]) == "KeyError: 'gold'"
    assert error_of(lambda p, t: t.answer.text).endswith("'str' object has no attribute 'text'")


def test_what_a_function_is_given_is_plain() -> None:
    def plain(prompt: Any, trajectory: Any) -> float:
        given = (prompt.reward, prompt.reward["columns"], *prompt.messages, *trajectory.messages)
        return float(all(type(one) is dict for one in given))

    with passing([plain]):
        spec = {"name": "python.plain", "prompt": prompt_fields(ASKED)}
        assert reply_to(function(spec), said("3")) == {"score": 1.0}
