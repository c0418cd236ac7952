"""Tests that thinking marks inside calls are text and that other marks delimit thinking."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rl.turns import Malformed, ToolCall
from keel.rollout.chat.thinking import CallBounds, split_thinking
from tests.rollout.chat.test_parsing import CODE, DSML, parse

CALLS = {
    "qwen3": '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}"}}}}\n</tool_call>',
    "hermes": '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}"}}}}\n</tool_call>',
    "llama3": '{{"name": "python", "parameters": {{"code": "{}"}}}}',
    "glm": "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>"
    '{{"code": "{}"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.2": f'<{DSML}function_calls>\n<{DSML}invoke name="python">\n<{DSML}parameter '
    f'name="code" string="true">{{}}</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
}
CODES = ("a('<think>')", "a('</think>')", "sub('<think>.*</think>', s)", "</think><think>")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("thought", ["", "hm", "so <think> so"])
def test_marks_in_a_calls_arguments_are_theirs(name: str, code: str, thought: str) -> None:
    before = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    parsed = parse(name, before + CALLS[name].format(code))
    assert parsed.calls == (ToolCall(call_id="call_3_0", name="python", arguments={"code": code}),)
    assert (parsed.content, parsed.reasoning, parsed.inside) == ("", thought, False)


@pytest.mark.parametrize("code", CODES)
def test_marks_inside_calls_in_thinking(code: str) -> None:
    call = CALLS["qwen3"].format(code)
    first = parse("qwen3", f"<think>so {call}", inside=True)
    assert first.inside and [one.arguments for one in first.calls if isinstance(one, ToolCall)] == [
        {"code": code}
    ]
    whole = parse("qwen3", f"<think>so {call} and</think>Yes.", inside=True)
    assert (whole.content, whole.inside, len(whole.calls)) == ("Yes.", False, 1)
    # One that is not closed takes no answer along.
    open_ = parse("qwen3", '<think>so <tool_call>{"name"</think>Yes.', inside=True)
    assert open_.content == "Yes." and isinstance(open_.calls[0], Malformed)
    mention = f"<think>write <tool_call> first.</think>Yes.{call}"
    told = parse("qwen3", mention, inside=True)
    assert told.content == "Yes." and not told.inside


def test_mentioned_calls_are_no_border() -> None:
    parsed = parse("hermes", "I need <tool_call> tags here.</think>Answer 4")
    assert parsed.content == "Answer 4" and parsed.reasoning.startswith("I need")


def test_unclosed_calls_are_reported() -> None:
    parsed = parse("qwen3", '<tool_call>\n{"name": "python", "arguments": {"code": "<think>"')
    (call,) = parsed.calls
    assert isinstance(call, Malformed)
    assert parsed.reasoning == "" and CODE.name in call.text


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<c>", "</c>", "a", " ", "\n"]), max_size=12),
    st.booleans(),
)
def test_marks_decide_without_calls(parts: list[str], opened: bool) -> None:
    """The result must equal that of reading one mark after the other."""
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


@pytest.mark.parametrize("text", ["<think></think>", "<think>é</think>\n", "<c>", "<c></think>"])
@pytest.mark.parametrize("inside", [False, True])
def test_many_marks_parse_fast(text: str, inside: bool) -> None:
    bounds = CallBounds("<c>", "</c>")
    began = time.thread_time()
    split_thinking(text * 50_000, bounds, opened=True, inside=inside)
    assert time.thread_time() - began < 2
