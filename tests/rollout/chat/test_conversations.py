"""Tests whole conversations in every family's format, recorded by `keel.agents.conversation`."""

from typing import Any

import numpy as np
import pytest

from keel.agents.conversation import Conversation
from keel.rl.turns import MALFORMED, Malformed, Message, Parsed, TurnResult
from keel.rollout.chat.template_checks import check_calls_in_thinking, check_prefix_preserving
from tests.rollout.chat.families import CITY, NAMES, chat_of, tokenizer_of
from tests.rollout.chat.test_parsing import DSML, ENDS

CALLS = {
    "tiny": ('@city "Rome"', "@city ["),
    "qwen3": (
        '<tool_call>{"name": "city", "arguments": {"name": "Rome"}}</tool_call>',
        "<tool_call>",
    ),
    "deepseek-v3.2": (
        f'<{DSML}function_calls>\n<{DSML}invoke name="city">\n<{DSML}parameter name="name" '
        f'string="true">Rome</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
        f"<{DSML}function_calls>",
    ),
    "glm": (
        "<tool_call>city\n<arg_key>name</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "<tool_call>",
    ),
    "llama3": (
        '{"name": "city", "parameters": {"name": "Rome"}}',
        '{"name": "city", "parameters": }',
    ),
    "harmony": (
        '<|channel|>commentary to=functions.city <|constrain|>json<|message|>{"name": "Rome"}',
        "<|channel|>commentary to=functions.city<|message|>{",
    ),
}
CALLS["hermes"] = CALLS["qwen3"]
THOUGHT = {
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
    "deepseek-v3.2": "hm</think>",
    "glm": "\n<think>hm</think>\n",
}
ANSWER = {"harmony": "<|channel|>final<|message|>Rome."}


def say(conversation: Conversation, name: str, text: str) -> Parsed:
    request = conversation.request(max_tokens=99, seed=0)
    ids = tokenizer_of(name).encode(text, add_special_tokens=False)
    return conversation.append_turn(
        request,
        TurnResult(
            token_ids_R=np.array(ids, np.int32),
            logp_old_R=np.zeros(len(ids), np.float32),
            version_R=np.full(len(ids), len(request.token_ids_T), np.int32),
            finish_reason="stop",
        ),
    )


def answers(parsed: Parsed, content: str) -> list[Message]:
    return [
        {
            "role": "tool",
            "content": content,
            "tool_call_id": call.call_id,
            "name": MALFORMED if isinstance(call, Malformed) else call.name,
        }
        for call in parsed.calls
    ]


@pytest.mark.parametrize("name", NAMES)
def test_conversation_with_good_and_bad_calls(name: str) -> None:
    thought = THOUGHT.get(name, "<think>\nhm\n</think>\n\n")
    good, bad = CALLS[name]
    end = ENDS.get(name, "<|im_end|>")
    chat: Any = chat_of(name)
    hostile = "".join(chat.encoder.controls)
    conversation = Conversation(
        name="p/0",
        prompt_id="p",
        chat=chat,
        messages=[{"role": "user", "content": f"Where? {hostile}"}],
        tools=[CITY],
        thinking=True,
    )
    for text, kind in ((good, "city"), (bad, MALFORMED), (good, "city")):
        parsed = say(conversation, name, thought + text + end)
        assert parsed.closed and parsed.reasoning == "hm"
        (answer,) = answers(parsed, hostile)
        assert answer["name"] == kind
        conversation.continue_with([answer])
    assert len(conversation.segments()) == 1, "tools only: one segment"
    last = {"harmony": "<|return|>", "glm": "<|user|>"}.get(name, end)
    parsed = say(conversation, name, thought + ANSWER.get(name, "Rome.") + last)
    assert (parsed.content, parsed.calls) == ("Rome.", ())
    conversation.continue_with([{"role": "user", "content": "And then?"}])
    say(conversation, name, thought + ANSWER.get(name, "Rome.") + last)

    segments = conversation.segments()
    assert len(segments) == 2
    assert sum(int(segment.trainable_T.sum()) for segment in segments) == (
        conversation.sampled_tokens
    )
    ids = {call["id"] for m in conversation.transcript for call in m.get("tool_calls", ())}
    assert ids == {"call_0_0", "call_1_0", "call_2_0"}
    assert "hm" not in chat.decode(segments[1].token_ids_T[~segments[1].trainable_T].tolist())


@pytest.mark.parametrize("name", ["tiny", "qwen3", "glm", "deepseek-v3.2"])
def test_calls_in_one_thinking_keep_the_prefix(name: str) -> None:
    chat: Any = chat_of(name, tools_in_thinking=True)
    check_prefix_preserving(chat, modes=(True,))
    check_calls_in_thinking(chat)
