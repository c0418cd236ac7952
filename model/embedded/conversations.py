"""A whole conversation as the embedded model is to see it in rollouts, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from keel.configs.schema import SourceConfig
from keel.model.embedded.tokenizer import TURN_END
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
) -> tuple[list[int], list[bool]]:
    """The ids of `messages` up to the last turn of the assistant's, and which of them it says: the
    same as when each turn is sampled after the ids of what came before it.

    Raises ValueError where the template shows earlier messages otherwise once others follow: a
    second user message would end the thinking.
    """
    ids: list[int] = []
    said: list[bool] = []
    done = ""

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
        if not (before.startswith(done) and after.startswith(before) and ended):
            raise ValueError(f"message {place}: the template shows what is before it otherwise now")
        add(before[len(done) :], by_policy=False)
        add(turn + ended, by_policy=True)
        done = before + turn + ended
    return ids, said


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
