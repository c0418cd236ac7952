"""Tests that thinking marks inside tool calls are ordinary text and that all others delimit
thinking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rl.turns import ToolCall
from keel.rollout.chat.thinking import split_thinking
from tests.rollout.chat.test_parsing import DSML, parse

HERMES = '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}"}}}}\n</tool_call>'
CALLS = {
    "qwen3": HERMES,
    "hermes": HERMES,
    "llama3": '{{"name": "python", "parameters": {{"code": "{}"}}}}',
    "glm": "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "deepseek-v3.2": f'<{DSML}function_calls>\n<{DSML}invoke name="python">\n<{DSML}parameter '
    f'name="code" string="true">{{}}</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
}
CODES = ("a('<think>')", "a('</think>')", "sub('<think>.*</think>', s)", "</think><think>")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("thought", ["", "so <think> so"])
def test_marks_in_a_calls_arguments_are_theirs(name: str, code: str, thought: str) -> None:
    before = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    parsed = parse(name, before + CALLS[name].format(code))
    assert parsed.calls == (ToolCall(call_id="call_3_0", name="python", arguments={"code": code}),)
    assert (parsed.content, parsed.reasoning, parsed.inside) == ("", thought, False)
    if name == "qwen3":
        inside = parse(name, f"<think>so {CALLS[name].format(code)} and</think>Yes.", inside=True)
        assert (inside.content, inside.inside, len(inside.calls)) == ("Yes.", False, 1)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<c>", "</c>", "a", " ", "\n"]), max_size=12),
    st.booleans(),
)
def test_marks_decide_without_calls(parts: list[str], opened: bool) -> None:
    """The result must be the same as when the marks are read one after another."""
    text = "".join(parts)
    first = next((part for part in parts if part in ("<think>", "</think>")), "")
    thinks = first == "</think>" or (opened and not text.lstrip().startswith("<think>"))
    thoughts, said = [""] * thinks, [""] * (not thinks)
    for part in parts:
        if part == ("</think>" if thinks else "<think>"):
            thinks = not thinks
            (thoughts if thinks else said).append("")
        else:
            (thoughts if thinks else said)[-1] += part
    if thinks:
        expected = "\n".join([*said, *thoughts]).strip(), "", True
    else:
        expected = "\n".join(map(str.strip, thoughts)), "".join(said), False
    assert split_thinking(text, opened=opened) == expected
