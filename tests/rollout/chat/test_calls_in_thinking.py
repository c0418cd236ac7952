"""Tool calls inside thinking: parsing, continuing and replaying them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keel.agents.conversation import Conversation
from keel.rl.turns import Malformed, ToolCall
from keel.rollout.chat.template_checks import check_calls_in_thinking, check_prefix_law
from tests.rollout.chat.families import CITY, chat_of, tokenizer_of
from tests.rollout.chat.test_conversations import CALLS, answers, say
from tests.rollout.chat.test_parsing import ENDS, parse

THINKING = ("tiny", "qwen3", "glm", "deepseek-v3.2")
"""Families with thinking marks whose thinking is kept after calls."""


def inside(name: str) -> Any:
    return chat_of(name, tools_in_thinking=True)


@pytest.mark.parametrize("name", THINKING)
def test_the_laws_hold(name: str) -> None:
    check_prefix_law(inside(name), modes=(True,))
    check_calls_in_thinking(inside(name))


@pytest.mark.parametrize("name", ["hermes", "llama3", "harmony"])
def test_templates_without_thinking_marks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="tools_in_thinking"):
        check_calls_in_thinking(inside(name))


def test_no_check_if_thinking_holds_no_calls() -> None:
    with pytest.raises(ValueError, match="tools_in_thinking"):
        check_calls_in_thinking(chat_of("qwen3"))


@pytest.mark.parametrize("name", THINKING)
def test_calls_in_one_thinking_share_a_segment(name: str) -> None:
    chat, call, end = inside(name), CALLS[name][0], ENDS.get(name, "<|im_end|>")
    last_end = {"glm": "<|user|>"}.get(name, end)
    opened = chat.opened(thinking=True)
    hostile = "".join(chat.encoder.controls)
    conversation = Conversation(
        name="p/0",
        prompt_id="p",
        chat=chat,
        messages=[{"role": "user", "content": f"Where? {hostile}"}],
        tools=[CITY],
        thinking=True,
    )
    turns = [
        f"{'' if opened else '<think>'}First.\n{call}{end}",
        f"Second.\n{call}{end}",  # in the thinking opened by the first
        f"Third.\n</think>\n\nRome.{last_end}",
    ]
    told: list[tuple[int, list[int]]] = []
    for turn, text in enumerate(turns):
        place = len(conversation.ids)
        sampled = tokenizer_of(name).encode(text, add_special_tokens=False)
        parsed = say(conversation, name, text)
        told.append((place, sampled))
        assert parsed.reasoning == ("First.", "Second.", "Third.")[turn]
        assert parsed.content == ("Rome." if turn == 2 else "")
        assert parsed.inside == (turn < 2)
        assert [type(one) for one in parsed.calls] == ([] if turn == 2 else [ToolCall])
        if turn < 2:
            conversation.answer(answers(parsed, f"Result {turn}. {hostile}"))
    (segment,) = conversation.segments()
    ids = segment.token_ids_T.tolist()
    trained = np.zeros(len(ids), np.bool_)
    for place, sampled in told:
        assert ids[place : place + len(sampled)] == sampled
        trained[place : place + len(sampled)] = True
    assert (segment.trainable_T == trained).all()
    assert [m["role"] for m in conversation.transcript] == (
        ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    )

    # A user's next message ends the thinking. Calls and results stay.
    conversation.answer([{"role": "user", "content": "And then?"}])
    assert conversation.forks == 1
    shown = chat.decode(conversation.ids)
    assert not any(word in shown for word in ("First.", "Second.", "Third."))
    assert shown.count("city") >= 3 and all(f"Result {turn}." in shown for turn in (0, 1))
    assert "Rome." in shown
    # Later text starts a new thinking.
    parsed = say(conversation, name, f"{call}{last_end}")
    assert [type(one) for one in parsed.calls] == [ToolCall if opened else Malformed]


@pytest.mark.parametrize("name", THINKING)
def test_a_call_after_the_thinking_is_none(name: str) -> None:
    text = f"hm</think>\n\n{CALLS[name][0]}"
    text = text if chat_of(name).opened(thinking=True) else f"<think>{text}"
    (call,) = parse(name, text, thinking=True, inside=True).calls
    assert isinstance(call, Malformed) and "called while thinking" in call.why
    assert len(parse(name, text, thinking=True).calls) == 1


def test_cut_turns_close_earlier_thinking() -> None:
    chat, encode = inside("qwen3"), tokenizer_of("qwen3").encode
    answer = {"role": "tool", "content": "1", "name": "city", "tool_call_id": "call_0"}
    ids = [*chat.opening([{"role": "user", "content": "?"}], [CITY], thinking=True)]
    ids += encode("<think>\nhm<|im_end|>", add_special_tokens=False)
    ids = chat.extend(ids, [answer], thinking=True)
    ids += encode("and so", add_special_tokens=False)
    extended = chat.extend(ids, [answer], thinking=True)
    assert extended[: len(ids)] == ids
    added = chat.decode(extended[len(ids) :])
    assert added.index("</think>") < added.index("<|im_end|>")


def test_user_messages_end_blank_thinking() -> None:
    chat, encode = inside("qwen3"), tokenizer_of("qwen3").encode
    user = [{"role": "user", "content": "?"}]
    ids = [*chat.opening(user, [CITY], thinking=True), *encode("<think>\n<|im_end|>")]
    assert chat.extend(ids, user, thinking=True) is None
