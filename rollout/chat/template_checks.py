"""Checks that conversations can be extended under a model's own template, made before a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from keel.rl.turns import Malformed, Message, ToolCall, ToolSpec
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.encoding import free_marks
from keel.rollout.chat.render import call_message

_OTHER_TOKENIZER = "Name a tokenizer of byte-level BPE in model.tokenizer"
_WRITES_TOOLS = (
    "Choose a model whose template lists tools and writes calls, or give such a template "
    "(model.chat_template)"
)
_TOOLS = tuple(
    ToolSpec(
        name=name,
        description=f"Looks a {name} up.",
        parameters={"type": "object", "properties": {"name": {"type": "string"}}},
    )
    for name in ("city", "hotel")
)


def check_prefix_law(
    chat: TemplateChat,
    *,
    tools: Sequence[ToolSpec] = _TOOLS,
    modes: Sequence[bool] = (True, False),
) -> None:
    """Check on short conversations that `extend` equals one render of the whole conversation, that
    no text becomes a control token, and that tools are shown. `modes`: with thinking or not.

    One difference is allowed: the empty think block that a template puts before a turn without
    thinking, and omits from its history, stays. The policy was sampled after it.

    Raises:
        ValueError: they differ; names the template, the case and the fix.
    """
    for thinking in modes:
        for calls in ((), (1,), (1, 1), (2, 1), (3, 1, 2)) if tools else ((),):
            _check_conversation(chat, tools, calls, thinking=thinking)
        _check_controls(chat, tools, thinking=thinking)


def check_calls_in_thinking(chat: TemplateChat, *, tools: Sequence[ToolSpec] = _TOOLS) -> None:
    """Check that a call in the thinking is parsed, that its result follows as after any other call,
    that the thinking then continues, and that a call after the thinking is malformed. `chat`: one
    with `tools_in_thinking` that passes `check_prefix_law`.

    Raises:
        ValueError: a check fails; names the template, the case and the fix.
    """
    cure = "Leave agents.tools_in_thinking off, or choose a model whose template marks thinking"
    messages: list[Message] = [{"role": "user", "content": "Which?"}]
    said = _words(0, 1, tools, thinking=True)
    after = _answers(said)
    ids = chat.opening(messages, tools, thinking=True)
    ended = turn_ids(chat, messages, said, after, tools, thinking=True)
    text = chat.decode(ended)
    close = chat.marks.close
    if close not in text:
        raise _failure(chat, True, f"it has no {close} that a call could stand before", cure)
    inside = chat.encoder.encode(text.replace(close, ""), free_marks(text))
    parsed = chat.parse(inside, tools, thinking=True, turn=0)
    expected = said["tool_calls"][0]["function"]
    read = [
        (call.name, dict(call.arguments)) for call in parsed.calls if isinstance(call, ToolCall)
    ]
    if read != [(expected["name"], expected["arguments"])] or not parsed.inside:
        raise _failure(chat, True, "a call in the thinking is not read as one", cure)
    first, second = ([*ids, *turn] for turn in (inside, ended))
    extended, usual = (chat.extend(turn, after, thinking=True) for turn in (first, second))
    if extended is None or usual is None or extended != [*first, *usual[len(second) :]]:
        raise _failure(chat, True, "it does not go on after a tool's result in the thinking", cure)
    rest = chat.encoder.encode(f"Thought1z{close}Said1z", free_marks(()))
    parsed = chat.parse(rest, tools, thinking=True, turn=1, inside=True)
    if (parsed.reasoning, parsed.content, parsed.inside) != ("Thought1z", "Said1z", False):
        raise _failure(chat, True, "it does not tell the thinking from the answer after it", cure)
    outside = chat.parse(ended, tools, thinking=True, turn=0).calls
    if [type(call) for call in outside] != [Malformed]:
        raise _failure(chat, True, "a call after the thinking is read as one", cure)


def turn_ids(
    chat: TemplateChat,
    messages: Sequence[Message],
    said: Message,
    after: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
) -> list[int]:
    """Return the ids that the policy samples to say `said`, end of the turn included. `said` must
    end in text that appears nowhere else.

    Raises `ValueError` if the template shows `messages` otherwise once `said` and `after` follow,
    or does not show `said`.
    """
    before, _ = chat.text(messages, tools, thinking=thinking)
    # A user's next message ends the thinking: the turn is looked at before that.
    shown = after if after[0]["role"] == "tool" else ()
    conversation = [*messages, said, *shown]
    whole, marks = chat.text(conversation, tools, thinking=thinking, speak=bool(shown))
    turn = chat.turn_of(before, whole)
    if turn is None:
        raise _failure(chat, thinking, "it shows earlier messages otherwise once others follow")
    last = turn.rfind(_last_words(said))
    if last < 0:
        if said.get("tool_calls"):
            raise _failure(chat, thinking, "it shows no tool calls", _WRITES_TOOLS)
        raise _failure(chat, thinking, "it does not show what the assistant says")
    ends = [place + len(end) for end in chat.ends if (place := turn.find(end, last)) >= 0]
    if ends:
        return chat.encoder.encode(turn[: min(ends)], marks)
    return chat.encoder.encode(turn + chat.end_before(after, thinking=thinking), marks)


def _check_conversation(
    chat: TemplateChat, tools: Sequence[ToolSpec], calls: Sequence[int], *, thinking: bool
) -> None:
    """Check turns of `calls[i]` calls each, then an answer and a user's next question; every turn
    once ended by the policy and once cut at its length."""
    messages: list[Message] = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "Which?"},
    ]
    try:
        ids = chat.opening(messages, tools, thinking=thinking)
    except ValueError:  # Gemma's template, for one, refuses system messages
        del messages[0]
        ids = chat.opening(messages, tools, thinking=thinking)
    for turn, count in enumerate((*calls, 0)):
        said = _words(turn, count, tools, thinking=thinking)
        after = _answers(said) or [{"role": "user", "content": "And then?"}]
        try:
            sampled = turn_ids(chat, messages, said, after, tools, thinking=thinking)
        except ValueError:
            if count < 2:
                raise
            return  # a template for one call a turn
        whole = chat.opening([*messages, said, *after], tools, thinking=thinking)
        for name, last in (("ended", sampled), ("cut", sampled[:-1])):
            extended = chat.extend([*ids, *last], after, thinking=thinking)
            if extended is not None and not _same(chat, extended, whole):
                case = f"a turn that was {name}, {len(after)} {after[0]['role']} messages after it"
                raise _failure(chat, thinking, f"{case}: {_difference(chat, extended, whole)}")
            if count and extended is None:
                raise _failure(chat, thinking, "it cannot go on after a tool's result")
        if count and f"Thought{turn}z" not in chat.decode(whole) and chat.has_modes() and thinking:
            raise _failure(chat, thinking, "it drops the thinking of a turn that calls tools")
        ids = chat.extend([*ids, *sampled], after, thinking=thinking) or whole
        messages += [said, *after]


def _check_controls(chat: TemplateChat, tools: Sequence[ToolSpec], *, thinking: bool) -> None:
    """Check that no text of a message becomes a control token, that encoding in pieces changes
    nothing, and that the policy is shown the tools."""
    hostile = "x".join(chat.encoder.controls)
    counts: list[int] = []
    for content in ("Which?", hostile):
        ids = chat.opening([{"role": "user", "content": content}], tools, thinking=thinking)
        counts.append(sum(index in chat.encoder.text_of for index in ids))
    if counts[0] != counts[1]:
        raise _failure(
            chat, thinking, "control tokens in a message's text reach the policy", _OTHER_TOKENIZER
        )
    text, marks = chat.text([{"role": "user", "content": "Which?"}], tools, thinking=thinking)
    if chat.encoder.encode(text, marks) != chat.encoder.encode_in_pieces(text, marks):
        raise _failure(
            chat, thinking, "its tokenizer joins text across control tokens", _OTHER_TOKENIZER
        )
    missing = [tool.name for tool in tools if tool.name not in text]
    if missing:
        what = f"it does not show the policy the tool {missing[0]}"
        raise _failure(chat, thinking, what, _WRITES_TOOLS)


def _words(turn: int, count: int, tools: Sequence[ToolSpec], *, thinking: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": "" if count else f"Said{turn}z"}
    if thinking:
        said["reasoning_content"] = f"Thought{turn}z"
    if count:
        said["tool_calls"] = [
            call_message(
                f"call_{turn}_{i}", tools[i % len(tools)].name, {"name": f"Asked{turn}x{i}z"}
            )
            for i in range(count)
        ]
    return said


def _answers(said: Message) -> list[Message]:
    return [
        {
            "role": "tool",
            "content": f"Result {call['id']}",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
        }
        for call in said.get("tool_calls", ())
    ]


def _last_words(said: Message) -> str:
    calls = said.get("tool_calls")
    return list(calls[-1]["function"]["arguments"].values())[-1] if calls else said["content"]


def _same(chat: TemplateChat, ids: Sequence[int], others: Sequence[int]) -> bool:
    if list(ids) == list(others):
        return True
    opened, closed = map(re.escape, (chat.marks.open, chat.marks.close))
    closed_at_once = re.compile(rf"\A\s*(?:{opened}\s*)?{closed}\s*")
    turns = [
        [closed_at_once.sub("", turn).lstrip() for turn in chat.decode(each).split(chat.header)]
        for each in (ids, others)
    ]
    return turns[0] == turns[1]


def _difference(chat: TemplateChat, ids: Sequence[int], others: Sequence[int]) -> str:
    ours, whole = chat.decode(ids), chat.decode(others)
    place = next((i for i, (a, b) in enumerate(zip(ours, whole, strict=False)) if a != b), 0)
    start = max(place - 20, 0)
    return f"extended {ours[start : place + 60]!r}, rendered whole {whole[start : place + 60]!r}"


def _failure(chat: TemplateChat, thinking: bool, what: str, cure: str = "") -> ValueError:
    mode = "with" if thinking else "without"
    other = "without" if thinking else "with"
    usual = (
        f"Train {other} thinking (`thinking` of the data source), or save the tokenizer with a "
        "chat_template that keeps its history as it was"
    )
    return ValueError(
        f"{chat.renderer.name} (format {chat.format.name}) cannot extend a conversation {mode} "
        f"thinking: {what}. {cure or usual}"
    )
