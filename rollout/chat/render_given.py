"""Tokenizes existing conversations into the ids that the policy would have sampled.

Each turn has the same context as in a rollout: an opening, the previous turns, and the text that
`Chat.extend` inserts between turns. During training, each token therefore follows exactly the ids
that would precede it during sampling. A conversation is split into several contexts at the same
places as in a rollout: at user messages that end thinking (`keel.agents.conversation`).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from keel.rl.turns import Message, Parsed, ToolCall, ToolSpec
from keel.rollout.chat.chat import TemplateChat

_ASSISTANT = "assistant"
_CHECKED: WeakKeyDictionary[TemplateChat, set[tuple[Any, ...]]] = WeakKeyDictionary()
"""Sequences of roles and rendering modes for which the template is known to show every message."""


@dataclass(frozen=True, slots=True)
class _Context:
    """The token ids of one context, along with a mask of the tokens to train on."""

    ids: list[int] = field(default_factory=list[int])
    trained: list[bool] = field(default_factory=list[bool])

    def add(self, ids: Sequence[int], *, trained: bool) -> None:
        self.ids.extend(ids)
        self.trained.extend([trained] * len(ids))


def render_given(
    chat: TemplateChat,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
    trained: Collection[int] | None = None,
) -> list[_Context]:
    """Tokenize a conversation whose assistant messages stand in for policy turns. Each returned
    context ends with such a turn.

    `trained` lists the indices of the messages to train on, or None for all assistant messages.
    Reasoning is left out unless `thinking` is set. Raises ValueError naming the first message that
    the template doesn't show in full.
    """
    if not thinking:
        messages = [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            for message in messages
        ]
    contexts: list[_Context] = []
    done = 0  # number of messages covered by the contexts so far
    for index, message in enumerate(messages):
        if message["role"] != _ASSISTANT or (trained is not None and index not in trained):
            continue
        if index == 0:
            raise ValueError("messages[0] is the assistant's: it needs a message to answer")
        between = messages[done:index]
        opening = partial(chat.opening, tools=tools, thinking=thinking)
        extended = None
        if contexts and between and all(one["role"] != _ASSISTANT for one in between):
            extend = partial(chat.extend, contexts[-1].ids, thinking=thinking)
            extended = extend(between)
            if extended is not None:
                _check_shown(chat, extend, between, done, (thinking, None))
        if extended is None:
            contexts.append(_Context())
            extended = opening(messages[:index])
            _check_shown(chat, opening, messages[:index], 0, (thinking, bool(tools)))
        context = contexts[-1]
        context.add(extended[len(context.ids) :], trained=False)
        after = messages[index + 1 : index + 2]
        try:
            turn = chat.turn_ids(messages[:index], message, after, tools, thinking=thinking)
            parsed = chat.parse(turn, tools, thinking=thinking, turn=0)
            _check_read_back(chat, message, parsed)
        except ValueError as error:
            raise ValueError(f"messages[{index}]: {error}") from error
        context.add(turn, trained=True)
        done = index + 1
    return contexts


def _check_shown(
    chat: TemplateChat,
    write: Callable[[list[Message]], list[int] | None],
    messages: Sequence[Message],
    first: int,
    mode: tuple[bool, bool | None],
) -> None:
    """Raise ValueError if the template doesn't show a message that the assistant did not write.
    Some templates skip messages with unknown roles, or a system message that isn't first.

    The check replaces the messages' contents with probe words and renders them with `write`, once
    per sequence of roles and rendering mode. `first` is the index of the first message.
    """
    roles = tuple(str(one["role"]) if _text_of(one, "content") else "" for one in messages)
    checked = _CHECKED.setdefault(chat, set())
    if (mode, roles) in checked:
        return
    probes = {
        index: f"keelprobe{index}x"
        for index, role in enumerate(roles)
        if role not in ("", _ASSISTANT)
    }
    probed: list[Message] = [
        {**one, "content": probes.get(index, one.get("content"))}
        for index, one in enumerate(messages)
    ]
    text = chat.decode(write(probed) or ())
    for index, probe in probes.items():
        if probe not in text:
            raise ValueError(
                f"messages[{first + index}]: {chat.label} does not show a message of the role "
                f"{roles[index]} here. Change its role or place, or remove it"
            )
    checked.add((mode, roles))


def _check_read_back(chat: TemplateChat, message: Message, parsed: Parsed) -> None:
    calls = [
        (call.name, dict(call.arguments)) if isinstance(call, ToolCall) else None
        for call in parsed.calls
    ]
    for name, value, expected in (
        ("reasoning", parsed.reasoning, _text_of(message, "reasoning_content")),
        ("content", parsed.content, _text_of(message, "content")),
        ("calls", calls, [_parse_call(call) for call in message.get("tool_calls") or ()]),
    ):
        if value != expected:
            raise ValueError(
                f"{chat.label} would parse its {name} as {value!r:.80} instead of "
                f"{expected!r:.80}. Set model.chat_template to one that shows all of a turn"
            )


def _parse_call(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    function: Mapping[str, Any] = call.get("function") or call
    arguments = function.get("arguments") or {}
    parsed = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    return str(function["name"]), parsed


def _text_of(message: Message, key: str) -> str:
    return str(message.get(key) or "").strip()
