"""Tests that text from outside the template never becomes a control token, and that other text is
encoded as usual."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.rl.types import Prompt
from keel.rollout.chat.encoding import Encoder
from keel.rollout.engine.conversion import render_prompt
from tests.rollout.chat.families import CITY, LINES, NAMES, chat_of, tokenizer_of


def controls(name: str, ids: list[int]) -> list[int]:
    return [index for index in ids if index in chat_of(name).encoder.text_of]


@st.composite
def hostile_text(draw: st.DrawFn, name: str) -> str:
    """Generate control token texts, and fragments that may combine with the template's text to form
    one."""
    whole = st.sampled_from(sorted(chat_of(name).encoder.controls))
    parts = whole.flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    pieces = st.one_of(whole, parts, st.text(max_size=3), st.sampled_from(LINES))
    return "".join(draw(st.lists(pieces, max_size=6)))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_a_tool_result_yields_no_control_token(name: str, data: st.DataObject) -> None:
    chat, text = chat_of(name), data.draw(hostile_text(name))
    ids = chat.opening([{"role": "user", "content": "Where?"}], [CITY], thinking=False)
    end = chat.end_before([{"role": "tool", "content": ""}], thinking=False)
    ids.append(chat.encoder.controls[end])

    def extend(content: str) -> list[int]:
        answer = {"role": "tool", "content": content, "name": "city", "tool_call_id": "call_0"}
        extended = chat.extend(ids, [answer], thinking=False)
        assert extended is not None
        return extended[len(ids) :]

    extended = extend(text)
    assert controls(name, extended) == controls(name, extend("fine"))
    quoted = name in ("llama3", "harmony")  # as JSON
    decoded = tokenizer_of(name).decode(extended, skip_special_tokens=False)
    if not quoted:
        assert text.strip() in decoded


@pytest.mark.parametrize("name", NAMES)
def test_every_control_text_at_once(name: str) -> None:
    chat = chat_of(name)
    hostile = "".join(chat.encoder.controls)
    for place in ("user", "tools", "reasoning"):
        tools = [CITY]
        messages = [{"role": "user", "content": hostile if place == "user" else "a"}]
        benign = chat.opening([{"role": "user", "content": "a"}], tools, thinking=True)
        if place == "tools":
            properties = {"properties": {hostile: {"type": "string", "description": hostile}}}
            tools = [type(CITY)(name="city", description=hostile, parameters=properties)]
        if place == "reasoning":
            said = {"role": "assistant", "content": "b", "reasoning_content": "c"}
            more = [{"role": "user", "content": "d"}]
            benign = chat.opening([*messages, said, *more], tools, thinking=True)
            messages += [{**said, "content": hostile, "reasoning_content": hostile}, *more]
        assert len(controls(name, chat.opening(messages, tools, thinking=True))) == len(
            controls(name, benign)
        ), place


@pytest.mark.parametrize("name", NAMES)
def test_plain_prompts_keep_their_ids(name: str) -> None:
    for thinking in (True, False):
        for content in ("1 + 1 =", " two\nlines }\n", "é→", ""):
            messages = (
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": content},
            )
            prompt = Prompt(prompt_id="a", domain="b", messages=messages, thinking=thinking)
            rendered = render_prompt(tokenizer_of(name), prompt).token_ids
            assert chat_of(name).opening(messages, [], thinking=thinking) == rendered


def test_text_cannot_complete_a_control_text() -> None:
    encoder: Encoder = chat_of("qwen3").encoder
    shielded = encoder.shield_whole(" <|im_end| ")
    assert controls("qwen3", encoder.encode(f"<|im_start|>{shielded.rstrip()}>")) == [
        encoder.controls["<|im_start|>"]
    ]
    assert encoder.shield_whole("plain words") == "plain words"
