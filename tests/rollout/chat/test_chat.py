"""Tests that extending a conversation gives the same ids as rendering all of it at once."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.endpoint.requests import read_request
from keel.rl.turns import Message
from keel.rl.types import Prompt
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.render import (
    Encoder,
    _load_deepseek_code,
    call_message,
    drop_old_thinking,
    render_prompt,
)
from keel.rollout.chat.render_given import render_given
from keel.rollout.chat.template_checks import check_prefix_preserving
from tests.rollout.chat.families import (
    CITY,
    LINES,
    NAMES,
    PLAIN,
    WITHOUT_THINKING,
    chat_of,
    tokenizer_of,
)

USER = [{"role": "user", "content": "Where to?"}]
ONE_CALL = ("llama3", "harmony")
"""Families whose templates support only one call per turn."""
WORDS = st.text("ab }\n.é", max_size=6)


def answers(said: Message, texts: list[str]) -> list[Message]:
    return [
        {"role": "tool", "content": text, "tool_call_id": call["id"], "name": "city"}
        for call, text in zip(said["tool_calls"], texts, strict=True)
    ]


def calling(turn: int, count: int, *, thought: str = "") -> dict[str, Any]:
    calls = [
        call_message(f"call_{turn}_{i}", "city", {"name": f"x{turn}y{i}z"}) for i in range(count)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    return said | ({"reasoning_content": thought} if thought else {})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thinking", [True, False])
def test_the_law_holds_for_every_family(name: str, thinking: bool) -> None:
    check_prefix_preserving(chat_of(name), modes=(thinking,))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("thinking", [True, False])
def test_without_tools_no_call_format_is_needed(name: str, thinking: bool) -> None:
    check_prefix_preserving(chat_of(name), modes=(thinking,), tools=())
    with pytest.raises(ValueError, match="chat_template"):
        check_prefix_preserving(chat_of(name), modes=(thinking,))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(data=st.data())
def test_extensions_equal_one_render(name: str, data: st.DataObject) -> None:
    chat = chat_of(name)
    thinking = name not in WITHOUT_THINKING and data.draw(st.booleans())
    messages: list[Message] = [*USER]
    ids = chat.opening(messages, [CITY], thinking=thinking)
    for turn in range(data.draw(st.integers(1, 3))):
        count = 1 if name in ONE_CALL else data.draw(st.integers(1, 3))
        said = calling(turn, count, thought="so" if thinking else "")
        after = answers(said, data.draw(st.lists(WORDS, min_size=count, max_size=count)))
        sampled = chat.turn_ids(messages, said, after, [CITY], thinking=thinking)
        if data.draw(st.booleans()):
            extended = chat.extend([*ids, *sampled[:-1]], after, thinking=thinking)  # cut
        else:
            extended = chat.extend([*ids, *sampled], after, thinking=thinking)
        assert extended is not None
        assert extended[: len(ids) + len(sampled) - 1] == [*ids, *sampled[:-1]]
        ids = extended
        messages += [said, *after]
    whole = chat.opening(messages, [CITY], thinking=thinking)
    if thinking or name not in ("qwen3", "harmony"):  # Qwen3's history forgets empty think blocks
        assert ids == whole
    else:
        text = chat.decode(ids).replace("<think>\n\n</think>\n\n", "")
        assert text == chat.decode(whole).replace("<think>\n\n</think>\n\n", "")


@pytest.mark.parametrize("name", ["tiny", "qwen3", "glm"])
def test_cut_thinking_is_closed_first(name: str) -> None:
    chat, encode = chat_of(name), tokenizer_of(name).encode
    opening = chat.opening(USER, [CITY], thinking=True)
    begin = "\n<think>" if name == "glm" else "<think>\n"
    ids = [*opening, *encode(f"{begin}hm @city", add_special_tokens=False)]
    answer = {"role": "tool", "content": "1", "name": "city", "tool_call_id": "call_0"}
    extended = chat.extend(ids, [answer], thinking=True)
    assert extended is not None and extended[: len(ids)] == ids
    added = chat.decode(extended[len(ids) :])
    assert added.index("</think>") < added.index(chat._continuation([answer], thinking=True)[1])


def changed(name: str, old: str, new: str) -> TemplateChat:
    tokenizer = copy.deepcopy(tokenizer_of(name))
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return TemplateChat(tokenizer)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The first words change once there are more messages.
        ("# Tools", "# Tools for {{ messages | length }} messages"),
        # Thinking goes though only a tool has answered.
        ("(loop.last or thought)", "loop.last"),
        # Tools are not shown.
        ("{{ '\n' + tool | tojson }}", ""),
        # Results are numbered from the conversation's beginning.
        ("'\n<tool_response>\n'", "'\n' ~ loop.index ~ '<tool_response>\n'"),
        # Calls are not shown.
        ("{%- for call in m.tool_calls or [] -%}", "{%- for call in [] -%}"),
    ],
)
def test_templates_that_change_earlier_turns_are_refused(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="chat_template"):
        check_prefix_preserving(changed("qwen3", old, new))


@pytest.mark.parametrize(
    ("name", "end", "call"),
    [
        ("qwen3", "<|endoftext|>", '<tool_call>{"name": "city"}</tool_call>'),
        ("llama3", "<|end_of_text|>", '{"name": "city", "parameters": {}}'),
        ("harmony", "<|endoftext|>", "<|channel|>commentary to=functions.city<|message|>{}"),
    ],
)
def test_other_ends_close_the_turn(name: str, end: str, call: str) -> None:
    tokenizer = tokenizer_of(name)
    chat = TemplateChat(tokenizer, ends=[tokenizer.convert_tokens_to_ids(end), 10**6])
    assert chat.ends[end] in chat.stop_ids
    sampled = chat.encoder.encode(call + end)
    parsed = chat.parse(sampled, [CITY], thinking=False, turn=0)
    assert [one.call_id for one in parsed.calls] == ["call_0_0"]
    assert (parsed.content, parsed.closed) == ("", True)
    ids = [*chat.opening(USER, [CITY], thinking=False), *sampled]
    answer = {"role": "tool", "content": "1", "name": "city", "tool_call_id": "call_0_0"}
    extended = chat.extend(ids, [answer], thinking=False)
    if name == "llama3":  # whose ends stand for each other
        assert extended is not None and extended[: len(ids)] == ids
    else:
        assert extended is None


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT},
    optional={"reasoning": TEXT, "tool_calls": st.just([{"id": "a"}])},
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "developer", "tool"]), "content": TEXT}
)


@given(st.lists(st.one_of(ASSISTANT, OTHERS), max_size=12))
def test_thinking_is_retained_as_in_deepseeks_own_code(messages: list[dict[str, Any]]) -> None:
    oracle = _load_deepseek_code().drop_thinking_messages(messages)
    ours = drop_old_thinking(
        [{k.replace("ing", "ing_content"): v for k, v in m.items()} for m in messages]
    )
    ours = [{k.replace("_content", ""): v for k, v in message.items()} for message in ours]
    assert len(ours) == len(messages)
    assert [m for m in ours if m["role"] != "developer"] == [
        m for m in oracle if m["role"] != "developer"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_lessons_and_endpoint_read_developer_alike(name: str) -> None:
    chat = chat_of(name)
    messages: list[Message] = [{"role": "developer", "content": "Be brief."}, *USER]
    request = read_request({"messages": messages, "model": "policy"})
    assert list(request.messages) == messages
    prompt = Prompt(prompt_id="p", domain="d", messages=tuple(messages), thinking=False)
    ids = chat.opening(request.messages, (), thinking=False)
    assert ids == render_prompt(tokenizer_of(name), prompt)[0]
    said = {"role": "assistant", "content": "Rome."}
    (lesson,) = render_given(chat, [*messages, said], (), thinking=False)
    assert list(lesson.ids[: len(ids)]) == ids
    as_system = chat.opening([{**messages[0], "role": "system"}, *USER], (), thinking=False)
    # DeepSeek's encoding shows it as a user's message.
    assert (ids == as_system) == (name != "deepseek-v3.2")


def controls(name: str, ids: list[int]) -> list[int]:
    return [index for index in ids if index in chat_of(name).encoder.text_of]


@st.composite
def hostile_text(draw: st.DrawFn, name: str) -> str:
    whole = st.sampled_from(sorted(chat_of(name).encoder.controls))
    parts = whole.flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    pieces = st.one_of(whole, parts, TEXT, st.sampled_from(LINES))
    return "".join(draw(st.lists(pieces, max_size=6)))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_tool_result_yields_no_control_token(name: str, data: st.DataObject) -> None:
    chat, text = chat_of(name), data.draw(hostile_text(name))
    ids = chat.opening([{"role": "user", "content": "Where?"}], [CITY], thinking=False)
    end = chat._continuation([{"role": "tool", "content": ""}], thinking=False)[1]
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


def test_text_cannot_complete_a_control_text() -> None:
    encoder: Encoder = chat_of("qwen3").encoder
    shielded = encoder.shield_whole(" <|im_end| ")
    assert controls("qwen3", encoder.encode(f"<|im_start|>{shielded.rstrip()}>")) == [
        encoder.controls["<|im_start|>"]
    ]
    assert encoder.shield_whole("plain words") == "plain words"
