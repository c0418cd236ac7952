"""A whole conversation as the tiny model is to see it in rollouts, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from keel.configs.schema import SourceConfig
from keel.model.tiny.tokenizer import THINK_END, THINK_START, TURN_END
from keel.rl.turns import Message, ToolSpec


class Demonstration(Protocol):
    """A task in an environment, done as it should be and in haste."""

    @property
    def tools(self) -> Sequence[ToolSpec]: ...
    @property
    def worked(self) -> Sequence[Message]: ...
    @property
    def hasty(self) -> Sequence[Message]: ...


def demonstrated(source: SourceConfig) -> bool:
    """Whether conversations of this source can be had."""
    return bool(source.environment.demonstrations)


def conversation_ids(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
    tools_in_thinking: bool = False,
) -> tuple[list[int], list[bool]]:
    """The ids of `messages` up to the last turn of the assistant's, and which of them it says: the
    same as when each turn is sampled after the ids of what came before it. tools_in_thinking: turns
    with calls leave the thinking open for the next one (`agents.tools_in_thinking`).

    Raises ValueError where the template shows earlier messages otherwise once others follow (a
    second user message would end the thinking), and where the assistant has no turn.
    """
    ids: list[int] = []
    said: list[bool] = []
    done = ""
    inside = False

    def add(text: str, *, by_policy: bool) -> None:
        new: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore
        ids.extend(new)
        said.extend([by_policy] * len(new))

    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _text(tokenizer, messages[:place], tools, thinking=thinking, speak=True)
        after = _text(tokenizer, messages[: place + 1], tools, thinking=thinking, speak=False)
        turn, ended, _ = after[len(before) :].rpartition(TURN_END)
        thought = tools_in_thinking and done and messages[place - 1]["role"] != "tool"
        if thought or not (before.startswith(done) and after.startswith(before) and ended):
            raise ValueError(f"message {place}: the template shows what is before it otherwise now")
        add(before[len(done) :], by_policy=False)
        done = before + turn + ended
        if tools_in_thinking:
            turn = _in_thinking(message, turn, goes_on=inside)
            inside = bool(message.get("tool_calls"))
        add(turn + ended, by_policy=True)
    if not ids:
        raise ValueError("a conversation without a turn of the assistant's has nothing to learn")
    return ids, said


def _in_thinking(message: Message, turn: str, *, goes_on: bool) -> str:
    """A turn with its calls in the thinking, and with its words after it. `goes_on`: the turn
    before has left the thinking open."""
    reasoning = str(message.get("reasoning_content") or "").strip("\n")
    thought = ("" if goes_on else f"{THINK_START}\n") + (f"{reasoning}\n" if reasoning else "")
    after = turn.rpartition(THINK_END)[2].lstrip("\n")
    return thought + after if message.get("tool_calls") else f"{thought}{THINK_END}\n\n{after}"


def _text(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
    speak: bool,
) -> str:
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tools=[tool.as_json() for tool in tools] or None,
        add_generation_prompt=speak,
        enable_thinking=thinking,
        tokenize=False,
    )
    assert isinstance(text, str)
    return text
