"""Checks, before a run starts, that a model's chat template allows conversations to be extended."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from keel.model.hub import hub_options
from keel.model.load import load_model_config
from keel.rl.turns import Malformed, Message, ToolCall, ToolSpec
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.render import call_message

_TOOLS = tuple(
    ToolSpec(
        name=name,
        description=f"Looks a {name} up.",
        parameters={"type": "object", "properties": {"name": {"type": "string"}}},
    )
    for name in ("city", "hotel")
)


def check_prefix_preserving(
    chat: TemplateChat, *, tools: Sequence[ToolSpec] = _TOOLS, modes: Sequence[bool] = (True, False)
) -> None:
    """Check that extending a conversation turn by turn gives the same ids as rendering it all at
    once, that ordinary text never becomes a control token, and that tools are shown. Raises
    ValueError naming the template, the problem and a fix.

    `modes` selects thinking, no thinking, or both. One difference is allowed: an empty think block
    that a template puts before a turn but omits from the history may remain, because the policy
    sampled the turn after it.
    """
    for thinking in modes:
        try:
            for calls in ((), (1,), (1, 1), (2, 1), (3, 1, 2)) if tools else ((),):
                _check_conversation(chat, tools, calls, thinking=thinking)
            _check_controls(chat, tools, thinking=thinking)
        except ValueError as error:
            mode, other = ("with", "without") if thinking else ("without", "with")
            raise ValueError(
                f"{chat.label} cannot extend a conversation {mode} thinking: {error}. Train "
                f"{other} thinking (`thinking` of the data source), or set model.chat_template or "
                "model.tokenizer to one that keeps its history and shows tools and calls"
            ) from error


def check_calls_in_thinking(chat: TemplateChat) -> None:
    """Check that the policy can call tools only while thinking, and that it resumes thinking after
    the tool result. Raises ValueError naming the template and a fix.

    `chat` must have `tools_in_thinking` set and pass `check_prefix_preserving`.
    """
    messages: list[Message] = [{"role": "user", "content": "Which?"}]
    reply = _make_reply(0, 1, _TOOLS, thinking=True)
    after, close = _tool_results(reply), chat.marks.close
    ids = chat.opening(messages, _TOOLS, thinking=True)
    outside = chat.turn_ids(messages, reply, after, _TOOLS, thinking=True)
    text = chat.decode(outside)
    inside = chat.encoder.encode(text.replace(close, ""))
    call = chat.parse(inside, _TOOLS, thinking=True, turn=0)
    late = chat.parse(outside, _TOOLS, thinking=True, turn=0)
    first, second = ([*ids, *turn] for turn in (inside, outside))
    extended, usual = (chat.extend(turn, after, thinking=True) for turn in (first, second))
    rest = chat.encoder.encode(f"Thought1z{close}Said1z")
    end = chat.parse(rest, _TOOLS, thinking=True, turn=1, in_thinking=True)
    if not (
        close in text
        and [type(one) for one in call.calls] == [ToolCall]
        and [type(one) for one in late.calls] == [Malformed]
        and call.in_thinking
        and usual is not None
        and extended == [*first, *usual[len(second) :]]
        and (end.reasoning, end.content, end.in_thinking) == ("Thought1z", "Said1z", False)
    ):
        raise ValueError(
            f"{chat.label}: tool calls inside its thinking do not work. Turn "
            "agents.tools_in_thinking off, or use a model whose template marks thinking"
        )


def _check_conversation(
    chat: TemplateChat, tools: Sequence[ToolSpec], calls: Sequence[int], *, thinking: bool
) -> None:
    """Check a conversation in which turn i makes `calls[i]` tool calls, followed by an answer and
    another question. Each turn is extended both as a finished turn and as a truncated one."""
    messages: list[Message] = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "Which?"},
    ]
    try:
        ids = chat.opening(messages, tools, thinking=thinking)
    except ValueError:  # Gemma's template refuses system messages
        del messages[0]
        ids = chat.opening(messages, tools, thinking=thinking)
    for turn, count in enumerate((*calls, 0)):
        reply = _make_reply(turn, count, tools, thinking=thinking)
        after = _tool_results(reply) or [{"role": "user", "content": "And then?"}]
        try:
            sampled = chat.turn_ids(messages, reply, after, tools, thinking=thinking)
        except ValueError:
            if count < 2:
                raise
            return  # a template with one call per turn
        made = reply.get("tool_calls")
        last = made[-1]["function"]["arguments"]["name"] if made else reply["content"]
        if last not in chat.decode(sampled):
            raise ValueError("it does not show the assistant's text or tool calls")
        whole = chat.opening([*messages, reply, *after], tools, thinking=thinking)
        for turn_end in (sampled, sampled[:-1]):
            extended = chat.extend([*ids, *turn_end], after, thinking=thinking)
            if extended is None and count:
                raise ValueError("it cannot continue after a tool's result")
            if extended is not None and not _same_ids(chat, extended, whole):
                ended = "ended" if turn_end is sampled else "cut"
                raise ValueError(
                    f"a {after[0]['role']} message after a turn that was {ended} is "
                    f"{chat.decode(extended[-40:])!r}, but {chat.decode(whole[-40:])!r} when the "
                    "conversation is rendered whole"
                )
        ids = chat.extend([*ids, *sampled], after, thinking=thinking) or whole
        messages += [reply, *after]


def _check_controls(chat: TemplateChat, tools: Sequence[ToolSpec], *, thinking: bool) -> None:
    counts: list[int] = []
    for content in ("Which?", "x".join(chat.encoder.controls)):
        ids = chat.opening([{"role": "user", "content": content}], tools, thinking=thinking)
        counts.append(sum(index in chat.encoder.text_of for index in ids))
    if counts[0] != counts[1]:
        raise ValueError("control tokens in a message's text reach the policy")
    text = chat.text([{"role": "user", "content": "Which?"}], tools, thinking=thinking)
    if chat.encoder.encode(text) != chat.encoder.encode_in_pieces(text):
        raise ValueError("its tokenizer joins text across control tokens; byte-level BPE does not")
    if missing := [tool.name for tool in tools if tool.name not in text]:
        raise ValueError(f"it does not show the policy the tool {missing[0]}")


def _make_reply(
    turn: int, count: int, tools: Sequence[ToolSpec], *, thinking: bool
) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": "" if count else f"Said{turn}z"}
    if thinking:
        reply["reasoning_content"] = f"Thought{turn}z"
    if count:
        names = [tools[i % len(tools)].name for i in range(count)]
        reply["tool_calls"] = [
            call_message(f"call_{turn}_{i}", name, {"name": f"Asked{turn}x{i}z"})
            for i, name in enumerate(names)
        ]
    return reply


def _tool_results(reply: Message) -> list[Message]:
    return [
        {
            "role": "tool",
            "content": f"Result {call['id']}",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
        }
        for call in reply.get("tool_calls", ())
    ]


def _same_ids(chat: TemplateChat, ids: Sequence[int], others: Sequence[int]) -> bool:
    if list(ids) == list(others):
        return True
    opened, closed = map(re.escape, (chat.marks.open, chat.marks.close))
    empty_thinking = re.compile(rf"\A\s*(?:{opened}\s*)?{closed}\s*")
    turns = [
        [empty_thinking.sub("", turn).lstrip() for turn in chat.decode(each).split(chat.header)]
        for each in (ids, others)
    ]
    return turns[0] == turns[1]


def ends_of(path: str) -> tuple[int, ...]:
    """Return a model's `eos_token_id`s, the tokens that make the engine end any completion.

    Like vLLM, this reads generation_config.json, or config.json if that is missing. Raises
    ConfigError if neither exists.
    """
    try:
        config = GenerationConfig.from_pretrained(path, **hub_options(path))
    except OSError:
        config = GenerationConfig.from_model_config(load_model_config(path))
    ends = config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())
