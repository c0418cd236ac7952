"""Conversations as segments: each token is trained once, each row comes from its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.conversation import Conversation, SegmentRecord
from keel.rl.turns import Message, Parsed, ToolSpec, TurnRequest, TurnResult
from keel.rl.types import NO_ROUTE, SamplingMasks
from tests.agents.scripted import ADD, chat, says

USER: Message = {"role": "user", "content": "ab"}
TOOL: Message = {"role": "tool", "content": "result"}


class FakeChat:
    """Two ids per message. Extends while `extends` is set."""

    stop_ids = (0,)

    def __init__(self) -> None:
        self.extends = True
        self.opened: list[list[Message]] = []

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        self.opened.append(list(messages))
        return [7 * len(self.opened) + i for i in range(2 * len(messages))]

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int] | None:
        return [*ids, *[5, 6] * len(messages)] if self.extends else None

    def parse(
        self,
        sampled: Sequence[int],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        turn: int,
        inside: bool = False,
    ) -> Parsed:
        return Parsed(content=f"turn {turn}", reasoning="", closed=True)


class FakeEngine:
    """Labels rows by (turn, position, version) and sampled tokens by their number."""

    def __init__(self, *, masks: bool = True, routes: bool = True) -> None:
        self.masks, self.routes = masks, routes
        self.turns = 0
        self.tokens = 0

    def sample(self, request: TurnRequest, versions: Sequence[int]) -> TurnResult:
        context, count = len(request.token_ids_T), len(versions)
        numbers = np.arange(self.tokens, self.tokens + count)
        rows = np.arange(request.routes_from, context + count - 1)
        version_of_row = [versions[max(t + 1 - context, 0)] if count else 0 for t in rows]
        labels = np.array([[self.turns, t, v] for t, v in zip(rows, version_of_row, strict=True)])
        self.turns += 1
        self.tokens += count
        masks = SamplingMasks.from_lists([[n, n + 1] for n in numbers]) if self.masks else None
        return TurnResult(
            token_ids_N=(1000 + numbers).astype(np.int32),
            logp_old_N=(-0.25 * numbers).astype(np.float32),
            version_N=np.array(versions, np.int32),
            finish_reason="stop",
            routes_RLK=labels.reshape(-1, 1, 3).astype(np.int16) if self.routes else None,
            sampling_mask=masks,
        )


def conversation_of(chat: FakeChat | None = None) -> Conversation:
    return Conversation(
        name="p/0",
        prompt_id="p",
        chat=chat or FakeChat(),
        messages=[USER],
        tools=(),
        thinking=False,
    )


def take_turn(conversation: Conversation, engine: FakeEngine, versions: Sequence[int]) -> None:
    conversation.append(engine.sample(conversation.request(max_tokens=9, seed=1), versions))


TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), max_size=4).map(sorted),  # versions of its tokens
        st.integers(1, 3),  # messages after it
        st.sampled_from(["extend", "extend", "extend", "fork", "rewrite"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(turns=TURNS, masks=st.booleans(), routes=st.booleans())
def test_tokens_are_trained_once_with_their_rows(turns: Any, masks: bool, routes: bool) -> None:
    chat, engine = FakeChat(), FakeEngine(masks=masks, routes=routes)
    conversation = conversation_of(chat)
    sampled: list[int] = []
    version_of: dict[int, int] = {}
    covered: list[list[tuple[int, int]]] = [[]]  # of each segment: (turn, end of its rows)
    contexts: list[list[int]] = []
    for versions, messages, then in turns:
        request = conversation.request(max_tokens=9, seed=1)
        assert request.token_ids_T.tolist() == list(conversation.ids)
        result = engine.sample(request, versions)
        covered[-1].append((engine.turns - 1, len(request.token_ids_T) + len(versions) - 1))
        conversation.append(result)
        contexts.append(list(conversation.ids))
        sampled += result.token_ids_N.tolist()
        version_of |= dict(zip(result.token_ids_N.tolist(), versions, strict=True))
        chat.extends = then == "extend"
        before = list(conversation.ids)
        if then == "rewrite":
            conversation.rewrite([USER], added=[TOOL])
        else:
            conversation.answer([TOOL] * messages)
        if then == "extend":
            assert list(conversation.ids)[: len(before)] == before
        else:
            covered.append([])

    segments = conversation.segments()
    trained = [t for s in segments for t in s.token_ids_T[s.trainable_T].tolist()]
    assert trained == sampled
    assert conversation.sampled_tokens == len(sampled)
    assert conversation.turns == len(turns)
    non_empty = [rows for rows in covered if any(turns[turn][0] for turn, _ in rows)]
    for segment, rows in zip(segments, non_empty, strict=True):
        ids = segment.token_ids_T.tolist()
        assert any(ids == context[: len(ids)] for context in contexts)
        assert segment.trainable_T[-1]
        assert (segment.sampling_mask is None) is not masks
        assert (segment.routes_TLK is None) is not routes
        for t, token in enumerate(ids):
            is_sampled, number = token >= 1000, token - 1000
            assert segment.trainable_T[t] == is_sampled
            assert segment.version_T[t] == (version_of[token] if is_sampled else -1)
            assert segment.logp_old_T[t] == (-0.25 * number if is_sampled else 0)
            if segment.sampling_mask is not None:
                span = [number, number + 1] if is_sampled else []
                assert segment.sampling_mask[t].tolist() == span
        if segment.routes_TLK is not None:
            assert segment.routes_TLK.dtype == np.int16
            origins = [
                next([turn, t] for turn, end in rows if t < end) for t in range(len(ids) - 1)
            ]
            assert segment.routes_TLK[:-1, 0, :2].tolist() == origins
            assert (segment.routes_TLK[-1] == NO_ROUTE).all()
            assert (segment.routes_TLK[:-1] != NO_ROUTE).all()


@pytest.mark.parametrize(
    "change",
    [
        {"logp_old_N": np.zeros(1, np.float32)},
        {"version_N": np.zeros(3, np.int32)},
        {"sampling_mask": SamplingMasks.empty(1)},
        {"routes_RLK": np.zeros((2, 1, 3), np.int16)},
    ],
)
def test_incomplete_turn_is_refused(change: dict[str, Any]) -> None:
    conversation, engine = conversation_of(), FakeEngine()
    result = engine.sample(conversation.request(max_tokens=9, seed=1), [0, 0])
    with pytest.raises(ValueError, match=next(iter(change))):
        conversation.append(replace(result, **change))


def test_turns_out_of_order_are_refused() -> None:
    conversation, engine = conversation_of(), FakeEngine()
    take_turn(conversation, engine, [0])
    with pytest.raises(ValueError):  # the policy has spoken
        conversation.request(max_tokens=9, seed=1)
    conversation.answer([TOOL])
    request = conversation.request(max_tokens=9, seed=1)
    with pytest.raises(ValueError):  # routes in some turns only
        conversation.append(FakeEngine(routes=False).sample(request, [0]))
    record = SegmentRecord("p", [1, 2])
    with pytest.raises(ValueError):  # changed ids
        record.extend([1, 3, 4])
    old = record.request("p/0", max_tokens=9, seed=1, timeout_s=9.0)
    record.extend([1, 2, 3])
    with pytest.raises(ValueError):  # an older context
        record.append(old, engine.sample(old, [0]))


@pytest.mark.parametrize("restarted", [False, True])
def test_question_after_a_result_is_rendered_with_it(restarted: bool) -> None:
    question: Message = {"role": "user", "content": "So far?"}
    result: Message = {"role": "tool", "content": "3", "tool_call_id": "call_0_0", "name": "add"}
    conversation = Conversation(
        name="p/0", prompt_id="p", chat=chat(), messages=[USER], tools=(ADD,), thinking=False
    )
    policy = says("@add 1, 2", "Three.")
    conversation.append(policy.say(conversation.request(max_tokens=99, seed=1)))
    conversation.answer([result])
    if restarted:
        conversation.rewrite(conversation.view)
    conversation.answer([question])
    expected = chat().opening(conversation.view, (ADD,), thinking=False)
    assert list(conversation.ids) == expected, chat().decode(conversation.ids)
    assert conversation.view[-2:] == conversation.transcript[-2:] == [result, question]
    assert conversation.forks == restarted
    conversation.append(policy.say(conversation.request(max_tokens=99, seed=1)))
    segments = conversation.segments()
    assert len(segments) == 1 + restarted
    ids = segments[-1].token_ids_T.tolist()
    assert ids == list(conversation.ids) and ids[: len(expected)] == expected
    routes = segments[-1].routes_TLK
    assert routes is not None and (routes[:-1, 0, 0] % 100).tolist() == [*range(len(ids) - 1)]
