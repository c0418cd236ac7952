"""Tokenisation of given conversations, in the ids that the policy would have sampled.

The context of each turn equals that of a rollout: an opening, the turns so far, and the text that
`Chat.extend` puts between them. A token is thus trained after exactly the ids that it would be
sampled after, and a conversation is split into several contexts where a rollout's would be (at a
user message that ends thinking, `keel.agents.conversation`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rollout.chat.chat import TemplateChat

ASSISTANT = "assistant"
OPENS = (
    ": it opens each turn's thinking itself, but shows finished turns without thinking; give a "
    "template that keeps the last turn's (model.chat_template)"
)
_END = {"role": "user", "content": "?"}
_SHOWN: WeakKeyDictionary[TemplateChat, set[tuple[Any, ...]]] = WeakKeyDictionary()
"""Sequences of roles, by way of rendering, that a template shows completely."""


@dataclass(frozen=True, slots=True)
class Context:
    """The ids of one context, and a mask of those that the policy says."""

    ids: list[int] = field(default_factory=list[int])
    said: list[bool] = field(default_factory=list[bool])

    def add(self, ids: Sequence[int], *, said: bool) -> None:
        self.ids.extend(ids)
        self.said.extend([said] * len(ids))


def taught(
    chat: TemplateChat,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
    trained: Collection[int] | None = None,
) -> list[Context]:
    """Return the contexts in which the policy says the assistant's messages and ends its turns.
    Each context ends with a turn of the policy.

    `trained`: places of the messages that are learned; the others are context. None: all of the
    assistant's. `thinking`: the mode; without it, reasoning in the messages is omitted.

    Raises `ValueError` if the template does not show a message completely; names its place and the
    part that is lost.
    """
    if not thinking:
        messages = [_without_reasoning(message) for message in messages]
    contexts: list[Context] = []
    done = 0
    """Number of messages in the last context."""
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT or (trained is not None and place not in trained):
            continue
        if place == 0:
            raise ValueError("messages[0] is the assistant's: it needs something to answer")
        between = messages[done:place]
        opening = partial(chat.opening, tools=tools, thinking=thinking)
        extended = None
        if contexts and between and all(one["role"] != ASSISTANT for one in between):
            extend = partial(chat.extend, contexts[-1].ids, thinking=thinking)
            extended = extend(between)
            if extended is not None:
                _check_shown(chat, extend, between, done, (thinking, None))
        if extended is None:
            contexts.append(Context())
            extended = opening(messages[:place])
            _check_shown(chat, opening, messages[:place], 0, (thinking, bool(tools)))
        here = contexts[-1]
        here.add(extended[len(here.ids) :], said=False)
        after = messages[place + 1 : place + 2]
        try:
            turn = turn_ids(chat, messages[:place], message, after, tools, thinking=thinking)
            _check_read_back(chat, message, turn, tools, thinking=thinking)
        except ValueError as error:
            raise ValueError(f"messages[{place}]: {error}") from error
        here.add(turn, said=True)
        done = place + 1
    return contexts


def turn_ids(
    chat: TemplateChat,
    messages: Sequence[Message],
    said: Message,
    after: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
) -> list[int]:
    """Return the ids that the policy samples after `messages` to say `said`, end of the turn
    included. `after`: the next messages, for formats whose turns end with the mark that begins the
    next message.

    Raises `ValueError` if the template shows `messages` otherwise once `said` follows.
    """
    before, _ = chat.text(messages, tools, thinking=thinking)
    whole, marks = chat.text([*messages, said], tools, thinking=thinking, speak=False)
    turn = chat.turn_of(before, whole)
    if turn is None:
        raise ValueError(
            f"{chat.renderer.name} (format {chat.format.name}) shows earlier messages otherwise "
            "once others follow"
        )
    reasoning = str(said.get("reasoning_content") or "")
    if reasoning and turn.startswith(chat.marks.close):  # a history without the thinking
        turn = chat.encoder.shield_whole(reasoning, marks) + turn
    ends = [place + len(end) for end in chat.ends if (place := turn.find(end)) >= 0]
    if ends:
        return chat.encoder.encode(turn[: min(ends)], marks)
    follows = [one for one in after if one["role"] != ASSISTANT] or [_END]
    return chat.encoder.encode(turn + chat.end_before(follows, thinking=thinking), marks)


def _check_shown(
    chat: TemplateChat,
    write: Callable[[list[Message]], list[int] | None],
    messages: Sequence[Message],
    first: int,
    how: tuple[bool, bool | None],
) -> None:
    """Check that `write` shows every message that is not the assistant's: a template may skip
    unknown roles, or a system message that is not the first. Contents are replaced by probe words,
    and each sequence of roles is checked once per way of rendering. first: place of the first
    message. Raises `ValueError` naming the message that is lost."""
    roles = tuple(
        str(one["role"]) if _plain(one.get("content")) else "" for one in messages
    )  # an empty message loses nothing
    seen = _SHOWN.setdefault(chat, set())
    if (how, roles) in seen:
        return
    words = [
        f"keelprobe{place}x" if role not in ("", ASSISTANT) else ""
        for place, role in enumerate(roles)
    ]
    probed = [
        {**one, "content": word} if word else one for one, word in zip(messages, words, strict=True)
    ]
    text = chat.decode(write(probed) or ())
    for place, word in enumerate(words):
        if word not in text:
            raise ValueError(
                f"messages[{first + place}]: {chat.renderer.name} (format {chat.format.name}) does "
                f"not show a message of the role {roles[place]} here; give it another role or "
                "place, or leave it out"
            )
    seen.add((how, roles))


def _check_read_back(
    chat: TemplateChat,
    message: Message,
    turn: Sequence[int],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
) -> None:
    """Check that a rollout would parse the turn to the given message."""
    parsed = chat.parse(turn, tools, thinking=thinking, turn=0)
    calls = [
        (call.name, dict(call.arguments)) if isinstance(call, ToolCall) else None
        for call in parsed.calls
    ]
    expected = [_call(call) for call in message.get("tool_calls") or ()]
    for what, read, meant in (
        ("reasoning", parsed.reasoning, _plain(message.get("reasoning_content"))),
        ("content", parsed.content, _plain(message.get("content"))),
        ("calls", calls, expected),
    ):
        if read != meant:
            lost = chat.opened(thinking=thinking) and chat.marks.close not in chat.decode(turn)
            raise ValueError(
                f"{chat.renderer.name} (format {chat.format.name}) would read its {what} as "
                f"{_short(read)}, and it has {_short(meant)}{OPENS * lost}"
            )


def _call(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    function: Mapping[str, Any] = call.get("function") or call
    arguments = function.get("arguments") or {}
    return str(function["name"]), (
        json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    )


def _plain(text: Any) -> str:
    return str(text or "").strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}
