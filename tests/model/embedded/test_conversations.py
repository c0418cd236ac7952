"""A scripted conversation is the ids that a rollout of it would be."""

from __future__ import annotations

import pytest

from keel.agents.environments.demonstrations import trip_demonstrations
from keel.model.embedded.conversations import conversation_ids
from keel.model.embedded.tokenizer import TURN_END, build_tokenizer
from keel.rollout.chat.chat import TemplateChat


@pytest.mark.parametrize("thinking", [True, False])
def test_as_the_turns_of_a_rollout(thinking: bool) -> None:
    tokenizer = build_tokenizer()
    chat = TemplateChat(tokenizer)
    for level in (0, 1):
        for one in trip_demonstrations(5, seed=2, arguments={"level": level}):
            ids, said = conversation_ids(tokenizer, one.worked, one.tools, thinking=thinking)
            context = chat.opening(one.worked[:1], one.tools, thinking=thinking)
            results = [message for message in one.worked if message["role"] == "tool"]
            for turn in range(len(results) + 1):
                start = len(context)
                assert ids[:start] == context and not said[start - 1] and said[start]
                end = start + said[start:].index(False) if False in said[start:] else len(ids)
                sampled = ids[start:end]
                assert tokenizer.decode(sampled[-1]) == TURN_END
                parsed = chat.parse(sampled, one.tools, thinking=thinking, turn=turn)
                wanted = [m for m in one.worked if m["role"] == "assistant"][turn]["tool_calls"][0]
                (call,) = parsed.calls
                assert call.name == wanted["function"]["name"]  # pyright: ignore
                assert call.arguments == wanted["function"]["arguments"]  # pyright: ignore
                if turn < len(results):
                    longer = chat.extend([*context, *sampled], [results[turn]], thinking=thinking)
                    assert longer is not None
                    context = longer
            assert end == len(ids)


def test_what_cannot_be_one_run_of_ids_is_refused() -> None:
    user = {"role": "user", "content": "a"}
    thought = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    messages = [user, thought, user, thought]
    with pytest.raises(ValueError, match="message 3: the template shows what is before"):
        conversation_ids(build_tokenizer(), messages, (), thinking=True)
