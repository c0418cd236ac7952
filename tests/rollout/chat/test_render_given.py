"""Tests that existing conversations get the same ids as in a rollout, in every family's format."""

import random
from typing import Any

import numpy as np
import pytest

from keel.agents.conversation import Conversation
from keel.agents.environments.demonstrations import guess_demonstrations, trip_demonstrations
from keel.model.tiny.cold_start import _conversation_ids
from keel.rl.turns import Message, TurnResult
from keel.rl.types import Segment
from keel.rollout.chat.render import call_message
from keel.rollout.chat.render_given import _Context, render_given
from tests.rollout.chat.families import CITY, NAMES, WITHOUT_THINKING, chat_of, tokenizer_of

WORDS = ["Rome", "800 yuan.", "Is it (really)?", "a <|im_end|> b", "zwölf", "x\n\ny", '{"a": 1}']
ONE_CALL = ("llama3", "harmony")
TAGS = ("deepseek-v3.2", "glm", "tiny", "qwen3")
"""Formats in which a literal `<think>` cannot be mistaken for thinking."""

SEEDS = 2
COLD_STARTS = [
    (trip_demonstrations, {"level": 0}),
    (guess_demonstrations, {"options": {"min_number": 1, "max_number": 9, "max_turns": 9}}),
]
"""Functions that generate demonstrations, and the arguments for the environment of each."""


def conversation(draw: random.Random, name: str, *, thinking: bool) -> list[Message]:
    """Generate a conversation with any number of questions, answers and tool calls."""

    def text() -> str:
        more = ["so <think> it is"] if name in TAGS else []
        return " ".join(draw.choices(WORDS + more, k=draw.randint(1, 3)))

    def said(**more: Any) -> dict[str, Any]:
        always = name == "deepseek-v3.2"  # its encoding wants thinking after the last question
        thinks = thinking and (always or draw.random() < 0.8)
        thought = {"reasoning_content": text()} if thinks else {}
        return {"role": "assistant", "content": "", **thought, **more}

    messages: list[Message] = [{"role": "system", "content": text()}] * draw.randint(0, 1)
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        for turn in range(draw.randint(0, 2)):
            calls = [
                call_message(f"c{len(messages)}{i}", "city", {"name": text(), "days": turn})
                for i in range(1 if name in ONE_CALL else draw.randint(1, 2))
            ]
            messages.append(said(tool_calls=calls))
            messages += [
                {"role": "tool", "content": text(), "tool_call_id": c["id"], "name": "city"}
                for c in calls
            ]
        messages.append(said(content=text()))
    return messages


def sampled(name: str, messages: list[Message], contexts: list[_Context], *, thinking: bool) -> Any:
    """Return the segments of an episode in which the policy samples exactly the turns of
    `contexts`."""
    turns = [
        context.ids[start:stop]
        for context in contexts
        for start, stop in np.flatnonzero(
            np.diff(np.array(context.trained), prepend=False, append=False)
        ).reshape(-1, 2)
    ]
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(turns) == len(places)
    episode = Conversation(
        name="p/0",
        prompt_id="p",
        chat=chat_of(name),
        messages=messages[: places[0]],
        tools=[CITY],
        thinking=thinking,
    )
    for place, following, ids in zip(places, [*places[1:], None], turns, strict=True):
        request = episode.request(max_tokens=999, seed=0)
        zeros = np.zeros(len(ids), np.float32)
        parsed = episode.append_turn(
            request,
            TurnResult(
                token_ids_R=np.array(ids, np.int32),
                logp_old_R=zeros,
                version_R=zeros.astype(np.int32),
                finish_reason="stop",
            ),
        )
        said = messages[place]
        assert parsed.closed, "the end of the turn is learned, too"
        assert (parsed.content, parsed.reasoning) == (
            said["content"],
            said.get("reasoning_content", ""),
        )
        if following is not None:
            # Tool messages carry the ids of the parsed calls.
            between = [dict(m) for m in messages[place + 1 : following]]
            for call, answer in zip(parsed.calls, between, strict=False):
                answer["tool_call_id"] = call.call_id
            episode.continue_with(between)
    return episode.segments()


@pytest.mark.parametrize(
    ("name", "thinking"), [(name, thinking) for name in NAMES for thinking in (True, False)]
)
def test_trained_ids_match_a_rollout(name: str, thinking: bool) -> None:
    shows = thinking and name not in WITHOUT_THINKING
    for seed in range(SEEDS):
        messages = conversation(random.Random(f"{name} {seed}"), name, thinking=shows)
        contexts = render_given(chat_of(name), messages, [CITY], thinking=thinking)
        segments: tuple[Segment, ...] = sampled(name, messages, contexts, thinking=thinking)
        assert [context.ids for context in contexts] == [s.token_ids_T.tolist() for s in segments]
        assert [context.trained for context in contexts] == [
            s.trainable_T.tolist() for s in segments
        ]


@pytest.mark.parametrize(("make", "arguments"), COLD_STARTS, ids=["trip", "guess"])
def test_cold_start_trains_the_same_tokens(make: Any, arguments: dict[str, Any]) -> None:
    chat = chat_of("tiny")
    for one in make(2, seed=0, arguments=arguments):
        for said in (one.worked, one.hasty):
            for thinking in (True, False):
                (context,) = render_given(chat, said, one.tools, thinking=thinking)
                ids, marks = _conversation_ids(
                    tokenizer_of("tiny"), said, one.tools, thinking=thinking
                )
                assert (context.ids, context.trained) == (ids, marks)
