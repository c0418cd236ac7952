"""What a run with turns stands on, proved for the model's own template before it starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from keel.rl.turns import Malformed, Message, ToolCall, ToolSpec
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.encoding import free_marks
from keel.rollout.chat.render import call_message
from keel.rollout.chat.thinking import THINK_END, THINK_START

_CLOSED_AT_ONCE = re.compile(rf"\A\s*(?:{THINK_START}\s*)?{THINK_END}\s*")
_MODE = re.compile(rf"(?:{THINK_START}\s*)?(?:{THINK_END}\s*)?\Z")
_OTHER_TOKENIZER = "Name a tokenizer of byte-level BPE in model.tokenizer"
_LISTS_TOOLS = "Save the tokenizer with a chat_template that lists the tools"
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
    """Prove on short conversations that `extend` gives what one render of the whole would give,
    that no text becomes a control token, and that tools are shown. `modes`: with thinking or not.

    Equal but for one thing: the empty think block that a template puts before a turn without
    thinking, and leaves out of its history, stays. The policy was sampled after it.

    Raises:
        ValueError: it does not hold; names the template, the case and the cure.
    """
    for thinking in modes:
        for calls in ((), (1,), (1, 1), (2, 1), (3, 1, 2)) if tools else ((),):
            _check_conversation(chat, tools, calls, thinking=thinking)
        _check_controls(chat, tools, thinking=thinking)


def check_calls_in_thinking(chat: TemplateChat, *, tools: Sequence[ToolSpec] = _TOOLS) -> None:
    """Prove that a call which stands in the thinking is read as one, that a result is put after it
    as after any other, that the thinking then goes on, and that a call after it is none. `chat`:
    one with `tools_in_thinking`, for which the prefix law holds.

    Raises:
        ValueError: it does not hold; names the template, the case and the cure.
    """
    cure = "Leave agents.tools_in_thinking off, or choose a model whose template marks thinking"
    messages: list[Message] = [{"role": "user", "content": "Which?"}]
    said = _words(0, 1, tools, thinking=True)
    after = _answers(said)
    ids = chat.opening(messages, tools, thinking=True)
    ended = turn_ids(chat, messages, said, after, tools, thinking=True)
    text = chat.decode(ended)
    if THINK_END not in text:
        raise _failure(chat, True, f"it has no {THINK_END} that a call could stand before", cure)
    inside = chat.encoder.encode(text.replace(THINK_END, ""), free_marks(text))
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
    rest = chat.encoder.encode(f"Thought1z{THINK_END}Said1z", free_marks(()))
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
    """The ids that the policy samples to say `said`, which ends in text that stands nowhere else,
    with its end of the turn.

    Raises `ValueError` if the template shows `messages` otherwise once `said` and `after` follow.
    """
    before, _ = chat.text(messages, tools, thinking=thinking)
    # A user's next message ends the thinking: the turn is looked at before that.
    shown = after if after[0]["role"] == "tool" else ()
    conversation = [*messages, said, *shown]
    whole, marks = chat.text(conversation, tools, thinking=thinking, speak=bool(shown))
    without_mode = _MODE.sub("", before)
    if whole.startswith(before):
        start = len(before)
    elif whole.startswith(without_mode):
        start = len(without_mode)
    else:
        raise _failure(chat, thinking, "it shows earlier messages otherwise once others follow")
    last = whole.rindex(_last_words(said))
    ends = [place + len(end) for end in chat.ends if (place := whole.find(end, last)) >= 0]
    if ends:
        return chat.encoder.encode(whole[start : min(ends)], marks)
    return chat.encoder.encode(whole[start:] + chat.end_before(after, thinking=thinking), marks)


def _check_conversation(
    chat: TemplateChat, tools: Sequence[ToolSpec], calls: Sequence[int], *, thinking: bool
) -> None:
    """Turns of `calls[i]` calls each, then an answer and a user's next question; every turn ended
    by the policy and cut at its length."""
    messages: list[Message] = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "Which?"},
    ]
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
    """No text of a message becomes a control token, and encoding in pieces changes nothing."""
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
        raise _failure(chat, thinking, what, _LISTS_TOOLS)


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
    turns = [
        [_CLOSED_AT_ONCE.sub("", turn).lstrip() for turn in chat.decode(each).split(chat.header)]
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
        f"{chat.renderer.name} (format {chat.format.name}) does not let a conversation grow "
        f"{mode} thinking: {what}. {cure or usual}"
    )
