"""System prompts to choose by name: what they ask for, and where they stand."""

from __future__ import annotations

from typing import get_args

import pytest

from keel.configs.system_prompts import PYTHON, SystemTemplate, system_prompt, with_system


def test_each_asks_for_what_its_table_does() -> None:
    assert system_prompt("none") == ""
    reasoning = system_prompt("reasoning")
    assert reasoning.index("<think>") < reasoning.index("</think>") < reasoning.index("answer,")
    inside = system_prompt("tools-in-thinking", calls=12)
    for fact in ("while you think", "early", "Up to 12 calls", "short", "Markdown", "LaTeX"):
        assert fact in inside
    assert "without any call" in inside and "form that is given" in inside
    assert "20 calls" in system_prompt("tools-in-thinking")
    assert "form that is given" in system_prompt("tools")


@pytest.mark.parametrize("template", get_args(SystemTemplate))
def test_an_interpreter_is_described_where_there_is_one(template: SystemTemplate) -> None:
    plain = system_prompt(template, tools=["hotels"])
    told = system_prompt(template, tools=["hotels", PYTHON])
    assert plain == system_prompt(template)
    if "tools" not in template:
        assert told == plain
        return
    assert told.startswith(plain)
    for fact in ("Jupyter", "keeps its state", "120 seconds", "The user sees neither"):
        assert fact in told and fact not in plain
    assert "90 seconds" in system_prompt(template, tools=[PYTHON], seconds=90)


def test_it_stands_before_a_system_message_that_is_there() -> None:
    user = {"role": "user", "content": "1 + 1?"}
    assert with_system("", [user]) == (user,)
    assert with_system("A", [user]) == ({"role": "system", "content": "A"}, user)
    system = {"role": "system", "content": "B"}
    assert with_system("A", [system, user]) == ({"role": "system", "content": "A\n\nB"}, user)
