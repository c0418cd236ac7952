"""A scripted conversation is the ids that a rollout of it would be."""

from __future__ import annotations

from itertools import groupby

import pytest

from keel.agents.environments.demonstrations import trip_demonstrations
from keel.model.tiny.conversations import conversation_ids
from keel.model.tiny.tokenizer import TURN_END, build_tokenizer
from keel.rl.turns import ToolSpec
from keel.rollout.chat.chat import TemplateChat


@pytest.mark.parametrize(("thinking", "inside"), [(True, False), (False, False), (True, True)])
def test_as_the_turns_of_a_rollout(thinking: bool, inside: bool) -> None:
    """inside: with calls in the thinking, which the first turn opens."""
    tokenizer = build_tokenizer()
    chat = TemplateChat(tokenizer, tools_in_thinking=inside)
    for level in (0, 1):
        for one in trip_demonstrations(5, seed=2, arguments={"level": level}):
            ids, said = conversation_ids(
                tokenizer, one.worked, one.tools, thinking=thinking, tools_in_thinking=inside
            )
            context = chat.opening(one.worked[:1], one.tools, thinking=thinking)
            results = [message for message in one.worked if message["role"] == "tool"]
            for turn in range(len(results) + 1):
                start = len(context)
                assert ids[:start] == context and not said[start - 1] and said[start]
                end = start + said[start:].index(False) if False in said[start:] else len(ids)
                sampled = ids[start:end]
                assert tokenizer.decode(sampled[-1]) == TURN_END
                parsed = chat.parse(
                    sampled, one.tools, thinking=thinking, turn=turn, inside=inside and turn > 0
                )
                assert parsed.inside == inside
                wanted = [m for m in one.worked if m["role"] == "assistant"][turn]["tool_calls"][0]
                (call,) = parsed.calls
                assert call.name == wanted["function"]["name"]  # pyright: ignore
                assert call.arguments == wanted["function"]["arguments"]  # pyright: ignore
                if turn < len(results):
                    longer = chat.extend([*context, *sampled], [results[turn]], thinking=thinking)
                    assert longer is not None
                    context = longer
            assert end == len(ids)


def test_thinking_with_a_call_and_the_answer_after_it() -> None:
    """What a policy says of its own, and in which mode it says it."""
    tokenizer = build_tokenizer()
    tool = ToolSpec(name="look", description="", parameters={"properties": {"at": {}}})
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    result = {"role": "tool", "content": "2"}
    asked = {"role": "user", "content": "a"}
    calls = {"role": "assistant", "content": "", "reasoning_content": "b", "tool_calls": [call]}
    answers = {"role": "assistant", "content": "d", "reasoning_content": "c"}
    messages = [asked, calls, result, {**calls, "reasoning_content": ""}, result, answers]
    ids, said = conversation_ids(tokenizer, messages, [tool], thinking=True, tools_in_thinking=True)
    own = [i if mine else -1 for i, mine in zip(ids, said, strict=True)]
    turns = [list(run) for mine, run in groupby(own, lambda i: i >= 0) if mine]
    assert [tokenizer.decode(turn) for turn in turns] == [
        "<think>\nb\n@look 1<|im_end|>",
        "@look 1<|im_end|>",
        "c\n</think>\n\nd<|im_end|>",
    ]
    at_once, plain = (
        conversation_ids(
            tokenizer, [asked, answers], [tool], thinking=True, tools_in_thinking=inside
        )
        for inside in (True, False)
    )
    assert at_once == plain, "without a call it is thinking like any other"
    with pytest.raises(ValueError, match="message 3: the template shows what is before"):
        conversation_ids(
            tokenizer, [asked, answers, asked, calls], [tool], thinking=True, tools_in_thinking=True
        )


def test_what_cannot_be_one_run_of_ids_is_refused() -> None:
    user = {"role": "user", "content": "a"}
    thought = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    messages = [user, thought, user, thought]
    with pytest.raises(ValueError, match="message 3: the template shows what is before"):
        conversation_ids(build_tokenizer(), messages, (), thinking=True)
    with pytest.raises(ValueError, match="without a turn of the assistant's"):
        conversation_ids(build_tokenizer(), [user], (), thinking=True)
