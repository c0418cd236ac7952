"""Conversations as segments: each token is trained once, each row comes from its turn."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.agents.conversation import Conversation
from keel.rl.recordings import SamplingMasks, StoredRecordings
from keel.rl.turns import Message
from keel.rollout.engine import worker
from keel.rollout.engine.worker import detach
from tests.agents.endpoint.kit import check_law, script
from tests.agents.scripted import ADD, CHAT, Policy

USER: Message = {"role": "user", "content": "ab"}


def conversation_of(*, thinking: bool = False, tools: Any = ()) -> Conversation:
    return Conversation(
        name="p/0", prompt_id="p", chat=CHAT, messages=[USER], tools=tools, thinking=thinking
    )


def take_turn(conversation: Conversation, policy: Policy) -> None:
    request = conversation.request(max_tokens=99, seed=1)
    conversation.append_turn(request, policy.say(request))


TURNS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["extend", "extend", "rewrite"])), max_size=7
)
"""The number of messages after each turn, and how they continue the context."""


@given(turns=TURNS, plain=st.booleans(), thinking=st.booleans(), silent=st.booleans())
def test_tokens_are_trained_once_with_their_rows(
    turns: Any, plain: bool, thinking: bool, silent: bool
) -> None:
    conversation, policy = conversation_of(thinking=thinking), Policy(script)
    policy.plain = plain
    for messages, then in turns:
        take_turn(conversation, policy)
        before = list(conversation.ids)
        if then == "rewrite":
            conversation.note_messages([USER])
            conversation.rewrite([USER])
        else:
            conversation.continue_with([USER] * messages)
            assert thinking or list(conversation.ids)[: len(before)] == before
    policy.silent = silent  # the last turn may have no time to sample a token
    take_turn(conversation, policy)
    check_law(policy, conversation.segments())
    assert conversation.sampled_tokens == len(policy.numbers)
    assert len(conversation._records) > sum(then == "rewrite" for _, then in turns)


@pytest.mark.parametrize("stored_bytes", [1, 10**9])
@pytest.mark.parametrize(
    "change",
    [
        {"logp_old_R": np.zeros(1, np.float32)},
        {"version_R": np.zeros(3, np.int32)},
        {"sampling_mask": SamplingMasks.empty(1)},
        {"routes_TLK": np.zeros((2, 1, 3), np.int16)},
        {"selected_TLb": np.zeros((2, 1, 3), np.uint8)},
    ],
)
def test_incomplete_turn_is_refused(
    change: dict[str, Any], stored_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, policy = conversation_of(), Policy(["word"])
    request = conversation.request(max_tokens=9, seed=1)
    result: Any = policy.say(request)
    if change.keys() <= result.recordings.lengths.keys():
        ((_, recordings),) = result.recordings.parts
        changed = StoredRecordings.of(replace(recordings, **change), len(request.token_ids_T))
        result = replace(result, recordings=changed)
    else:
        result = replace(result, **change)
    monkeypatch.setattr(worker, "STORED_BYTES", stored_bytes)
    result = detach(request, result)[0]
    with pytest.raises(ValueError, match=next(iter(change))):
        conversation.append_turn(request, result)


def test_turn_of_an_older_context_is_refused() -> None:
    conversation, policy = conversation_of(), Policy(["word", "word"])
    request = conversation.request(max_tokens=9, seed=1)
    conversation.append_turn(request, policy.say(request))
    with pytest.raises(ValueError, match="older context"):
        conversation.append_turn(request, policy.say(request))


@pytest.mark.parametrize("restarted", [False, True])
def test_question_after_a_result_is_rendered_with_it(restarted: bool) -> None:
    question: Message = {"role": "user", "content": "So far?"}
    result: Message = {"role": "tool", "content": "3", "tool_call_id": "call_0_0", "name": "add"}
    conversation, policy = conversation_of(tools=(ADD,)), Policy(["@add 1, 2"])
    take_turn(conversation, policy)
    conversation.continue_with([result])
    if restarted:
        conversation.rewrite(conversation.context)
    conversation.continue_with([question])
    expected = CHAT.opening(conversation.context, (ADD,), thinking=False)
    assert list(conversation.ids) == expected, CHAT.decode(conversation.ids)
    assert conversation.context[-2:] == conversation.transcript[-2:] == [result, question]
    assert len(conversation._records) == 1 + restarted


def test_asking_keeps_the_thoughts_in_the_context() -> None:
    result: Message = {"role": "tool", "content": "3", "tool_call_id": "call_0_0", "name": "add"}
    conversation = conversation_of(thinking=True, tools=(ADD,))
    take_turn(conversation, Policy(["<think>\nLet me add.\n</think>@add 1, 2"]))
    before = list(conversation.ids)
    conversation.continue_with([result])
    conversation.ask("So far?")
    assert list(conversation.ids[: len(before)]) == before
    assert "Let me add." in (text := CHAT.decode(conversation.ids))
    assert text.count("3\n\nSo far?") == 1 and text.count("So far?") == 1
    assert conversation.transcript == conversation.context
